"""The forward pass for few rows, one new token or a few each: the model's layer, said in five or six launches.

    qkv      W norm(x) + b                                            1
    o        q/k norm, RoPE, KV write, attention; merge of splits     1 or 2
    x        x + W o                                                  1
    y        silu(gate norm(x)) * up norm(x)                          1
    x        x + W y                                                  1

With few tokens a step is a chain of short kernels, each waiting for the one in front: it costs that chain, and one
reading of the weights. Both are the model's own, as is `ctx`, which is stage 03's.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import Tensor

from stages.s01_forward.model import MLP, DecoderLayer, Model
from stages.s07_cuda_graph.skinny_linear import MOST_ROWS, pays, skinny_linear

AHEAD_BYTES = 16 << 20  # an output projection so large at most is brought into L2 while attention leaves memory idle


def forward_few(model: Model, input_ids: Tensor, positions: Tensor, ctx: Any, queries: int = 1) -> Tensor:
    """`Model.forward` for at most 16 tokens, `queries` to a row at most: input_ids, positions [T] int64 -> [T, H].

    `ctx` is a PagedContext, or anything with its fields. Equal to the model's result up to rounding, which happens
    less often here. The embedding is an ordinary launch, so what was written before it is there for all that follow,
    also before they wait: `few_attention` relies on that.
    """
    residual = model.embed_tokens(input_ids)  # [T, H]; the layers add to it in place
    layers: list[Any] = list(model.layers)
    for layer in layers:
        o = attention(layer, residual, positions, model, ctx, queries)  # [T, Hq * D]
        o_proj, gate_up, down = layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj
        skinny_linear(o, o_proj.weight, o_proj.bias, residual=residual)
        y = skinny_linear(
            residual, gate_up.weight, gate_up.bias, norm_weight=layer.post_attention_layernorm.weight, eps=layer.eps,
            glu=True,
        )  # fmt: skip  # [T, I]
        skinny_linear(y, down.weight, down.bias, residual=residual)
    return model.ops.rms_norm(residual, model.norm.weight, model.config.rms_norm_eps)


def attention(layer: DecoderLayer, residual: Tensor, positions: Tensor, model: Model, ctx: Any, queries: int) -> Tensor:
    """residual [T, H] -> what attention found, [T, Hq * D], before the output projection."""
    from stages.s07_cuda_graph.few_attention import few_attention

    attn, o_weight = layer.self_attn, layer.self_attn.o_proj.weight
    qkv = skinny_linear(
        residual, attn.qkv_proj.weight, attn.qkv_proj.bias, norm_weight=layer.input_layernorm.weight, eps=layer.eps,
        ahead=o_weight if o_weight.nbytes <= AHEAD_BYTES else None,
    )  # fmt: skip
    norms = (attn.q_norm.weight, attn.k_norm.weight) if attn.q_norm and attn.k_norm else None
    qkv = qkv.view(len(qkv), -1, attn.head_dim)  # [T, Hq + 2 Hkv, D]
    angles, caches = (model.cos, model.sin), ctx.store.layer(attn.layer)  # caches: [NB, BS, Hkv, D]
    return few_attention(qkv, norms, attn.eps, angles, positions, caches, ctx, queries).flatten(1)


def logits_few(model: Model, hidden: Tensor) -> Tensor:
    """`model.logits`, hidden [N, H] -> [N, V], by whatever is faster for so many rows."""
    head = model.lm_head.weight
    return skinny_linear(hidden, head) if pays(len(hidden), *head.shape) else model.logits(hidden)


def supports(model: Model) -> str | None:
    """Why `forward_few` cannot serve this model; None if it can."""
    layers: list[Any] = list(model.layers)
    sparse = [number for number, layer in enumerate(layers) if not isinstance(layer.mlp, MLP)]
    if sparse:
        return f"layer {sparse[0]} has a sparse MLP: which weights it reads depends on the token"
    if model.embed_tokens.weight.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return "it needs a CUDA GPU and Triton"
    return None


def most_rows(model: Model) -> int:
    """Up to how many rows every projection of a layer is faster here than in cuBLAS, by `skinny_linear`'s table."""
    layer: Any = model.layers[0]
    projections = (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    counts = range(1, MOST_ROWS + 1)
    return sum(all(pays(rows, *projection.weight.shape) for projection in projections) for rows in counts)
