"""One check and its verdict."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Check:
    """`error` and what it was `allowed`, where there is a figure; `group` names those whose worst is reported."""

    name: str
    passed: bool
    error: float = 0.0
    allowed: float = 0.0
    group: str = ""
    note: str = ""

    def __str__(self) -> str:
        figures = f": {self.error:.3g}, {self.allowed:.3g} allowed" if self.allowed else ""
        return f"{self.name}{figures}" + (f" ({self.note})" if self.note else "")


def within(name: str, error: float, allowed: float, group: str = "") -> Check:
    """A check of a figure; NaN fails."""
    return Check(name, error <= allowed, error, allowed, group)


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """|out - exact| / |exact|, against float64."""
    return float((out.double() - exact).norm() / exact.norm())
