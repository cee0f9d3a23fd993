"""Numbers as typed: one that its option does not take is told by the option's name, before anything is started."""

from __future__ import annotations

import math
from collections.abc import Callable

import typer

from stages.cli.errors import plain_errors

Check = Callable[[typer.CallbackParam, float | None], float | None]


def at_least(low: float, high: float = math.inf) -> Check:
    """A callback for an option that takes finite numbers in [low, high]."""
    return finite(lambda value: low <= value <= high, f"at least {low:g}", high)


def above(low: float, high: float = math.inf) -> Check:
    """A callback for an option that takes finite numbers in (low, high]."""
    return finite(lambda value: low < value <= high, f"above {low:g}", high)


def finite(fits: Callable[[float], bool], bounds: str, high: float) -> Check:
    """A callback that takes what fits. bounds: in words, but for `high`. What was left out is not looked at."""
    bounds += f" and at most {high:g}" if math.isfinite(high) else ""

    def check(option: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None and not (math.isfinite(value) and fits(value)):
            with plain_errors():
                raise ValueError(f"{option.opts[0]} is {value:.15g}; it must be a finite number, {bounds}")
        return value

    return check
