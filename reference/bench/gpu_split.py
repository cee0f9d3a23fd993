"""Where a step's time goes: the host's part by what it does, the GPU's by kinds of kernels, and what a floor takes.

Each workload is looked at in steps of one kind (`STEPS`): decode steps with all rows, halfway through the shortest
answer, over a cache that is taken to be full (`gpu_steady.py`); and steps that compute nothing but prompts.

The host's: `schedule`, `launch` (the runner's `execute`: from a plan to started kernels), `wait` (until the tokens are
there), `update`, and what is outside of these. The GPU's: from a step's first operation to its last, by a pair of
events around `execute`; the events cost a microsecond each and wait for nothing. Both are taken without the profiler;
what ran within that span comes from it, in runs of its own, last of all. So a step is

    products + attention + sampling + small + other + gaps (nothing runs within the span) + idle (between two spans)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reference.bench.gpu_runs import cut_answers, forget, run_workload
from reference.bench.gpu_steady import BEFORE, STEADY, context_lens, decode_load, fill
from reference.bench.gpu_step_times import PARTS, StepTime, profiled_steps, split_steps
from reference.bench.harness import Measurement
from reference.bench.kernel_kinds import KINDS, OTHER, by_kind, longest_names
from reference.bench.plots import stacked
from reference.bench.roofline import Machine, Shape, decode_parts, prompt_parts
from reference.bench.workloads import Workload, common_prefix
from reference.picture import Picture

DECODE, PROMPTS = "decode step", "step with prompts"
STEPS = {
    "mixed": (DECODE, PROMPTS), "decode_heavy": (DECODE,), "single": (DECODE,), "prefill": (PROMPTS,),
    "shared_prefix": (PROMPTS, DECODE),
}  # fmt: skip
PROMPT_STEPS = 6  # full ones
PROFILED = 8  # decode steps


@dataclass(frozen=True)
class StepLoad:
    """A run whose steps are of one kind: those from number `first` on, `count` of them; None: all that there are."""

    name: str
    work: Workload
    first: int = 0
    count: int | None = None
    warm: tuple[int, ...] | None = None  # a prompt that was computed before

    @property
    def decodes(self) -> bool:
        return self.count is not None

    def prepare(self, llm: Any) -> None:
        """Books for a run of it."""
        (fill if self.decodes else forget)(llm)
        if self.warm:
            run_workload(llm, replace(self.work, prompts=(self.warm,), output_lens=(1,)))

    def floor(self, shape: Shape, machine: Machine, steps: int) -> dict[str, float]:
        """Seconds of a step at least, by what takes them."""
        common = common_prefix(self.work)
        if self.decodes:
            return decode_parts(shape, machine, context_lens(self.work), shared=common)
        spans = [(reused := self.shared(prompt), len(prompt) - reused) for prompt in self.work.prompts]
        parts = prompt_parts(shape, machine, spans, shared=common)
        return {part: seconds / steps for part, seconds in parts.items()}

    def shared(self, prompt: Sequence[int], block_size: int = 16) -> int:
        """Tokens of a prompt that the warm one begins with, in whole blocks."""
        same = 0
        for mine, theirs in zip(prompt[:-1], self.warm or (), strict=False):
            if mine != theirs:
                break
            same += 1
        return same // block_size * block_size


def loads_of(work: Workload, budget: int, steady: int = STEADY) -> list[StepLoad]:
    """What is looked at of a workload. budget: tokens of a step."""
    warm = work.prompts[0] if work.name == "shared_prefix" else None
    found = []
    for kind in STEPS[work.name]:
        if kind == DECODE:
            made = min(work.output_lens) // 2
            grown = [prompt + work.prompts[0][:1] * made for prompt in work.prompts]
            load = decode_load(work.name, grown, steady)
            found.append(StepLoad(f"{work.name}, {kind}", load, BEFORE, steady, warm))
        else:
            lens = np.cumsum([len(prompt) for prompt in work.prompts])
            requests = max(1, int(np.searchsorted(lens, PROMPT_STEPS * budget, side="right")))
            few = work if warm else replace(work, prompts=work.prompts[:requests])
            found.append(StepLoad(f"{work.name}, {kind}", cut_answers(few, len(few.prompts), 1), warm=warm))
    return found


def measure_split(llm: Any, load: StepLoad, shape: Shape, machine: Machine | None) -> list[Measurement]:
    """Milliseconds of a step and of its parts, medians, and what the floor takes.

    Of steps with prompts without the first, in which the GPU waits for the plan. If they are few: averages of all.
    """
    load.prepare(llm)
    with split_steps(llm) as steps:
        run_workload(llm, load.work)
    launched = [step for step in steps if step.rows]
    chosen = launched[load.first : load.first + load.count] if load.count else launched[1:]
    if len(chosen) > 2:
        found = _split(load.name, chosen, _median, len(chosen))
    else:
        found = _split(load.name, steps, lambda seconds: sum(seconds) / len(launched), len(launched))
    if machine is not None:
        floor = load.floor(shape, machine, len(launched))
        found.append(Measurement.single(f"{load.name}: floor", 1000 * sum(floor.values()), "ms"))
        found += [Measurement.single(f"{load.name}: floor, {part}", 1000 * each, "ms") for part, each in floor.items()]
    return found


def measure_kernels(llm: Any, load: StepLoad, gpu: float) -> list[Measurement]:
    """Milliseconds of a step in which kernels of each kind ran, and in which none did; nothing on a CPU.

    gpu: milliseconds from a step's first operation to its last, as measured without the profiler.
    """
    count = None if load.count is None else min(PROFILED, load.count)
    load.prepare(llm)
    with profiled_steps(llm, load.first, count) as found:
        run_workload(llm, load.work)
    if not found:
        return []
    ran, steps = found
    kinds = {kind: microseconds / 1000 / steps for kind, microseconds in by_kind(ran).items()}
    notes = {
        kind: ", ".join(f"{name[:40]} x{n / steps:.3g}" for name, _, n in longest_names(ran, kind)) for kind in kinds
    }
    name, note = f"{load.name}: GPU busy", f"{len(ran) / steps:.0f} operations, mean of {steps} steps"
    busy = sum(kinds.values())
    return [
        Measurement.single(name, busy, "ms", note=note),
        *(Measurement.single(f"{load.name}: {kind}", each, "ms", note=notes[kind]) for kind, each in kinds.items()),
        Measurement.single(f"{load.name}: gaps", max(0.0, gpu - busy), "ms"),
    ]


def _split(
    name: str, steps: Sequence[StepTime], typical: Callable[[Sequence[float]], float], count: int
) -> list[Measurement]:
    times = {f"host, {part}": [step.parts[part] for step in steps] for part in PARTS}
    times["GPU"] = [step.gpu for step in steps if step.gpu is not None]
    whole = 1000 * typical([step.seconds for step in steps])
    found = [
        Measurement.single(name, whole, "ms", note=f"of {count} steps"),
        *(Measurement.single(f"{name}: {part}", 1000 * typical(each), "ms") for part, each in times.items() if each),
    ]
    if times["GPU"]:
        note = "the GPU waits for the host"
        found.append(Measurement.single(f"{name}: idle", max(0.0, whole - found[-1].median), "ms", note=note))
    return found


def _median(seconds: Sequence[float]) -> float:
    return float(np.median(seconds))


def plot_split(found: Sequence[Measurement], title: str) -> dict[str, Picture]:
    """Bars of steps in per cent: "host" by what it does, and "GPU" by kinds of kernels, where these are known."""
    steps = {each.name: each.median for each in found if each.name.endswith((DECODE, PROMPTS))}
    bars: dict[str, dict[str, dict[str, float]]] = {"host": {}, "GPU": {}}
    for each in found:
        step, _, part = each.name.partition(": ")
        side = "host" if part.startswith("host, ") else "GPU" if part in (*KINDS, OTHER, "gaps", "idle") else ""
        if step in steps and side:
            mine = bars[side].setdefault(step, {})
            name = part.removeprefix("host, ") if part not in ("gaps", "idle") else "nothing runs"
            mine[name] = mine.get(name, 0.0) + 100 * each.median / steps[step]
    return {side: stacked(rows, "% of the step", f"{title}: {side}") for side, rows in bars.items() if rows}
