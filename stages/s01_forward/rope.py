"""Read later: the frequencies of rotary position embeddings, plain and stretched to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.s01_forward.families import UnsupportedModel, number


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles. Lengths are in tokens; the scaling fields matter to the types that use them."""

    theta: float = 10_000.0
    type: str = "default"
    factor: float = 1.0
    original_length: int = 0  # the context the model was trained on, before it was stretched
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: scales cos and sin
    truncate: bool = True  # yarn: round the ramp's ends to whole frequencies

    @property
    def extended_length(self) -> int:
        """The context that YaRN stretches to; 0 for types whose `max_position_embeddings` says it already."""
        return int(self.original_length * self.factor) if self.type == "yarn" else 0


def read_rope(raw: dict[str, Any]) -> RopeConfig:
    """The rotary settings of `config.json`.

    Two spellings exist: `rope_theta` with `rope_scaling`, and one table `rope_parameters`; the type is
    `rope_type` or, in old files, `type`. A base that is stated nowhere is 10,000, as in Hugging Face.
    """
    table = rope_settings(raw)
    kind = table.get("rope_type") or table.get("type") or "default"
    if kind not in INV_FREQ:
        raise UnsupportedModel(f"rope_type {kind!r} is not supported; supported are {', '.join(INV_FREQ)}")
    if table.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("partial_rotary_factor is not supported; every element of a head must be rotated")
    original = number(table, "original_max_position_embeddings", number(raw, "max_position_embeddings"))
    original = number(raw, "original_max_position_embeddings", original)
    config = RopeConfig(
        theta=number(table, "rope_theta", number(raw, "rope_theta", 10_000.0)),
        type=kind,
        factor=number(table, "factor") if kind != "default" else 1.0,
        original_length=int(original),
        low_freq_factor=number(table, "low_freq_factor") if kind == "llama3" else 1.0,
        high_freq_factor=number(table, "high_freq_factor") if kind == "llama3" else 4.0,
        beta_fast=number(table, "beta_fast", 32.0),
        beta_slow=number(table, "beta_slow", 1.0),
        attention_factor=yarn_attention_factor(table) if kind == "yarn" else 1.0,
        truncate=table.get("truncate", True),
    )
    if not (1 < config.theta < math.inf and 1 <= config.factor < math.inf):  # NaN is in no range
        raise ValueError(
            f"config.json: rope_theta is {config.theta} (above 1 is needed), factor is {config.factor} (at least 1)"
        )
    return config


def rope_settings(raw: dict[str, Any]) -> dict[str, Any]:
    """The one table of rotary settings. What would leave a stated value unused is refused, not ignored."""
    old, new = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    for table in (old, new):
        if not isinstance(table, dict):
            raise ValueError(f"config.json: the rotary settings are {table!r}; they must be a JSON object")
        if any(isinstance(value, dict) for value in table.values()):
            raise UnsupportedModel(f"rotary settings per kind of layer ({', '.join(table)}) are not supported")
        if table.get("type", table.get("rope_type")) != table.get("rope_type", table.get("type")):
            raise ValueError(f"config.json: rope type is {table['type']!r} and {table['rope_type']!r} in one table")
        if (table.get("rope_type") or table.get("type") or "default") == "default" and (table.get("factor") or 1) != 1:
            raise ValueError(f"config.json: a rotary factor of {table['factor']} needs a rope_type that scales")
    if old and new and old != new:
        raise ValueError(f"config.json: rope_scaling {old} and rope_parameters {new} disagree")
    return old or new


def yarn_attention_factor(table: dict[str, Any]) -> float:
    """YaRN's temperature, 0.1 ln(factor) + 1 unless the file states another (Peng et al. 2023, eq. 22)."""

    factor = number(table, "factor")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if table.get("attention_factor") is not None:
        return number(table, "attention_factor")
    if table.get("mscale") and table.get("mscale_all_dim"):
        return mscale(number(table, "mscale")) / mscale(number(table, "mscale_all_dim"))
    return mscale(1.0)


def plain_inv_freq(config: RopeConfig, head_dim: int) -> Tensor:
    """theta^(-2i / D) for i in 0 .. D/2 - 1, in radians per token (Su et al. 2021)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim  # [D/2]
    return 1.0 / config.theta**exponents


def linear_inv_freq(config: RopeConfig, head_dim: int) -> Tensor:
    """Every position counts as position / factor (Chen et al. 2023, position interpolation)."""
    return plain_inv_freq(config, head_dim) / config.factor


def llama3_inv_freq(config: RopeConfig, head_dim: int) -> Tensor:
    """Llama 3.1: slow frequencies are divided by the factor, fast ones kept, those between blended."""
    inv_freq = plain_inv_freq(config, head_dim)
    turns = config.original_length * inv_freq / (2 * math.pi)  # full turns within the original context
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    return torch.lerp(inv_freq / config.factor, inv_freq, blend.clamp(0, 1))


def yarn_inv_freq(config: RopeConfig, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023): a ramp over the index of the frequency, from kept to divided by the factor."""

    def index_of(turns: float) -> float:
        """The (fractional) frequency that makes so many turns within the original context."""
        return head_dim * math.log(config.original_length / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = index_of(config.beta_fast), index_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    inv_freq = plain_inv_freq(config, head_dim)
    return torch.lerp(inv_freq, inv_freq / config.factor, ramp.clamp(0, 1))


INV_FREQ = {
    "default": plain_inv_freq,
    "linear": linear_inv_freq,
    "llama3": llama3_inv_freq,
    "yarn": yarn_inv_freq,
}


def rope_table(config: RopeConfig, head_dim: int, length: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and sin of every position below `length`, fp32, each [length, D/2]."""
    inv_freq = INV_FREQ[config.type](config, head_dim)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inv_freq  # [length, D/2], radians
    cos, sin = angles.cos() * config.attention_factor, angles.sin() * config.attention_factor
    return cos.to(device), sin.to(device)
