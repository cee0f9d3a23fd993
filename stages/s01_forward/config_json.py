"""Read later: how model folders spell what `ModelConfig` needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from stages.s01_forward.families import UnsupportedModel, read_moe, size, supported_family
from stages.s01_forward.rope import read_rope


def config_fields(folder: Path) -> dict[str, Any]:
    """The fields of `ModelConfig` by name, read from `config.json` and `generation_config.json`."""
    raw = read_json(folder / "config.json")
    eos = token_id_set(raw.get("eos_token_id"))
    if (folder / "generation_config.json").exists():
        eos |= token_id_set(read_json(folder / "generation_config.json").get("eos_token_id"))

    family = supported_family(raw)
    attention_bias = raw.get("attention_bias", False)
    try:
        num_heads = size(raw, "num_attention_heads")
        num_kv_heads = raw.get("num_key_value_heads") if family.kv_heads_optional else raw["num_key_value_heads"]
        return {
            "architecture": family.architecture,
            "vocab_size": size(raw, "vocab_size"),
            "hidden_size": size(raw, "hidden_size"),
            "intermediate_size": size(raw, "intermediate_size"),
            "num_layers": size(raw, "num_hidden_layers"),
            "num_heads": num_heads,
            "num_kv_heads": num_heads if num_kv_heads is None else size(raw, "num_key_value_heads"),
            "head_dim": read_head_dim(raw, family.default_head_dim),
            "rms_norm_eps": read_eps(raw),
            "max_position": size(raw, "max_position_embeddings"),
            "rope": read_rope(raw),
            "qkv_bias": attention_bias if family.qkv_bias is None else family.qkv_bias,
            "o_bias": attention_bias if family.o_bias is None else family.o_bias,
            "mlp_bias": family.reads_mlp_bias and raw.get("mlp_bias", False),
            "qk_norm": family.qk_norm,
            "tie_word_embeddings": raw.get("tie_word_embeddings", False),
            "moe": read_moe(raw) if family.sparse else None,
            "dtype": read_dtype(raw),
            "eos_token_ids": frozenset(eos),
        }
    except KeyError as missing:
        raise ValueError(f"{folder / 'config.json'} lacks {missing}, which {family.architecture} needs") from None


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object; a missing or broken file is named."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path.parent} is not a model folder: it has no {path.name}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def read_head_dim(raw: dict[str, Any], default: int | None) -> int:
    """The file's own `head_dim`, else what the family or the hidden size makes it."""
    if raw.get("head_dim") is not None:
        return size(raw, "head_dim")
    if default is not None:
        return default
    hidden_size, num_heads = size(raw, "hidden_size"), size(raw, "num_attention_heads")
    if hidden_size % num_heads:
        raise ValueError(f"config.json: hidden_size is {hidden_size}, no multiple of {num_heads} heads; state head_dim")
    return hidden_size // num_heads


def read_eps(raw: dict[str, Any]) -> float:
    """What keeps a norm from dividing by zero."""
    eps = raw.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < 1:
        raise ValueError(f"config.json: rms_norm_eps is {eps!r}; it must be a number of at least 0 and below 1")
    return float(eps)


def token_id_set(value: int | list[int] | None) -> set[int]:
    """EOS ids as files state them (`null`, one id, a list of ids), as a set."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ValueError(f"eos_token_id is {value!r}; it must be a token id or a list of token ids")
    return set(ids)


def read_dtype(raw: dict[str, Any]) -> torch.dtype | None:
    """The weights' dtype under its new key (`dtype`) or its old one (`torch_dtype`)."""
    name = raw.get("dtype") or raw.get("torch_dtype")
    return None if name in (None, "auto") else parse_dtype(name)


def parse_dtype(name: str) -> torch.dtype:
    """`"bfloat16"`, `"float16"` or `"float32"` as a torch dtype."""
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    dtype = dtypes.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise UnsupportedModel(f"dtype {name!r} is not supported; choose one of {', '.join(dtypes)}")
    return dtype
