"""The table of operations that the model calls. Stage 03 and stage 07 fill it with Triton kernels, name by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from stages.s01_forward import layers


@dataclass(frozen=True)
class Ops:
    """Which function serves each operation; the defaults are the torch versions, the reference for all others.

    Two may write their result over an input: `add_rms_norm` over `residual`, `norm_rope` over `q` and `k`. So a caller
    goes on with what they return, and gives them nothing that it still needs.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = layers.rms_norm
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = layers.add_rms_norm
    norm_rope: Callable[
        [Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor, float], tuple[Tensor, Tensor]
    ] = layers.norm_rope
    silu_mul: Callable[[Tensor], Tensor] = layers.silu_mul
    attention: Callable[[Tensor, Tensor, Tensor, float], Tensor] = layers.attention
    linear: Callable[..., Tensor] = F.linear


TORCH_OPS = Ops()
