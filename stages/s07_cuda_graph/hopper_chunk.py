"""Launches `hopper_chunk_kernel`: in which boxes the copy engine brings tokens and pages, and how many programs."""

import functools
from math import gcd

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stages.s03_paged_kv.attention_plan import Launch
from stages.s03_paged_kv.kernel import LOG2_E
from stages.s03_paged_kv.store_kv import launch_options
from stages.s07_cuda_graph.hopper_chunk_kernel import hopper_chunk_kernel

ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
PANEL = 64  # columns of 16 bits: the 128 bytes over which shared memory is swizzled for the tensor cores


def chunk_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    block_table: torch.Tensor, seq_lens: torch.Tensor, cu_q: torch.Tensor, launch: Launch, scale: float,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """As `chunk_kernel.chunk_attention`; empty tiles stand last in the map.

    Where it can run, `chunk_tiles.chunk_tiles` says. Heads of one token must lie side by side, in the cache, too.
    """
    num_heads, head_dim = q.shape[1:]
    group, sizes = num_heads // k.shape[1], launch.sizes
    block_m = sizes.block_m // 2  # queries of a warpgroup
    assert launch.tile_map is not None
    hopper_chunk_kernel[(num_programs(q.device, group),)](
        as_rows(q, block_m), as_rows(k, sizes.block_n), as_rows(v, sizes.block_n), as_pages(k_cache),
        as_pages(v_cache), out, block_table, seq_lens, cu_q, launch.tile_map, scale * LOG2_E, block_table.stride(0),
        launch.num_tiles, num_heads, group, BLOCK_M=block_m, BLOCK_N=sizes.block_n, HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1], STAGES=sizes.num_stages, num_warps=sizes.num_warps, **launch_options(q.device),
    )  # fmt: skip


@functools.cache
def num_programs(device: torch.device, group: int) -> int:
    """One for each processor, or a few less: with a factor in common with `group`, a program would meet the same heads
    of each group again and again, and of short tiles those of half a group are empty.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return next(count for count in range(processors, 0, -1) if gcd(count, group) == 1)


def as_rows(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """x [T, heads, D] as [T, heads * D], of which the copy engine brings [rows, D] at a time; zero past the end."""
    tokens, heads, dim = x.shape
    layout = gl.NVMMASharedLayout.get_default_for([rows, dim], ELEMENTS[x.dtype])
    return TensorDescriptor(x, [tokens, heads * dim], [x.stride(0), 1], [rows, dim], layout)


def as_pages(x: torch.Tensor) -> TensorDescriptor:
    """x [NB, BS, Hkv, D] as [NB, BS, Hkv * D], of which the copy engine brings 64 columns of one block at a time."""
    blocks, block_size, heads, dim = x.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    strides = [x.stride(0), x.stride(1), 1]
    return TensorDescriptor(x, [blocks, block_size, heads * dim], strides, [1, block_size, PANEL], layout)
