"""For checks, benchmarks and notebooks: what an engine asked of its model, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from stages.s01_forward.model import Model


@dataclass
class Step:
    """One call of the model over T tokens; `logits` are what was then asked for, one row per answer."""

    input_ids: list[int]  # [T]
    positions: list[int]  # [T]
    logits: Tensor = field(repr=False)  # [R, V]


@contextmanager
def recorded_steps(model: Model) -> Iterator[list[Step]]:
    """The steps that the model makes inside the block, in order."""
    steps: list[Step] = []
    asked: list[tuple[list[int], list[int]]] = []
    logits_of = model.logits

    def logits(hidden: Tensor) -> Tensor:
        steps.append(Step(*asked[-1], logits_of(hidden)))
        return steps[-1].logits

    hook = model.register_forward_pre_hook(lambda _, inputs: asked.append((inputs[0].tolist(), inputs[1].tolist())))
    model.logits = logits  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        hook.remove()
        del model.logits
