"""What each part of stage 07 is worth: left out one at a time, and put in one after the other against the batch size.

All engines of a process read one checkpoint, and each one's logits are checked before it is timed.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reference.bench.gpu_bench import Bench
from reference.bench.gpu_runs import SWITCHES, Run, build, cut, cut_answers, forget, run_workload, what_counts
from reference.bench.harness import Measurement, Result, Timing
from reference.bench.plots import grouped, lines
from reference.bench.workloads import LARGEST_ID, Workload, workloads

EVERYTHING = "everything"
# Requests and tokens of each answer: an eager step takes ten times as long, and shows it in a few hundred steps.
SHORTENED = {"decode_heavy": (256, 256), "mixed": (128, 192), "single": (1, 256)}
# What is left out. The few-row products are fused kernels, too.
STEPWISE = {
    "eager": SWITCHES,
    "graph": ("fused", "few_rows", "overlap"),
    "graph + fused": ("overlap",),
    "graph + fused + overlap": (),
}
PROMPT = 256  # tokens, where the batch size varies
STEADY, BEFORE, AFTER = 32, 8, 4  # decode steps that are timed, and those around them that are not


def measure_ablation(bench: Bench) -> Path:
    """Three short workloads through the whole engine, and through engines that lack one part. Returns the file."""
    options = bench.options
    result = Result(
        f"s{options.stage:02d}_ablation_{options.model_shape}",
        "Without graphs the host launches a few hundred kernels per step and decides everything; without the fused "
        "kernels each step has twice as many, and activations cross memory more often; the few-row products matter to "
        "`single` alone; without overlap the host's share of a step is added to the GPU's.",
    )
    variants = {EVERYTHING: (), **{f"without {switch}": (switch,) for switch in SWITCHES}}
    works = {name: shortened(workloads()[name], options) for name in SHORTENED}
    seconds: dict[str, dict[str, float]] = {name: {} for name in works}
    for variant, without in variants.items():
        llm = checked_engine(bench, without)
        for name, work in works.items():
            runs = timed_runs(llm, work, launches="graphs" in without)
            unit, amount = what_counts(work)
            timing = Timing.of([run.seconds for run in runs])
            seconds[name][variant] = timing.min
            slower = timing.min / seconds[name][EVERYTHING]
            result.measurements.append(
                Measurement.rate(f"{name}, {variant}", timing, amount, unit, note=f"{slower:.2f} times the time")
            )
            bench.say(f"{result.measurements[-1].name}: {timing.min:.3f} s, {slower:.2f} times {EVERYTHING}")
        path = result.save(options.out)
        del llm
        bench.empty_device()
    unit = "of the full engine"
    shares = {
        name: [Measurement.single(variant, each[EVERYTHING] / each[variant], unit) for variant in variants]
        for name, each in seconds.items()
    }
    title = f"Throughput of {options.model_shape} with one part left out"
    grouped(shares, title).save(options.out / f"{result.name}.svg")
    return path


def measure_batch_sizes(bench: Bench) -> Path:
    """Milliseconds of a steady decode step by the number of rows, with more and more of the stage. Returns the file."""
    options = bench.options
    result = Result(
        f"s{options.stage:02d}_batch_{options.model_shape}",
        "An eager step takes the host's time whatever the batch; a graph takes the GPU's, which hardly grows while "
        "reading the weights is most of it. Fusing helps at every size, overlap most where the GPU's part is short.",
    )
    series: dict[str, list[Measurement]] = {}
    for variant, without in STEPWISE.items():
        llm = checked_engine(bench, without)
        for rows in options.batch_sizes:
            found = steady_step(llm, rows, f"{variant}, {rows} rows", options)
            series.setdefault(variant, []).append(found)
            result.measurements.append(found)
            bench.say(f"{found.name}: {found.median:.3f} ms")
        path = result.save(options.out)
        del llm
        bench.empty_device()
    title = f"A decode step of {options.model_shape}"
    lines(series, options.batch_sizes, "rows", title, log=True).save(options.out / f"{result.name}.svg")
    return path


def checked_engine(bench: Bench, without: Sequence[str]) -> Any:
    """An engine without these parts, whose logits are Hugging Face's."""
    llm = build(bench.folder, bench.options, without)
    bench.check(llm, thorough=False)
    return llm


def shortened(work: Workload, options: Any) -> Workload:
    """As long as an ablation needs it; for a trial still shorter."""
    requests, tokens = SHORTENED[work.name]
    return cut(cut_answers(work, requests, tokens), options.requests, options.tokens)


def timed_runs(llm: Any, work: Workload, launches: bool) -> list[Run]:
    """Two runs after one that captures every graph; of an engine without graphs one run after a short one."""
    run_workload(llm, cut_answers(work, None, 4) if launches else work)
    runs = []
    for _ in range(1 if launches else 2):
        forget(llm)
        runs.append(run_workload(llm, work))
    return runs


def steady_step(llm: Any, rows: int, name: str, options: Any) -> Measurement:
    """Median of the time from the end of a step to the end of the next, while `rows` answers grow together."""
    steady = min(STEADY, options.tokens or STEADY)
    prompt = [number % LARGEST_ID for number in range(min(PROMPT, options.tokens or PROMPT))]
    prompts = tuple((first, *prompt) for first in range(rows))
    work = Workload("steady", "one decode step", prompts, (BEFORE + steady + AFTER,) * rows)
    for answer in (BEFORE, None):  # the first run captures
        forget(llm)
        run = run_workload(llm, cut_answers(work, None, answer))
    timing = Timing.of([1000 * seconds for seconds in run.cycles[-steady - AFTER : -AFTER]])
    return replace(Measurement.of_timing(name, timing), unit="ms")
