"""Whatever runs on an engine's GPU runs while that GPU is PyTorch's current one, and the caller's is current again at
once: Triton's kernels, streams, events and graphs go by it. With a stand-in that only takes notes.
"""

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from stages.s01_forward.sampling_params import SamplingParams
from stages.s03_paged_kv.llm import LLM as Stage03
from stages.s04_continuous_batching import memory
from stages.s04_continuous_batching.llm import LLM as Stage04
from stages.s06_prefix_cache.llm import LLM as Stage06
from stages.s07_cuda_graph.fake_graphs import FakeGraphs
from stages.s07_cuda_graph.llm import LLM as Stage07
from stages.s08_speculative.llm import LLM as Stage08
from stages.s09_server.llm import LLM as Stage09

DRAFT = {"speculative": "layers:1", "speculative_least_rate": 0.0, "speculative_max_rows": 16}
ENGINES: list[tuple[Any, dict[str, Any]]] = [
    (Stage03, {}), (Stage04, {}), (Stage06, {}), (Stage07, {}), (Stage07, {"few_rows": False}),
    (Stage08, DRAFT), (Stage09, DRAFT),
]  # fmt: skip


class Current:
    """PyTorch's current GPU: `of` is the stack of those that were made current."""

    def __init__(self) -> None:
        self.of: list[torch.device] = []
        self.launches = 0

    @contextmanager
    def device_of(self, tensor):
        self.of.append(tensor.device)
        try:
            yield
        finally:
            self.of.pop()

    def watched(self, function):
        """A function that launches kernels, or something else that goes by the current GPU."""

        def launch(*arguments: Any, **keys: Any) -> Any:
            assert self.of, "it would go to whatever GPU is current"
            self.launches += 1
            return function(*arguments, **keys)

        return launch


@pytest.fixture
def current(monkeypatch):
    found = Current()
    monkeypatch.setattr(torch.cuda, "device_of", found.device_of)
    return found


def watching(llm_class: Any, current: Current) -> Any:
    """With every operation that Triton serves on a GPU watched."""

    class Watched(llm_class):
        def make_ops(self):
            ops = super().make_ops()
            kernels = ("paged_attention", "store_kv") if llm_class in (Stage03, Stage04, Stage06) else (
                "paged_attention", "store_kv", "rms_norm", "add_rms_norm", "norm_rope", "silu_mul"
            )  # fmt: skip
            return replace(ops, **{name: current.watched(getattr(ops, name)) for name in kernels})

    return Watched


@pytest.mark.parametrize(("llm_class", "options"), ENGINES, ids=lambda x: getattr(x, "__module__", None))
def test_steps(llm_class, options, current, tiny):
    """Between two tokens the caller's GPU is current, also while streams are read in turns and when one is closed."""
    llm = watching(llm_class, current)(tiny("qwen2"), device="cpu", kv_cache_mb=4, **options)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    streams = [llm.stream([[5, 6, 7], [8]], replace(params, n=2)), llm.stream([[9] * 20], params)]
    for _ in range(4):
        for stream in streams:
            assert next(stream) and not current.of
    streams[0].close()
    assert len(list(streams[1])) == 2 and not current.of
    assert current.launches > 20


def test_a_step_that_fails(current, tiny, monkeypatch):
    """The caller's GPU is current again."""
    llm = Stage07(tiny("qwen2"), device="cpu", kv_cache_mb=4)
    monkeypatch.setattr(llm.engine.runner, "run", current.watched(lambda *_: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        llm.generate([[5]])
    assert current.launches and not current.of


class Event:
    """Recorded in the current GPU's stream."""

    def __init__(self, current: Current) -> None:
        self.record, self.synchronize = current.watched(lambda: None), lambda: None


def test_events_and_graphs(current, tiny):
    """Graphs are captured when a size is first met, and replayed."""
    llm = Stage07(tiny("qwen2"), device="cpu", kv_cache_mb=4, max_num_seqs=4)
    runner = llm.engine.runner
    runner.graphs = FakeGraphs(runner.step, 4, llm.max_num_batched_tokens, llm.max_model_len)
    for name in ("capture", "replay"):
        setattr(runner.graphs, name, current.watched(getattr(runner.graphs, name)))
    for ring in (runner.mailbox, runner.out):
        ring.events = [Event(current) for _ in ring.events]
    llm.generate([[5, 6, 7], [8]], SamplingParams(max_tokens=6, ignore_eos=True))
    assert runner.graphs.replays == 6 and current.launches >= 6 + 2 + 6


@pytest.mark.parametrize("llm_class", [Stage07, Stage08, Stage09])
def test_streams_and_graphs_at_the_start(llm_class, current, tiny):
    class Watched(llm_class):
        def make_step(self, store):
            return current.watched(super().make_step)(store)

    Watched(tiny("qwen2"), device="cpu", kv_cache_mb=4, **(DRAFT if llm_class is Stage08 else {}))
    assert current.launches == 1 and not current.of


def test_the_largest_step(current, tiny, monkeypatch):
    """It is run to find out how much memory it takes."""
    llm = watching(Stage07, current)(tiny("qwen2"), device="cpu", kv_cache_mb=4)
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    memory.largest_step_bytes(llm.model, 8, 2)
    assert current.launches and not current.of
