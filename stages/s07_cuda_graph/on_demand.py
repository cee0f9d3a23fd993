"""Read later: a sequence that is not there until somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Entry = TypeVar("Entry")


class OnDemand(Sequence[Entry]):
    """Its length is known; an entry is made when somebody asks for it. `make` raises IndexError where there is none."""

    def __init__(self, length: int, make: Callable[[int], Entry]) -> None:
        self.length, self.make = length, make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> Entry:  # type: ignore[override]  # no slices
        return self.make(number)
