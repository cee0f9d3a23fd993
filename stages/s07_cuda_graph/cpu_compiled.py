"""Decode steps of few rows on a CPU, compiled: what lies between the attention of two layers is one C++ function.

`torch.compile` makes it, from stage 01's formulas. With few rows a product is a reading of W, and written as a sum it
becomes one loop over W with a sum for each row, fused with nothing in between that would have to be called. Compiling
takes a C++ compiler and some seconds for each number of rows; what it made is kept on disk, and found the next time.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.s01_forward.layers import norm_rope, rms_norm, silu_mul
from stages.s01_forward.model import MLP, Model
from stages.s03_paged_kv.context import PagedContext
from stages.s07_cuda_graph.cpu_forward import store_and_attend

log = logging.getLogger(__name__)

MOST_KINDS = 256  # of steps, over all models of a process; 8 are the default, and then torch.compile gives up
ROWS = (1, 2, 4, 8)  # a step of other numbers of tokens is padded to the next; with more, libraries multiply faster
SUMS = 8  # that are kept at once; with 16 there are too few registers
PARTS = (4, 2, 1)  # rows of W, far apart, that are read at once
OPTIONS: dict[str, Any] = {
    # What is made of so many operations is written down once, not computed anew by everybody who reads it: the norm of
    # x, which all rows of W meet, but not the products that go into one sum.
    "realize_opcount_threshold": 5,
    "cpp.enable_floating_point_contract_flag": "fast",  # a * b + c in one instruction
}


class Before(NamedTuple):
    """A layer's weights up to its attention, and its numbers."""

    norm: Tensor  # [H]
    qkv: Tensor  # [(Hq + 2 Hkv) D, H]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None
    heads: int
    kv_heads: int
    eps: float


class After(NamedTuple):
    """The others."""

    o: Tensor  # [H, Hq D]
    o_bias: Tensor | None
    norm: Tensor  # [H]
    gate_up: Tensor  # [2I, H]
    gate_up_bias: Tensor | None
    down: Tensor  # [H, I]
    down_bias: Tensor | None
    eps: float


def before(residual: Tensor, w: Before, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """residual [T, H], cos and sin [T, D/2] -> q [T, Hq, D], k and v [T, Hkv, D]."""
    x = rms_norm(residual, w.norm, w.eps)
    qkv = product(x, w.qkv, w.qkv_bias).view(len(x), w.heads + 2 * w.kv_heads, -1)
    q, k, v = qkv.split((w.heads, w.kv_heads, w.kv_heads), dim=1)
    q, k = norm_rope(q, k, w.q_norm, w.k_norm, cos, sin, w.eps)
    return q.contiguous(), k.contiguous(), v.contiguous()


def after(o: Tensor, residual: Tensor, w: After) -> Tensor:
    """What attention found, o [T, Hq D], and the residual stream [T, H] -> the residual stream behind the MLP."""
    residual = residual + product(o, w.o, w.o_bias)
    x = rms_norm(residual, w.norm, w.eps)
    return residual + product(silu_mul(product(x, w.gate_up, w.gate_up_bias)), w.down, w.down_bias)


def between(
    o: Tensor, residual: Tensor, w: After, following: Before, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One layer's end and the next one's beginning."""
    residual = after(o, residual, w)
    return residual, *before(residual, following, cos, sin)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N]. All sums over K are one loop, with some rows of W at once.

    They are as many streams of memory, and an element of x is read once for all of them.
    """
    parts = next(parts for parts in PARTS if parts * len(x) <= SUMS and len(weight) % parts == 0)
    out = torch.stack([torch.cat([(part * row).sum(1) for part in weight.chunk(parts)]) for row in x])
    return out if bias is None else out + bias


class Compiled:
    """The model's layers, compiled for steps of so many tokens."""

    def __init__(self, model: Model) -> None:
        layers: list[Any] = list(model.layers)
        self.model, self.rows = model, ROWS
        self.before, self.after = list(map(weights_before, layers)), list(map(weights_after, layers))
        self.parts = tuple(compiled(part) for part in (before, between, after, product))
        for tokens in self.rows:
            start = time.perf_counter()
            with torch._dynamo.config.patch(recompile_limit=MOST_KINDS):
                self.compile(tokens)
            log.info("decode steps of %d rows compiled in %.1f s", tokens, time.perf_counter() - start)

    @torch.inference_mode()
    def compile(self, tokens: int) -> None:
        """Each part once, with such tensors as a step has; with others it would be made anew in the first step."""
        begin, middle, end, head = self.parts
        ids = torch.zeros(tokens, dtype=torch.int64)
        residual, cos, sin = self.model.embed_tokens(ids), self.model.cos[ids], self.model.sin[ids]
        q = begin(residual, self.before[0], cos, sin)[0]
        if len(self.before) > 1:
            middle(q.flatten(1), residual, self.after[0], self.before[1], cos, sin)
        head(end(q.flatten(1), residual, self.after[-1]), self.model.lm_head.weight)

    def forward(self, model: Model, input_ids: Tensor, positions: Tensor, ctx: PagedContext, _: int = 1) -> Tensor:
        """`Model.forward`, equal up to rounding: input_ids, positions [T] int64 -> hidden [T, H]."""
        begin, middle, end = self.parts[:3]
        T = len(input_ids)
        positions = self.padded(positions)
        residual = model.embed_tokens(self.padded(input_ids))  # [T or more, H]
        cos, sin = model.cos[positions], model.sin[positions]  # [T or more, D/2]
        q, k, v = begin(residual, self.before[0], cos, sin)
        for layer, (w, following) in enumerate(zip(self.after, [*self.before[1:], None], strict=True)):
            o = self.padded(store_and_attend(layer, q[:T], k[:T], v[:T], ctx))
            if following:
                residual, q, k, v = middle(o, residual, w, following, cos, sin)
            else:
                residual = end(o, residual, w)
        return model.ops.rms_norm(residual[:T], model.norm.weight, model.config.rms_norm_eps)

    def logits(self, model: Model, hidden: Tensor) -> Tensor:
        """`Model.logits`: hidden [N, H] -> [N, V]."""
        out: Tensor = self.parts[3](self.padded(hidden), model.lm_head.weight)
        return out[: len(hidden)]

    def padded(self, x: Tensor) -> Tensor:
        """x [T, ...] with zeros below, up to a number of rows that was compiled."""
        missing = next(rows for rows in self.rows if rows >= len(x)) - len(x)
        return F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)) if missing else x


def compiled(part: Callable[..., Any]) -> Callable[..., Any]:
    """Made at its first call with so many rows."""
    made: Callable[..., Any] = torch.compile(part, dynamic=False, fullgraph=True, options=OPTIONS)
    return made


def weights_before(layer: Any) -> Before:
    attn = layer.self_attn
    return Before(
        layer.input_layernorm.weight, attn.qkv_proj.weight, attn.qkv_proj.bias,
        attn.q_norm.weight if attn.q_norm else None, attn.k_norm.weight if attn.k_norm else None,
        attn.heads, attn.kv_heads, layer.eps,
    )  # fmt: skip


def weights_after(layer: Any) -> After:
    o, gate_up, down = layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj
    norm = layer.post_attention_layernorm.weight
    return After(o.weight, o.bias, norm, gate_up.weight, gate_up.bias, down.weight, down.bias, layer.eps)


def compile_layers(model: Model) -> Compiled | None:
    """The model's layers compiled; None, and a warning, where that cannot be or does not pay."""
    layers: list[Any] = list(model.layers)
    try:
        if not all(isinstance(layer.mlp, MLP) for layer in layers):
            raise RuntimeError("the model has sparse MLPs")
        if (dtype := model.lm_head.weight.dtype) != torch.float32:
            raise RuntimeError(f"it pays for weights in float32, and these are in {dtype}")
        return Compiled(model)
    except (RuntimeError, OSError) as error:  # every error of torch.compile is a RuntimeError
        warnings.warn(f"decode steps are not compiled: {str(error).partition(chr(10))[0]}", stacklevel=2)
        return None
