"""Which GPU a name means, on machines with none, one and several."""

import pytest
import torch

from stages.s01_forward.frontend import pick_device


@pytest.fixture
def machine(monkeypatch):
    """Has so many GPUs, of which one is PyTorch's current one; None: no GPU has been used yet, and none may be now."""

    def pretend(count: int, current: int | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: current is not None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1 / 0 if current is None else current)

    return pretend


@pytest.mark.parametrize(
    ("count", "current", "name", "device"),
    [
        (0, None, "auto", "cpu"),
        (0, None, "cpu", "cpu"),
        (1, 0, "cpu", "cpu"),
        (1, 0, "auto", "cuda:0"),
        (1, 0, "cuda", "cuda:0"),
        (1, 0, "cuda:0", "cuda:0"),
        (2, None, "auto", "cuda:0"),
        (2, None, "cuda", "cuda:0"),
        (2, None, "cuda:1", "cuda:1"),
        (2, 1, "auto", "cuda:1"),
        (2, 1, "cuda", "cuda:1"),
        (2, 1, "cuda:0", "cuda:0"),
        (12, 3, "cuda:11", "cuda:11"),
    ],
)
def test_a_gpu_has_a_number(count, current, name, device, machine):
    """Without one it is the GPU that is current now: later another may be."""
    machine(count, current)
    assert str(pick_device(name)) == device


@pytest.mark.parametrize(
    ("count", "name", "words"),
    [
        (1, "cuda:1", "device 'cuda:1': this machine has 1 CUDA GPU: cuda:0"),
        (2, "cuda:3", "device 'cuda:3': this machine has 2 CUDA GPUs: cuda:0, cuda:1"),
        (4, "cuda:4", "device 'cuda:4': this machine has 4 CUDA GPUs: cuda:0, cuda:1, cuda:2, cuda:3"),
        (8, "cuda:99999999999999999999", "this machine has 8 CUDA GPUs: cuda:0, cuda:1"),
        (0, "cuda:1", f"device 'cuda:1': PyTorch {torch.__version__} sees no CUDA GPU here; use 'cpu' or 'auto'"),
        (0, "cuda", "sees no CUDA GPU here"),
        *((2, name, "is not supported") for name in ("cuda:", "cuda:-1", "cuda:1.0", "cuda:a", "cpu:0", "auto:1", "")),
    ],
)
def test_what_is_not_there_is_refused(count, name, words, machine):
    machine(count)
    with pytest.raises(ValueError) as caught:
        pick_device(name)
    assert words in str(caught.value)
