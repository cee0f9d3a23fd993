"""Read later: randomness without a generator. The same (seed, position, number) gives the same draw, always.

A hash of counters takes the place of a generator's hidden state (the idea of Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"), so there is nothing to store, restore or share between rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """Scramble 32-bit numbers held in int64: each input bit flips each output bit with a probability near one half.

    A multiply-xorshift finaliser with the constants of Wellons' hash prospector (lowbias32, 2018).
    """
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def exponential_noise(seed: Tensor, position: Tensor, numbers: Tensor) -> Tensor:
    """fp32 draws from Exp(1) [N, M], by int64 seed [N], position [N] and numbers [M] or [N, M], 0 .. 2**32 - 1."""
    # Two keys per row: hashed with different constants, so that no two rows share a stream shifted by some tokens.
    low, high = seed & MASK, (seed >> 32) & MASK
    key = mix(mix(mix(low) ^ high) ^ (position & MASK))  # [N]
    other = mix(key ^ 0x9E3779B9)
    bits = mix(mix(numbers ^ key[:, None]) ^ other[:, None])  # [N, M], 0 .. 2**32 - 1
    # Small draws win the race, so they must be fine-grained: u = (bits + 1/2) / 2^32, and -log(1 - u) is about u.
    uniform = ((bits.double() + 0.5) / 2**32).float().clamp(max=1 - 2**-24)
    return -torch.log1p(-uniform)
