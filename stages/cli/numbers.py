"""Numbers as typed: one that its option does not take is told by the option's name, before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from stages.cli.errors import plain_errors

Check = Callable[[typer.CallbackParam, float | None], float | None]
LARGEST = sys.float_info.max  # of the finite numbers


def at_least(low: float, high: float = LARGEST) -> Check:
    """A callback for an option that takes finite numbers in [low, high]."""
    return taking(lambda value: low <= value <= high, f"a finite number, at least {low:g}{at_most(high)}")


def above(low: float, high: float = LARGEST) -> Check:
    """A callback for an option that takes finite numbers in (low, high]."""
    return taking(lambda value: low < value <= high, f"a finite number, above {low:g}{at_most(high)}")


def at_least_and_below(low: float, end: float) -> Check:
    """A callback for an option that takes numbers in [low, end)."""
    return taking(lambda value: low <= value < end, f"a finite number, at least {low:g} and below {end:g}")


def above_or_inf(low: float) -> Check:
    """A callback for an option that takes numbers in (low, infinity]."""
    return taking(lambda value: low < value, f"a number above {low:g}, or inf")


def at_most(high: float) -> str:
    """The upper bound in words; nothing if it is none."""
    return f" and at most {high:.15g}" if high < LARGEST else ""


def taking(fits: Callable[[float], bool], words: str) -> Check:
    """A callback that takes what fits; `words` say what that is. NaN never fits; what was left out is not looked at."""

    def check(option: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None and not fits(value):
            with plain_errors():
                raise ValueError(f"{option.opts[0]} is {value:.15g}; it must be {words}")
        return value

    return check
