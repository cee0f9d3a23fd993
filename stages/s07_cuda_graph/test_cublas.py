"""Who gets products without a workspace, and what a user has said."""

import os
from types import SimpleNamespace

import pytest
import torch

from stages.s07_cuda_graph import llm
from stages.s07_cuda_graph.cublas import NO_WORKSPACE, drop_workspace

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """An H200, and an environment that says nothing; both as before afterwards."""
    for name in NO_WORKSPACE:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: torch._C._BlasBackend.Default)


def said() -> dict[str, str]:
    return {name: os.environ[name] for name in NO_WORKSPACE if name in os.environ}


def test_where_it_pays():
    drop_workspace(GPU)
    assert said() == NO_WORKSPACE == {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}


def test_what_was_said_before_stays(monkeypatch):
    """As with deterministic products, for which PyTorch asks for this."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    drop_workspace(GPU)
    assert said() == NO_WORKSPACE | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch.cuda, "get_device_capability", lambda device: (8, 0)),
        (torch.version, "hip", "6.4"),
        (torch.backends.cuda, "preferred_blas_library", lambda: torch._C._BlasBackend.Cublaslt),
    ],
)
def test_where_it_was_not_measured_or_is_refused(monkeypatch, owner, name, value):
    monkeypatch.setattr(owner, name, value)
    drop_workspace(GPU)
    assert said() == {}


@pytest.mark.parametrize("kernels", [False, True])
def test_an_engine_with_kernels_asks_for_it_before_its_first_product(monkeypatch, kernels):
    asked: list[torch.device] = []
    monkeypatch.setattr(llm, "drop_workspace", asked.append)
    monkeypatch.setattr(llm, "fused_ops", lambda device, fused: (device, fused))
    made = llm.LLM.make_ops(SimpleNamespace(kernels=kernels, device=GPU, fused=True))
    assert made == (GPU, True) and asked == [GPU] * kernels
