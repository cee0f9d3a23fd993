"""`LLM` on the fast engine: graphs, fused kernels and overlap, each with a switch of its own."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from typing import Any, Literal

import torch

from stages.s01_forward.inputs import PromptRequest
from stages.s01_forward.outputs import TokenEvent
from stages.s02_kv_cache.kv_store import KVStore
from stages.s03_paged_kv.attention_plan import AttentionShape
from stages.s03_paged_kv.ops import PagedOps
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.engine import Engine
from stages.s04_continuous_batching.memory import largest_step_bytes
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Scheduler
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s06_prefix_cache.llm import LLM as PrefixLLM
from stages.s07_cuda_graph.ahead_scheduler import AheadScheduler
from stages.s07_cuda_graph.cublas import drop_workspace
from stages.s07_cuda_graph.device_state import DeviceState
from stages.s07_cuda_graph.fused_ops import fused_ops, has_kernels
from stages.s07_cuda_graph.graphs import Graphs, graphs_bytes
from stages.s07_cuda_graph.overlap_engine import OverlapEngine
from stages.s07_cuda_graph.runner import GraphRunner
from stages.s07_cuda_graph.steady_scheduler import SteadyScheduler
from stages.s07_cuda_graph.step import Step, few_rows, step_ops


class LLM(PrefixLLM):
    """Five switches, all on; on a CPU there are no graphs, and `cpu_*.py` stand where kernels do on a GPU. One is off:

    compiled: on a CPU, compile decode steps of few rows before anybody is served, with `torch.compile`. It takes a C++
    compiler, and half a minute the first time; where it cannot be done, a warning says so.

    graphs: replay each step as one CUDA graph; capture: record them "lazy", when a size is first met, or at "start".
    fused: Triton kernels for what lies between the matrix products. few_rows: forward passes of their own for decode
    steps of few rows and of many, where they were measured to pay. common_prefix: in graphs, read what all rows begin
    with once for all of them; their neighbours then decide about the last bits of a row. overlap: plan a step while the
    one before is computed.
    """

    def __init__(
        self,
        *args: Any,
        graphs: bool = True,
        capture: Literal["lazy", "start"] = "lazy",
        fused: bool = True,
        few_rows: bool = True,
        common_prefix: bool = True,
        overlap: bool = True,
        compiled: bool = False,
        **options: Any,
    ) -> None:
        if capture not in ("lazy", "start"):
            raise ValueError(f"capture is {capture!r}; it must be 'lazy' or 'start'")
        self.graphs, self.capture, self.fused, self.few_rows = graphs, capture, fused, few_rows
        self.common_prefix, self.overlap, self.compiled = common_prefix, overlap, compiled
        super().__init__(*args, **options)

    @property
    def kernels(self) -> bool:
        """Do this stage's Triton kernels run?"""
        return self.fused and has_kernels(self.device)

    def make_ops(self) -> PagedOps:
        """Triton's where there is a GPU for it, and products without memsets."""
        if self.kernels:
            drop_workspace(self.device)
        return fused_ops(self.device, fused=self.fused)

    def reserved_bytes(self) -> int:
        """The state on the device, and the memory that all graphs share: what the largest of them takes."""
        if self.device.type != "cuda":
            return 0
        history = (self.max_num_seqs + 1) * self.config.vocab_size * torch.int16.itemsize
        if not self.graphs:
            return history
        largest = largest_step_bytes(self.model, self.max_num_batched_tokens, self.max_num_seqs)
        heads = self.config.num_heads
        return history + largest + graphs_bytes(self.max_num_seqs, self.max_num_batched_tokens, heads)

    def make_scheduler(self, cache: PagedCache, swap: SwapSpace) -> Scheduler:
        """One that can plan ahead."""
        return SteadyScheduler(cache, swap, self.max_num_seqs, self.max_num_batched_tokens, self.max_chunk)

    def build_engine(self, num_blocks: int, block_size: int, swap_mb: float) -> Engine:
        """As before. Streams and graphs are made on the GPU that is PyTorch's current one: here, the engine's own."""
        with torch.cuda.device_of(self.model.cos):
            return super().build_engine(num_blocks, block_size, swap_mb)

    def make_engine(self, scheduler: Scheduler, store: KVStore, host_store: KVStore) -> Engine:
        """A runner over a state on the device, and the loop with its lag."""
        assert isinstance(scheduler, AheadScheduler)
        step, graphs = self.make_step(store)
        runner = GraphRunner(step, host_store, graphs, self.max_num_batched_tokens)
        return OverlapEngine(scheduler, runner, ahead=int(self.overlap))

    def make_step(self, store: KVStore) -> tuple[Step, Graphs | None]:
        """A state on the device, the step over it, and graphs of the step."""
        config, block_size = self.config, store.data.shape[3]
        shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, block_size, self.dtype.itemsize)
        blocks = -(-self.max_model_len // block_size)
        state = DeviceState(self.max_num_seqs, blocks, config.vocab_size, self.device)
        own_ways = self.few_rows and (self.kernels or self.device.type == "cpu")
        few = few_rows(self.model, self.compiled) if own_ways else ()
        step = Step(self.model, self.ops, step_ops(self.kernels), store, shape, state, few)
        if not self.graphs or not has_kernels(self.device):
            return step, None
        graphs = Graphs(step, self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len, self.common_prefix)
        if self.capture == "start":
            graphs.capture_all()
        return step, graphs

    def run(self, requests: Rows[PromptRequest]) -> Iterator[TokenEvent]:
        """As before. Meanwhile the garbage collector leaves alone what was there when it began: weights, caches, books.

        Else it would go through all of these again and again: some hundred thousand objects each time.
        """
        gc.freeze()
        try:
            yield from super().run(requests)
        finally:
            gc.unfreeze()

    def add(self, request: PromptRequest, inbox: deque[TokenEvent]) -> list[Request]:
        """As before. It leaves alone what is queued, too: lists of thousands of ids, just when the GPU waits."""
        entries = super().add(request, inbox)
        gc.freeze()
        return entries
