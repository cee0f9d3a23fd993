"""`ctx`: the only place where tokens meet. The model hands it q, k, v per layer and does not know about caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stages.s01_forward.ops import TORCH_OPS, Ops


class Context(Protocol):
    """What the model needs to know of the other tokens. Each stage brings its own."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] of this call's tokens -> o [T, Hq, D]."""


@dataclass(frozen=True)
class NoCache:
    """The whole sequence is in this very call: attend over the keys that were just computed, keep nothing."""

    ops: Ops = TORCH_OPS

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.ops.attention(q, k, v, q.shape[-1] ** -0.5)
