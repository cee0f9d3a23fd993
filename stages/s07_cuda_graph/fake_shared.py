"""For checks: shared memory as on a Hopper GPU, where warps, copies and products must not get in each other's way."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from stages.s07_cuda_graph.fake_warps import Fault, Warp

PANEL = 64  # numbers of 16 bits: wider tiles lie there as panels, one after the other
PATTERN = 8 * PANEL  # numbers after which their order within a panel repeats


def warp() -> Warp:
    """The one that runs."""
    return cast(Warp, threading.current_thread())


class Tile(Tensor):
    """A tensor of the kernel: whatever is computed from it is one, too."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


@dataclass(eq=False)
class Memory:
    """One allocation of shared memory: tiles, or barriers."""

    parts: int
    data: Tensor
    name: str = "shared memory"
    barriers: dict[int, Any] = field(default_factory=dict)  # by where they are


@dataclass(frozen=True, eq=False)
class Shared:
    """A tile of shared memory, or several, from number `start` on."""

    memory: Memory
    start: int
    shape: tuple[int, ...]
    turned: bool = False
    layout: object = None

    def __str__(self) -> str:
        return f"{self.memory.name}[{self.start * self.memory.parts // len(self.memory.data)}]"

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.data.dtype

    def index(self, part: int) -> Shared:
        if not 0 <= part < self.shape[0]:
            raise Fault(f"{self.memory.name} has no part {part} of {self.shape[0]}")
        return Shared(self.memory, self.start + part * math.prod(self.shape[1:]), self.shape[1:])

    def permute(self, order: tuple[int, int]) -> Shared:
        return replace(self, shape=tuple(self.shape[i] for i in order), turned=order == (1, 0))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared:
        if dtype != self.dtype or math.prod(shape) != math.prod(self.shape) or math.prod(shape[1:]) % PATTERN:
            raise Fault(f"{self.memory.name} of {self.shape} is no {list(shape)}, or not in patterns of 8 rows")
        return replace(self, shape=tuple(shape))

    def meets(self, other: Shared) -> bool:
        mine, its = (range(x.start, x.start + math.prod(x.shape)) for x in (self, other))
        return self.memory is other.memory and mine.start < its.stop and its.start < mine.stop

    def panels(self) -> Tensor:
        """A view [rows, panels, columns of a panel]."""
        flat = self.memory.data[self.start : self.start + math.prod(self.shape)]
        return flat.view(self.shape[0 if self.turned else -1] // PANEL, -1, PANEL).transpose(0, 1)

    def read(self) -> Tensor:
        return self.panels().reshape(self.shape[::-1]).T if self.turned else self.panels().reshape(self.shape)

    def write(self, value: Tensor) -> None:
        self.panels().copy_(value.view_as(self.panels()))

    def load(self, layout: object = None) -> Tensor:
        warp().pause()
        check_landed(self)
        return self.read().clone()

    def store(self, value: Tensor) -> None:
        """Products see it after a fence. Nothing may change where one still reads; two may write the same there."""
        warp().pause()
        check_landed(self)
        if not torch.equal(self.read(), value):
            check_unread(self, "a write")
        self.write(value)
        warp().unfenced.append(self)


def check_landed(place: Shared) -> None:
    if any(event.writes(place) for event in warp().program.under_way):
        raise Fault(f"{warp().name} asks for {place}, to which a copy is still on its way")


def check_unread(place: Shared, what: str) -> None:
    for other in warp().program.warps:
        if any(product.reads(place) for product in other.products):
            raise Fault(f"{what} into {place} while a product of {other.name} still reads it")
