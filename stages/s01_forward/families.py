"""Read later: in what the four families differ, and which models are refused rather than computed wrongly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


class UnsupportedModel(ValueError):
    """A model that this engine would compute wrongly; the message names the reason and what is supported."""


@dataclass(frozen=True)
class Family:
    """What an architecture fixes in code, not in `config.json`. None: the file decides (`attention_bias`)."""

    architecture: str
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    sparse: bool = False
    reads_mlp_bias: bool = False
    default_head_dim: int | None = None  # where Hugging Face has a constant instead of hidden_size / num_heads
    kv_heads_optional: bool = False  # without `num_key_value_heads` every query head has its own
    windows: bool = True  # knows `use_sliding_window`


FAMILIES = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", reads_mlp_bias=True, kv_heads_optional=True, windows=False),
        Family("Qwen2ForCausalLM", qkv_bias=True, o_bias=False),
        Family("Qwen3ForCausalLM", qk_norm=True, default_head_dim=128),
        Family("Qwen3MoeForCausalLM", qk_norm=True, sparse=True),
    )
}


@dataclass(frozen=True)
class MoeConfig:
    """A sparse MLP: a router sends each token to `top_k` of `num_experts` small MLPs."""

    num_experts: int  # E
    top_k: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # True: the weights of the chosen experts are scaled to sum to 1
    sparse_step: int  # every n-th layer is sparse, ...
    dense_layers: frozenset[int]  # ... but for these

    def is_sparse(self, layer: int) -> bool:
        """Does this layer (counted from 0) hold experts?"""
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


def size(raw: dict[str, Any], key: str) -> int:
    """A count that the file must state."""
    value = raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key} is {value!r}; it must be a whole number of at least 1")
    return value


def number(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    """A number that the file may state; `default` where it does not, or says null. KeyError without either."""
    value = default if raw.get(key) is None else raw[key]
    if value is None:
        raise KeyError(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
        raise ValueError(f"config.json: {key} is {value!r}; it must be a number")
    return float(value)


def supported_family(raw: dict[str, Any]) -> Family:
    """The family of a `config.json`. Raises UnsupportedModel for what we would silently get wrong."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    family = FAMILIES.get(str(name))
    if family is None:
        raise UnsupportedModel(f"architecture {name!r} is not supported; supported are {', '.join(FAMILIES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {raw['hidden_act']!r} is not supported; supported is 'silu'")
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise UnsupportedModel(f"the checkpoint is quantised ({method}); supported are bf16, fp16 and fp32 weights")
    if family.windows and raw.get("use_sliding_window", False):
        refuse_window(raw, family)
    return family


def refuse_window(raw: dict[str, Any], family: Family) -> None:
    """Refuse a sliding window that some layer would really use; the mere presence of the key means nothing."""
    window, layers = raw.get("sliding_window", 4096), raw.get("num_hidden_layers", 0)
    if window is None:
        return
    kinds = raw.get("layer_types")
    if kinds is not None:
        windowed = kinds.count("sliding_attention")
    elif family.sparse:  # Qwen3-MoE has no `max_window_layers`: all layers or none
        windowed = layers
    else:
        windowed = max(0, layers - raw.get("max_window_layers", 28))
    if windowed:
        raise UnsupportedModel(f"{windowed} layers use a sliding window of {window} tokens, which is not supported")


def read_moe(raw: dict[str, Any]) -> MoeConfig:
    """The keys of Qwen3-MoE. A missing `norm_topk_prob` means false, as in Hugging Face."""
    moe = MoeConfig(
        num_experts=size(raw, "num_local_experts" if raw.get("num_local_experts") else "num_experts"),
        top_k=size(raw, "num_experts_per_tok"),
        intermediate_size=size(raw, "moe_intermediate_size"),
        norm_topk_prob=raw.get("norm_topk_prob", False),
        sparse_step=size({"decoder_sparse_step": 1, **raw}, "decoder_sparse_step"),
        dense_layers=frozenset(raw.get("mlp_only_layers") or ()),
    )
    if moe.top_k > moe.num_experts:
        raise ValueError(f"config.json: num_experts_per_tok is {moe.top_k}; there are {moe.num_experts} experts")
    return moe
