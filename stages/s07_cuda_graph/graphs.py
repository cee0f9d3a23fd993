"""CUDA graphs: a step's launches recorded once and replayed as one, for each padded size of step."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from stages.s03_paged_kv.attention_plan import KernelPlan
from stages.s04_continuous_batching.plan import Plan
from stages.s07_cuda_graph.chunk_tiles import LEAST_QUERIES, chunk_tiles
from stages.s07_cuda_graph.common_prefix import LEAST_ROWS
from stages.s07_cuda_graph.padded_plan import mixed_size, padded_plan
from stages.s07_cuda_graph.step import Step, StepOutputs
from stages.s07_cuda_graph.step_inputs import NO_ROW, StepInputs, StepSize

log = logging.getLogger(__name__)
MIXED_TOKENS = (32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144)  # of a step with chunks; and the budget
MIXED_ROWS = (4, 16, 64, 256, 1024)
MANY_TOKENS, MANY_ROWS = 1024, 64  # beyond so many tokens, fewer rows than these take no less time
LAUNCH_SECONDS = 1.1e-3  # of the host, for the operations of one layer, one by one; as measured
FLOPS = 6e14  # a second, of large products on an H200
SLACK = 16 / 15  # how much longer a step may become before launching it one by one is better
GRAPH_BYTES = 5 * 2**20  # of the driver for one recorded graph, as measured, beside the tensors' pool


def decode_buckets(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 up to 64, 16 up to 256, 64 beyond: at most 7 rows of padding, or a fifth."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 64, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def mixed_buckets(max_num_seqs: int, max_num_tokens: int) -> tuple[list[int], list[int]]:
    """Tokens and rows, each rounded up on its own; the most rows are one more than can run: a row for padding."""
    tokens = [*(tokens for tokens in MIXED_TOKENS if tokens < max_num_tokens), max_num_tokens]
    return tokens, [rows for rows in MIXED_ROWS if rows <= max_num_seqs] + [max_num_seqs + 1]


def rows_beside(tokens: int, buckets: list[int]) -> list[int]:
    """The numbers of rows that a mixed step of so many tokens may be padded to.

    It has no more rows than tokens, and one for padding: a number is left out where the one below has room for these.
    """
    wanted = buckets if tokens <= MANY_TOKENS else [rows for rows in buckets if rows >= MANY_ROWS] or buckets[-1:]
    return [rows for below, rows in pairwise([0, *wanted]) if below <= tokens]


def graphs_bytes(max_num_seqs: int, max_num_tokens: int, num_heads: int) -> int:
    """Device memory of all graphs but for their tensors."""
    tokens, rows = mixed_buckets(max_num_seqs, max_num_tokens)
    chunks_alone = sum(each * num_heads >= LEAST_QUERIES for each in tokens)
    mixed = sum(len(rows_beside(each, rows)) for each in tokens) + chunks_alone
    return GRAPH_BYTES * (len(decode_sizes(decode_buckets(max_num_seqs))) + mixed)


def decode_size(rows: int, queries: int) -> StepSize:
    """Up to `queries` tokens in each of `rows` rows. If more than one, rows may have fewer: a row of padding more."""
    return StepSize(rows * queries, rows + (queries > 1), queries)


def decode_sizes(buckets: list[int], common: bool = True) -> list[StepSize]:
    """One token in each row: of each number of rows one size, and from where it pays one for rows that begin alike."""
    sizes = [decode_size(rows, queries=1) for rows in buckets]
    return sizes + [replace(size, common=True) for size in sizes if common and size.rows >= LEAST_ROWS]


@dataclass(frozen=True)
class Captured:
    """One graph: inputs at fixed addresses, and where its outputs come to lie."""

    inputs: StepInputs
    plan: KernelPlan
    graph: torch.cuda.CUDAGraph
    outputs: StepOutputs


class Graphs:
    """Captures a size when it is first met, or all of them at start. All graphs share one pool of memory.

    common: may rows that begin alike have their common keys read once? `replays` and `eager` count the steps; `eager`
    by the reason why no graph served them.
    """

    def __init__(self, step: Step, max_num_seqs: int, max_num_tokens: int, longest: int, common: bool = True) -> None:
        self.step, self.longest = step, longest
        self.decode_rows = decode_buckets(max_num_seqs)
        self.mixed_tokens, self.mixed_rows = mixed_buckets(max_num_seqs, max_num_tokens)
        self.launch_seconds = LAUNCH_SECONDS * step.model.config.num_layers  # of a step without a graph, at least
        self.token_seconds = 2 * sum(weight.numel() for weight in step.model.parameters()) / FLOPS  # of each token
        self.chunks = chunk_tiles(step.shape, step.state.flat.device)
        self.common = common
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self.captured: dict[StepSize, Captured] = {}
        self.replays, self.eager = 0, Counter[str]()
        self.refused = ""  # why this model's step cannot be recorded
        self.no_memory = set[StepSize]()  # sizes that could not be recorded for want of it

    def size_of(self, plan: Plan, queries: int, common: int = 0) -> StepSize | None:
        """The smallest size that holds a plan; None, and the reason is counted, if it goes without a graph.

        queries: as in `StepSize`. common: `common_blocks` of the plan. Padding tokens need a padding row.
        """
        rows, tokens = len(plan.rows), plan.num_tokens
        if self.refused:
            self.eager[self.refused] += 1
            return None
        if queries:
            size = decode_size(self.decode_rows[bisect_left(self.decode_rows, rows)], queries)
            return replace(size, common=self.common and common > 0)
        padded = self.mixed_tokens[bisect_left(self.mixed_tokens, tokens)]
        if padded * self.token_seconds > max(self.launch_seconds, SLACK * tokens * self.token_seconds):
            self.eager[f"{padded} tokens would take longer than launching fewer one by one"] += 1
            return None
        buckets = rows_beside(padded, self.mixed_rows)
        room = buckets[bisect_left(buckets, rows + 1)]
        size = mixed_size(padded, room, self.step.shape, self.longest, self.chunks)
        alone = size.chunks and room == buckets[0] and all(row.span.num_new > 1 for row in plan.rows)
        return replace(size, only_chunks=alone)

    def get(self, size: StepSize) -> Captured | None:
        """The graph for a step of this size; None, and the reason is counted, if there is none.

        Instead of one for rows that begin alike, the usual one for as many rows will do.
        """
        captured = self.captured.get(size) or self.prepare(size)
        if captured is None and size.common:
            return self.get(replace(size, common=False))
        if captured is None:
            self.eager[self.refused or f"no memory to record {size.tokens} tokens in {size.rows} rows"] += 1
        return captured

    def prepare(self, size: StepSize) -> Captured | None:
        """Capture a size, unless that was tried before.

        Where memory does not suffice, this size alone has no graph. Any other error, be it of a kernel's compiler, says
        that this model's step cannot be recorded: no size has one from then on.
        """
        if self.refused or size in self.captured or size in self.no_memory:
            return self.captured.get(size)
        try:
            self.captured[size] = self.capture(size)
            return self.captured[size]
        except Exception as error:
            why = str(error)  # the error itself would keep alive what was begun
        if "out of memory" in why:  # PyTorch's words, and the driver's
            self.no_memory.add(size)
            log.warning("no graph for %s: %s", size, why)
            torch.cuda.empty_cache()
            if not self.captured:  # PyTorch closes a pool with the last graph that it serves
                self.pool = torch.cuda.graph_pool_handle()
        else:
            self.refused = f"cannot be recorded: {why}"
            log.warning("steps are launched one operation at a time; they %s", self.refused)
        return None

    def replay(self, captured: Captured) -> StepOutputs:
        """One step."""
        captured.graph.replay()
        self.replays += 1
        return captured.outputs

    def capture_all(self) -> None:
        """Every size, the largest first: the smaller ones then find room in the memory that it took."""
        sizes = decode_sizes(self.decode_rows, self.common)
        for tokens in self.mixed_tokens:
            rows = rows_beside(tokens, self.mixed_rows)
            mixed = [mixed_size(tokens, each, self.step.shape, self.longest, self.chunks) for each in rows]
            sizes += [*mixed, *(replace(size, only_chunks=True) for size in mixed[:1] if size.chunks)]
        for size in sorted(sizes, key=lambda size: (-size.tokens, -size.rows)):
            self.prepare(size)

    def capture(self, size: StepSize) -> Captured:
        """Run a step of padding alone: once, so that every kernel is compiled and loaded, and once for the record."""
        state = self.step.state
        inputs = StepInputs(size, state.blocks_per_slot, state.flat.device)
        inputs.packed.zero_()
        inputs.short_map[0] = inputs.long_map[0] = NO_ROW
        if size.decode:
            torch.arange(size.rows + 1, out=inputs.cu_q)
        else:
            inputs.cu_q[1:] = size.tokens
        plan = padded_plan(inputs, self.step.shape, self.longest)
        self.run(inputs, plan)
        graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` would also hand all cached memory back first, which the next large step must ask for again.
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool)
            try:
                outputs = self.run(inputs, plan)
            except BaseException:
                with suppress(RuntimeError):  # the record is broken; what broke it is the error to tell
                    graph.capture_end()
                raise
            graph.capture_end()
        log.debug("captured %s", size)
        return Captured(inputs, plan, graph, outputs)

    def run(self, inputs: StepInputs, plan: KernelPlan) -> StepOutputs:
        """What is recorded."""
        self.step.step_ops.fill(inputs, self.step.state, self.step.shape.block_size)
        return self.step.run(inputs, plan)
