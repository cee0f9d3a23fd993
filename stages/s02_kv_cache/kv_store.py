"""The memory of the KV cache: how much a token costs, how many fit, and the tensor that holds them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from stages.s01_forward.config import ModelConfig

DEFAULT_KV_MB = 2048.0  # the cache's budget where the caller names none, in units of 2^20 bytes


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """2 (K and V) x layers x KV heads x head_dim x bytes per element: what one token costs, in bytes."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def tokens_held(
    megabytes: float, config: ModelConfig, dtype: torch.dtype, *, block_size: int = 1, spare_blocks: int = 0
) -> int:
    """How many tokens a budget (in units of 2^20 bytes) holds, in whole blocks, `spare_blocks` of them set aside."""
    blocks = int(megabytes * 2**20) // (kv_bytes_per_token(config, dtype) * block_size)
    return max(0, blocks - spare_blocks) * block_size


def tokens_that_fit(
    megabytes: float,
    config: ModelConfig,
    dtype: torch.dtype,
    max_model_len: int,
    *,
    block_size: int = 1,
    spare_blocks: int = 0,
) -> int:
    """`tokens_held`. Raises ValueError if that is less than one sequence of `max_model_len` tokens may need."""
    each = kv_bytes_per_token(config, dtype)
    tokens = tokens_held(megabytes, config, dtype, block_size=block_size, spare_blocks=spare_blocks)
    if tokens < max_model_len:
        blocks = -(-max_model_len // block_size) + spare_blocks
        needed = -(-blocks * block_size * each // 2**20)
        raise ValueError(
            f"kv_cache_mb is {megabytes:g}, which holds {tokens} tokens of {each} bytes; one sequence may grow to "
            f"{max_model_len} tokens: raise kv_cache_mb to {needed}"
            + (f", or lower max_model_len to {tokens}" if tokens else "")
        )
    return tokens


class KVStore:
    """K and V of all layers in one tensor [L, 2, blocks, block_size, Hkv, D], taken at once and never grown.

    In this stage a block is a page as long as a sequence can get; in stage 03 it is a few tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.data = torch.empty(shape, device=device, dtype=dtype)
        self.views = [(keys, values) for keys, values in self.data]  # made once: every layer of every step asks

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each [blocks, block_size, Hkv, D]: views, so writing to them fills the cache."""
        return self.views[layer]

    def copy_blocks(self, pairs: Iterable[tuple[int, int]], source: KVStore | None = None) -> None:
        """Copy whole blocks, (from, to), in all layers; from another store if one is given."""
        data = (source or self).data
        for old, new in pairs:
            self.data[:, :, new] = data[:, :, old]
