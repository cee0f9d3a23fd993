"""What the kernels for few rows are held to: exact results, in float64 or in fp32.

The same cases run in Triton's interpreter (test_few_rows.py) and on a GPU (`few_model_cases.gpu_cases`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.s01_forward import layers
from stages.s03_paged_kv import paged_attention as in_torch

EPS = 0.1  # large, so that it shows where it is left out
GAP = float("nan")  # fills what a kernel must neither read nor write
ALLOWED = {torch.float32: 5e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}  # relative


def relative_error(out: Tensor, exact: Tensor) -> float:
    """|out - exact| / |exact|; NaN if there is one in `out`."""
    return float((out.double() - exact.double()).norm() / exact.double().norm())


@dataclass(frozen=True)
class LinearCase:
    """One call of `skinny_linear`; n: columns of the result."""

    rows: int
    n: int
    k: int
    dtype: torch.dtype
    norm: bool = False
    bias: bool = False
    add: bool = False
    glu: bool = False

    def __str__(self) -> str:
        words = [name for name in ("norm", "bias", "add", "glu") if getattr(self, name)]
        return " ".join([f"{self.rows}x{self.k}->{self.n}", str(self.dtype).removeprefix("torch."), *words])

    def error(self, device: torch.device) -> float:
        """Of the kernel, on x as a view with NaN around it."""
        from stages.s07_cuda_graph.skinny_linear import skinny_linear

        draw = torch.Generator(device).manual_seed(self.rows + self.n + self.k)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=draw, device=device) * scale).to(self.dtype)

        buffer = torch.full((self.rows + 2, self.k + 8), GAP, dtype=self.dtype, device=device)
        x = buffer[1:-1, : self.k].copy_(random(self.rows, self.k, scale=3.0))
        weight = random(self.n * (1 + self.glu), self.k, scale=self.k**-0.5)
        gain = (1 + 0.3 * random(self.k)).to(self.dtype) if self.norm else None
        bias = random(len(weight)) if self.bias else None
        residual = random(self.rows, self.n) if self.add else None
        exact = self.exact(x, weight, gain, bias, residual)
        out = skinny_linear(x, weight, bias, norm_weight=gain, eps=EPS, residual=residual, glu=self.glu, ahead=weight)
        assert residual is None or out is residual
        return relative_error(out, exact)

    def exact(
        self, x: Tensor, weight: Tensor, gain: Tensor | None, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """The same in float64."""
        y = x.double()
        if gain is not None:
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * gain.double()
        y = F.linear(y, weight.double(), None if bias is None else bias.double())
        y = layers.silu_mul(y) if self.glu else y
        return y if residual is None else y + residual.double()


@dataclass(frozen=True)
class RopeCase:
    """One call of `rope_store`; the last of `rows` is padding, the one before has a negative slot."""

    rows: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    normed: bool = True
    block_size: int = 16

    def __str__(self) -> str:
        words = [f"rope_store {self.rows}x({self.heads}+2*{self.kv_heads})x{self.dim}", f"blocks of {self.block_size}"]
        return " ".join([*words, str(self.dtype).removeprefix("torch."), *["no norm"] * (not self.normed)])

    def error(self, device: torch.device) -> float:
        """The larger one of q and the caches; infinite if anything was written that is not the token's own."""
        from stages.s07_cuda_graph.rope_store_kernel import rope_store

        draw = torch.Generator().manual_seed(self.rows + self.heads + self.dim)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(device, self.dtype)

        qkv = random(self.rows, self.heads + 2 * self.kv_heads, self.dim)
        q_gain, k_gain = (1 + 0.3 * random(2, self.dim)).unbind() if self.normed else (None, None)
        angles = 50 * torch.randn(100, self.dim // 2, generator=draw).to(device)
        positions = torch.randint(100, (self.rows,), generator=draw).to(device)
        slots = (torch.randperm(self.block_size * self.rows, generator=draw)[: self.rows] + self.block_size).to(device)
        slots[-1:] = 0
        slots[-2:-1] = -1
        cache = random(2, self.rows + 1, 2, self.block_size, self.kv_heads, self.dim)[:, :, 1]  # a view, as of a layer

        q, k, v = qkv.float().split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        angle = angles[positions]
        if q_gain is not None and k_gain is not None:
            q, k = layers.rms_norm(q, q_gain.float(), EPS), layers.rms_norm(k, k_gain.float(), EPS)
        q, k = layers.apply_rope(q, angle.cos(), angle.sin()), layers.apply_rope(k, angle.cos(), angle.sin())
        expected = cache.float()
        in_torch.store_kv(k[slots >= 0], v[slots >= 0], expected[0], expected[1], slots[slots >= 0])
        others = torch.ones(self.rows + 1, self.block_size, dtype=torch.bool, device=device)
        others.view(-1)[slots[slots >= 0]] = False
        before = cache.clone()
        out = rope_store(qkv, q_gain, k_gain, angles.cos(), angles.sin(), positions, slots, cache[0], cache[1], EPS)
        kept = torch.equal(cache[:, others], before[:, others]) and out.data_ptr() == qkv.data_ptr()
        return max(relative_error(out, q), relative_error(cache, expected)) if kept else float("inf")


def small_cases() -> Iterator[LinearCase | RopeCase]:
    """For the interpreter, which multiplies bf16 wrongly: odd shapes, every flag alone and together."""
    flags: tuple[tuple[bool, bool, bool, bool], ...] = (  # norm, bias, add, glu
        (False,) * 4, (True, False, False, False), (False, True, True, False), (True,) * 4,
    )  # fmt: skip
    for i, rows in enumerate((1, 2, 3, 8, 16)):
        for j, (n, k) in enumerate(((1, 24), (33, 40), (13, 1000), (7, 2600))):
            yield LinearCase(rows, n, k, (torch.float32, torch.float16)[i % 2], *flags[(i + j) % 4])
    for n, norm, bias, add, glu in ((9, True, True, False, False), (5, False, False, False, True)):
        for rows in (1, 5):
            yield LinearCase(rows, n, 25, torch.float16, norm, bias, add, glu)
    for i, (rows, heads, kv_heads, dim) in enumerate(((1, 2, 2, 4), (3, 6, 2, 16), (4, 7, 1, 80), (16, 1, 1, 128))):
        for dtype in (torch.float32, torch.float16):
            yield RopeCase(rows, heads, kv_heads, dim, dtype, normed=i % 2 == 0, block_size=(16, 1, 32, 4)[i])
