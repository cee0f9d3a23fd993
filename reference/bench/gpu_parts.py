"""The parts of the engine that can be left out, one at a time, to see what each is worth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Part:
    """How an engine is made without it: options of `LLM`, then a change to the finished engine."""

    what: str
    options: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], None] | None = None


def _no_chunk_kernel(llm: Any) -> None:
    """Prompts' attention by the kernel of stage 03, as where the GPU has no copy engine for it."""
    if graphs := llm.engine.runner.graphs:
        _exchange(graphs, "chunks", False)


def _no_mixed_graphs(llm: Any) -> None:
    """Only steps in which every row decodes are graphs."""
    if graphs := llm.engine.runner.graphs:
        size_of = graphs.size_of
        _exchange(graphs, "size_of", lambda plan, queries, *rest: size_of(plan, queries, *rest) if queries else None)


def _no_many_rows(llm: Any) -> None:
    """The model's own layer from where few-row products end."""
    step = llm.engine.runner.step
    vars(step)["few"] = step.few[:1]  # a frozen dataclass, which every graph asks when it is captured


def _exchange(owner: Any, name: str, value: Any) -> None:
    """Set an attribute that is there: if it has got another name, the ablation would leave out nothing."""
    getattr(owner, name)
    setattr(owner, name, value)


PARTS: dict[str, Part] = {
    "graphs": Part("every operation is launched by itself", {"graphs": False}),
    "mixed_graphs": Part("steps with prompts are launched operation by operation", change=_no_mixed_graphs),
    "fused": Part("torch between the products, and in the sampler", {"fused": False}),
    "few_rows": Part("the model's own layer in all steps", {"few_rows": False}),
    "many_rows": Part("the model's own layer in decode steps of more than few rows", change=_no_many_rows),
    "chunks": Part("stage 03's kernel for the attention of prompts", change=_no_chunk_kernel),
    "common_prefix": Part("every row reads the beginning that all have in common", {"common_prefix": False}),
    "overlap": Part("a step is planned when the one before has been read", {"overlap": False}),
    "prefix_cache": Part("every prompt is computed whole", {"prefix_cache": "off"}),
}


def options_without(names: Sequence[str]) -> dict[str, Any]:
    """For `LLM`."""
    return {key: value for name in names for key, value in PARTS[name].options.items()}


def change_without(llm: Any, names: Sequence[str]) -> None:
    """What options do not say. To be called before the first step; graphs that hold the part are forgotten."""
    changes = [change for name in names if (change := PARTS[name].change)]
    for change in changes:
        change(llm)
    if changes and (graphs := llm.engine.runner.graphs):
        graphs.captured.clear()
