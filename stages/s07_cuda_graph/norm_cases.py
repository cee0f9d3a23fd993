"""What the fused norm, rope and SwiGLU kernels are held to: the torch functions, on views inside larger buffers.

The same cases run in Triton's interpreter (test_norm_kernels.py) and on a GPU (`gpu_cases`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.s01_forward.ops import TORCH_OPS

EPS = 1e-5
GAP = float("nan")  # fills all that a kernel must neither read nor write
# Of the largest element. In half precision one unit in the last place, for a value that lay on the edge of rounding ...
ALLOWED = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}
ALLOWED_SHARE = 5e-3  # ... and so few may differ at all: rounded in another order, every fourth does


@dataclass(frozen=True)
class NormCase:
    """One call of an operation. `sizes`: [.., H] of a norm, [.., 2I] of silu_mul, (T, Hq, Hkv, D) of norm_rope."""

    op: str  # its name in `Ops`
    sizes: tuple[int, ...]
    dtype: torch.dtype
    gap: int = 0  # unused elements after each row or head
    normed: bool = True  # norm_rope: with weights

    def __str__(self) -> str:
        words = [self.op, "x".join(map(str, self.sizes)), str(self.dtype).removeprefix("torch.")]
        return " ".join(words + [f"gap {self.gap}"] * bool(self.gap) + ["no norm"] * (not self.normed))

    def buffers(self, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """The memory that views are taken of, and the arguments that are views of nothing."""
        draw = torch.Generator().manual_seed(sum(self.sizes))

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).mul(2).to(self.dtype).to(device)

        def inside_gaps(tokens: int, *rest: int) -> Tensor:
            buffer = torch.full((tokens + 2, *rest[:-1], rest[-1] + self.gap), GAP, dtype=self.dtype, device=device)
            buffer[1:-1, ..., : rest[-1]] = random(tokens, *rest)
            return buffer

        def weight(size: int) -> Tensor:
            return (1 + 0.2 * random(size)).to(self.dtype)

        if self.op != "norm_rope":
            count = 2 if self.op == "add_rms_norm" else 1
            return [inside_gaps(*self.sizes) for _ in range(count)], [weight(self.sizes[-1])]
        tokens, heads, kv_heads, dim = self.sizes
        packed = inside_gaps(tokens, heads + 2 * kv_heads, dim)
        packed[:, heads + kv_heads :] = GAP  # the values
        angles = 50 * torch.randn(tokens, dim // 2, generator=draw).to(device)
        weights = [weight(dim), weight(dim)] if self.normed else []
        return [packed], [*weights, angles.cos(), angles.sin()]

    def call(self, function: Callable[..., Tensor | tuple[Tensor, Tensor]], buffers: list[Tensor],
             others: list[Tensor]) -> list[Tensor]:  # fmt: skip
        """What `function` returns for views into `buffers`."""
        if self.op == "norm_rope":
            _, heads, kv_heads, dim = self.sizes
            view = buffers[0][1:-1, ..., :dim]
            q, k = view[:, :heads], view[:, heads : heads + kv_heads]
            weights = others[:-2] if self.normed else [None, None]
            out = function(q, k, *weights, *others[-2:], EPS)
        else:
            views = [buffer[1:-1, ..., : self.sizes[-1]] for buffer in buffers]
            out = function(*views) if self.op == "silu_mul" else function(*views, *others, EPS)
        return [out] if isinstance(out, Tensor) else list(out)

    def compare(self, function: Callable[..., Tensor | tuple[Tensor, Tensor]], device: torch.device) -> "Errors":
        """`function` against the torch version in the same dtype on the same device."""
        buffers, others = self.buffers(device)
        before = [buffer.clone() for buffer in buffers]
        expected = self.call(getattr(TORCH_OPS, self.op), [buffer.clone() for buffer in buffers], others)
        out = self.call(function, buffers, others)
        shapes_fit = all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(out, expected, strict=True))
        if not shapes_fit or not self.only_own(before, buffers):
            return Errors(math.inf, 1.0)
        pairs = [(a.float(), b.float()) for a, b in zip(out, expected, strict=True) if b.numel()]
        if not pairs:  # no tokens
            return Errors(0.0, 0.0)
        error = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
        share = max(((a != b).sum().item() - 2) / a.numel() for a, b in pairs)
        return Errors(math.inf if math.isnan(error) else error, max(share, 0.0))

    def only_own(self, before: list[Tensor], after: list[Tensor]) -> bool:
        """Whether nothing changed but `residual`, q and k, and these only inside the gaps."""
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            kept = old.clone()
            if self.op == "norm_rope":
                own = self.sizes[1] + self.sizes[2]
                kept[1:-1, :own, : self.sizes[-1]] = new[1:-1, :own, : self.sizes[-1]]
            elif self.op == "add_rms_norm" and i == 1:
                kept[1:-1, ..., : self.sizes[-1]] = new[1:-1, ..., : self.sizes[-1]]
            if not torch.equal(kept.view(torch.uint8), new.view(torch.uint8)):
                return False
        return True


@dataclass(frozen=True)
class Errors:
    """`error`: the largest difference, of the largest element; `share` of the elements that differ, two excepted."""

    error: float
    share: float

    def within_limits(self, dtype: torch.dtype) -> bool:
        """In fp32 sums in another order may change any last digit."""
        return self.error <= ALLOWED[dtype] and (dtype == torch.float32 or self.share <= ALLOWED_SHARE)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def small_cases() -> Iterator[NormCase]:
    """Sizes that are no powers of two, groups of 1, 3 and 7, and no tokens."""
    for dtype in DTYPES:
        for op in ("rms_norm", "add_rms_norm", "silu_mul"):
            for tokens, size, gap in ((0, 24, 0), (1, 1, 3), (5, 24, 0), (5, 1000, 1), (2, 2100, 0)):
                yield NormCase(op, (tokens, size * (1 + (op == "silu_mul"))), dtype, gap)
        for tokens, heads, kv_heads, dim, gap in (
            (0, 3, 1, 4, 0), (1, 2, 2, 4, 3), (5, 6, 2, 20, 0), (2, 7, 1, 128, 1), (3, 14, 2, 64, 0),
        ):  # fmt: skip
            for normed in (True, False):
                yield NormCase("norm_rope", (tokens, heads, kv_heads, dim), dtype, gap, normed)
    yield NormCase("rms_norm", (3, 2, 24), torch.bfloat16)  # heads of tokens
    yield NormCase("silu_mul", (3, 2, 24), torch.bfloat16)


def large_cases() -> Iterator[NormCase]:
    """The shapes of Qwen2.5-0.5B, Qwen3-0.6B and Qwen2.5-7B, from one token to 16,384, and heads as rows."""
    yield NormCase("rms_norm", (16384, 8, 128), torch.bfloat16)
    yield NormCase("add_rms_norm", (4099, 100), torch.float32, 1)
    for tokens in (1, 7, 132, 256, 1025, 4099, 16384):
        for hidden, inner, heads, kv_heads, dim in (
            (896, 4864, 14, 2, 64), (1024, 3072, 16, 8, 128), (3584, 18944, 28, 4, 128),
        ):  # fmt: skip
            for dtype in (torch.bfloat16, torch.float16):
                yield NormCase("add_rms_norm", (tokens, hidden), dtype)
                yield NormCase("silu_mul", (tokens, 2 * inner), dtype)
                yield NormCase("norm_rope", (tokens, heads, kv_heads, dim), dtype, normed=heads == 16)


def gpu_cases(device: torch.device) -> Iterator[tuple[str, float, float]]:
    """Runs all cases there: (name, error, allowed), and in half precision the same of the share that differs."""
    from stages.s07_cuda_graph.fused_ops import fused_ops

    ops = fused_ops(device)
    for case in (*small_cases(), *large_cases()):
        errors = case.compare(getattr(ops, case.op), device)
        yield str(case), errors.error, ALLOWED[case.dtype]
        if case.dtype != torch.float32:
            yield f"{case}, share that differs", errors.share, ALLOWED_SHARE
