"""The K/V write in Triton: each new token's key and value go to the slot that the block table gave it."""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stages.s03_paged_kv.paged_attention import check_store
from stages.s03_paged_kv.tile_sizes import next_power_of_2


@triton.jit
def _store_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_block, stride_slot, stride_head, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr, DIM_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: all KV heads of one token. Padding tokens meet in slot 0 of the dummy block, in any order."""
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slot_ptr + token)
    head = tl.arange(0, HEADS_PAD)[:, None]
    dim = tl.arange(0, DIM_PAD)[None, :]
    exists = (head < HEADS) & (dim < HEAD_DIM) & (slot >= 0)  # a negative slot would lie before the cache
    k = tl.load(k_ptr + token * stride_k_token + head * stride_k_head + dim, mask=exists)
    v = tl.load(v_ptr + token * stride_v_token + head * stride_v_head + dim, mask=exists)
    target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot + head * stride_head + dim
    tl.store(k_cache_ptr + target, k.to(k_cache_ptr.dtype.element_ty), mask=exists)
    tl.store(v_cache_ptr + target, v.to(v_cache_ptr.dtype.element_ty), mask=exists)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes k, v [T, Hkv, D] into the caches [NB, BS, Hkv, D] at slot_mapping [T] int64 (block * BS + offset).

    Padding tokens take slot 0 of block 0. A negative slot is written nowhere (a device check would stop the host).
    """
    check_store(k, v, k_cache, v_cache, slot_mapping)
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    _store_kernel[(num_tokens,)](
        k, v, k_cache, v_cache, slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1), k_cache.stride(0),
        k_cache.stride(1), k_cache.stride(2), HEAD_DIM=head_dim, BLOCK_SIZE=k_cache.shape[1], HEADS=num_kv_heads,
        HEADS_PAD=next_power_of_2(num_kv_heads), DIM_PAD=next_power_of_2(head_dim), num_warps=4,
        **launch_options(k.device),
    )  # fmt: skip


@functools.cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """Programmatic dependent launch, from Hopper on: a kernel is set up while the one before it still runs."""
    pdl = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
