"""The q/k norm and the rotary embedding of all heads in Triton: one launch, in place in the packed projection."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stages.s03_paged_kv.store_kv import launch_options
from stages.s03_paged_kv.tile_sizes import next_power_of_2

HEADS = 4  # of one token in one program
TOKENS = 4  # in one program, once there are tokens enough for all processors
MANY_TOKENS = 1024


@triton.jit
def _norm_and_turn(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, num_tokens, eps, stride_token, stride_head, token, head,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Heads `head` [rows, 1] of the tokens `token` [rows, 1], each in two halves: element i turns with i + D/2."""
    dtype = x_ptr.dtype.element_ty
    i = tl.arange(0, HALF_PAD)[None, :]
    if weight_ptr is not None:  # no kernel writes it: asked for before the wait
        first_weight = tl.load(weight_ptr + i, mask=i < HALF, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    exists = (token < num_tokens) & (head < NUM_HEADS) & (i < HALF)
    place = x_ptr + token * stride_token + head * stride_head + i
    first = tl.load(place, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=exists, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + i, mask=exists, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + i, mask=exists, other=0.0)
    if weight_ptr is not None:  # rounded where torch rounds: the normed head, and its product with the weight
        mean_square = tl.sum(first * first + second * second, axis=1, keep_dims=True) / (2 * HALF)
        scale = tl.rsqrt(mean_square + eps)
        first = (first_weight * (first * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        second = (second_weight * (second * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(place, (first * cos - second * sin).to(dtype), mask=exists)
    tl.store(place + HALF, (second * cos + first * sin).to(dtype), mask=exists)


@triton.jit(do_not_specialize=["num_tokens"])
def _norm_rope_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, num_tokens, eps, stride_q_token, stride_q_head,
    stride_k_token, stride_k_head, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: `HEADS` heads, all of queries or all of keys, of `TOKENS` tokens."""
    q_parts: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    parts: tl.constexpr = q_parts + (K_HEADS + HEADS - 1) // HEADS
    if PDL:
        gdc_launch_dependents()
    part = tl.program_id(0) % parts
    row = tl.arange(0, TOKENS * HEADS)[:, None]
    token = (tl.program_id(0) // parts * TOKENS + row // HEADS).to(tl.int64)
    if part < q_parts:
        _norm_and_turn(
            q_ptr, q_weight_ptr, cos_ptr, sin_ptr, num_tokens, eps, stride_q_token, stride_q_head, token,
            part * HEADS + row % HEADS, Q_HEADS, HALF, HALF_PAD, PDL,
        )  # fmt: skip
    else:
        _norm_and_turn(
            k_ptr, k_weight_ptr, cos_ptr, sin_ptr, num_tokens, eps, stride_k_token, stride_k_head, token,
            (part - q_parts) * HEADS + row % HEADS, K_HEADS, HALF, HALF_PAD, PDL,
        )  # fmt: skip


def norm_rope(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, cos: torch.Tensor,
    sin: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`layers.norm_rope`: q [T, Hq, D], k [T, Hkv, D], weights [D] of their dtype or None, cos, sin [T, D/2] in fp32.

    Returns `q` and `k` themselves, written over: they may be views of one packed [T, Hq + 2 Hkv, D].
    """
    _check(q, k, q_weight, k_weight, cos, sin)
    num_tokens, num_heads, head_dim = q.shape
    if num_tokens == 0:
        return q, k
    tokens = TOKENS if num_tokens >= MANY_TOKENS else 1
    parts = -(-num_heads // HEADS) + -(-k.shape[1] // HEADS)
    half_pad = next_power_of_2(head_dim // 2)
    _norm_rope_kernel[(-(-num_tokens // tokens) * parts,)](
        q, k, q_weight, k_weight, cos, sin, num_tokens, eps, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        Q_HEADS=num_heads, K_HEADS=k.shape[1], HALF=head_dim // 2, HALF_PAD=half_pad, TOKENS=tokens, HEADS=HEADS,
        num_warps=min(max(tokens * HEADS * half_pad // 256, 1), 8), **launch_options(q.device),
    )  # fmt: skip
    return q, k


def _check(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:  # fmt: skip
    """Raises ValueError for what the kernel would read or write in the wrong place."""
    num_tokens, _, head_dim = q.shape
    if head_dim % 2 or k.shape[0] != num_tokens or k.shape[2] != head_dim or k.dtype != q.dtype:
        raise ValueError(
            f"q {tuple(q.shape)} of {q.dtype} and k {tuple(k.shape)} of {k.dtype}: equal tokens, dtypes and even head "
            "sizes are needed"
        )
    if q.stride(2) != 1 or k.stride(2) != 1:
        raise ValueError(f"heads without gaps are needed, not q strides {q.stride()} and k strides {k.stride()}")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q and k are normed both or neither: give two weights or none")
    for weight in (q_weight, k_weight):
        if weight is not None and (weight.shape != (head_dim,) or weight.dtype != q.dtype):
            raise ValueError(f"a weight {tuple(weight.shape)} of {weight.dtype} for heads [{head_dim}] of {q.dtype}")
    for table in (cos, sin):
        if table.shape != (num_tokens, head_dim // 2) or not table.is_contiguous():
            raise ValueError(
                f"cos and sin must be contiguous [{num_tokens}, {head_dim // 2}], not {tuple(table.shape)} with "
                f"strides {table.stride()}"
            )
