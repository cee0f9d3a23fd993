"""Batches for the attention kernel on a GPU, and how they are timed. For the benchmark and the tuning sweep."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from reference.bench.harness import Timing
from stages.s03_paged_kv.attention_plan import KernelPlan
from stages.s03_paged_kv.tile_sizes import AttentionShape, TileSizes

Call = Callable[[], object]
ROTATED_BYTES = 512 << 20  # of K and V in one graph: 8 times an H200's L2 cache
MOST_BYTES = 40 << 30


@dataclass(frozen=True)
class Workload:
    """Independent layers of one batch, every layer with its own queries and its own part of the cache."""

    shape: AttentionShape
    q_lens: list[int]
    kv_lens: list[int]
    q: torch.Tensor  # [L, T, Hq, D]
    cache: torch.Tensor  # [L, 2, NB, BS, Hkv, D]
    block_table: torch.Tensor  # [R, MB]
    seq_lens: torch.Tensor  # [R]
    cu_q: torch.Tensor  # [R + 1]

    @property
    def kv_bytes(self) -> int:
        """K and V that one layer must read."""
        return 2 * sum(self.kv_lens) * self.shape.num_kv_heads * self.shape.head_dim * self.shape.element_size

    @property
    def flops(self) -> float:
        """One layer's two matrix products over the keys that causality lets each query see."""
        pairs = sum(q * (kv - q) + q * (q + 1) / 2 for q, kv in zip(self.q_lens, self.kv_lens, strict=True))
        return 4.0 * self.shape.num_heads * self.shape.head_dim * pairs


def make_workload(shape: AttentionShape, q_lens: list[int], kv_lens: list[int]) -> Workload:
    """Random bf16 contents, blocks in random places, as many layers as exceed the L2 cache several times."""
    torch.manual_seed(0)
    needed = [-(-n // shape.block_size) for n in kv_lens]
    num_blocks = sum(needed) + 1
    layer_bytes = 2 * num_blocks * shape.block_size * shape.num_kv_heads * shape.head_dim * shape.element_size
    layers = min(32, max(4, -(-ROTATED_BYTES // layer_bytes)), max(1, MOST_BYTES // layer_bytes))
    page = (shape.block_size, shape.num_kv_heads, shape.head_dim)
    cache = torch.empty(layers, 2, num_blocks, *page, dtype=torch.bfloat16, device="cuda").normal_()
    free = iter((torch.randperm(num_blocks - 1) + 1).tolist())
    table = [[next(free) for _ in range(n)] + [0] * (max(needed) - n) for n in needed]
    q = torch.randn(layers, sum(q_lens), shape.num_heads, shape.head_dim, device="cuda").to(torch.bfloat16)
    ints = functools.partial(torch.tensor, dtype=torch.int32, device="cuda")
    cu_q = ints([0, *torch.tensor(q_lens).cumsum(0).tolist()])
    return Workload(shape, q_lens, kv_lens, q, cache, ints(table), ints(kv_lens), cu_q)


def kernel_calls(work: Workload, sizes: TileSizes | None = None, keys_per_split: int | None = None) -> list[Call]:
    """One call of the kernel per layer."""
    from stages.s03_paged_kv import kernel

    plan = kernel.make_plan(
        work.q_lens, work.kv_lens, work.block_table, work.shape,
        short_sizes=sizes, long_sizes=sizes, keys_per_split=keys_per_split,
    )  # fmt: skip
    return plan_calls(work, plan)


def plan_calls(work: Workload, plan: KernelPlan) -> list[Call]:
    """The same, by a plan that is there."""
    from stages.s03_paged_kv.kernel import paged_attention

    scale, metadata = work.shape.head_dim**-0.5, (work.block_table, work.seq_lens, work.cu_q)
    return [
        functools.partial(paged_attention, q, cache[0], cache[1], *metadata, plan, scale)
        for q, cache in zip(work.q, work.cache, strict=True)
    ]


def time_calls(calls: list[Call], repeats: int = 15) -> Timing:
    """Seconds per call on the GPU, from replays of one graph that holds all calls."""
    return time_gpu(record(calls).replay, len(calls), repeats)


def record(calls: list[Call]) -> torch.cuda.CUDAGraph:
    """All calls as one graph; the first has run once before."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_gpu(run: Call, calls: int = 1, repeats: int = 15) -> Timing:
    """Seconds per call between two events around `run`, after 3 runs that do not count."""
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / calls)
    return Timing.of(times[3:])


def time_host(call: Call, repeats: int = 200) -> Timing:
    """Seconds that Python spends on one call, launches included, the GPU left to catch up between batches of 20."""
    times = []
    for _ in range(repeats // 20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call()
        times.append((time.perf_counter() - start) / 20)
    return Timing.of(times)


def copy_bandwidth() -> float:
    """Bytes read plus bytes written, per second, by a device-to-device copy of 4 GiB."""
    source = torch.empty(2 << 30, dtype=torch.int16, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / time_gpu(lambda: target.copy_(source)).median


def contiguous_calls(work: Workload, backend: str) -> list[Call]:
    """Attention of fresh prompts of one length by torch, on contiguous K and V: no block table to follow."""
    rows, length, dim = len(work.q_lens), work.q_lens[0], work.shape.head_dim
    kv = torch.randn(2, rows * length, work.shape.num_kv_heads, dim, device="cuda").to(torch.bfloat16)

    def flash(q: torch.Tensor) -> object:
        return torch.ops.aten._flash_attention_forward(
            q, kv[0], kv[1], work.cu_q, work.cu_q, length, length, 0.0, True, False, scale=dim**-0.5
        )

    def cudnn(q: torch.Tensor) -> object:
        q, k, v = (x.view(rows, length, -1, dim).transpose(1, 2) for x in (q, kv[0], kv[1]))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return [functools.partial({"flash": flash, "cudnn": cudnn}[backend], q) for q in work.q]
