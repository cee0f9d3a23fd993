"""What a model says about itself: `config.json`, read into one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from stages.s01_forward.config_json import config_fields
from stages.s01_forward.families import MoeConfig
from stages.s01_forward.rope import RopeConfig


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Sizes are counts of elements; `head_dim` need not be hidden_size / num_heads."""

    architecture: str
    vocab_size: int  # V
    hidden_size: int  # H
    intermediate_size: int  # I
    num_layers: int  # L
    num_heads: int  # Hq
    num_kv_heads: int  # Hkv, divides Hq
    head_dim: int  # D
    rms_norm_eps: float
    max_position: int  # longest sequence the model was made for, in tokens
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    moe: MoeConfig | None
    dtype: torch.dtype | None  # None: config.json does not say
    eos_token_ids: frozenset[int]

    @classmethod
    def from_dir(cls, folder: str | Path) -> ModelConfig:
        """Read `config.json` (and the EOS ids of `generation_config.json`) of a model folder.

        Raises UnsupportedModel for what would be computed wrongly, ValueError for a file that contradicts itself.
        """
        config = cls(**config_fields(Path(folder)))
        if config.num_heads % config.num_kv_heads:
            raise ValueError(f"{config.num_heads} query heads cannot share {config.num_kv_heads} KV heads evenly")
        if config.head_dim % 2:
            raise ValueError(f"head_dim is {config.head_dim}; rotary embeddings need an even number")
        return config

    @property
    def max_len(self) -> int:
        """Longest sequence in tokens; YaRN's is its original length times its factor."""
        return max(self.max_position, self.rope.extended_length)
