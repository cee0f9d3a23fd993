"""What each part of stage 07 is worth: left out one at a time, and put in one after the other against the batch size.

All engines of a process read one checkpoint, and each one's logits are checked before it is timed.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reference.bench.gpu_bench import Bench
from reference.bench.gpu_runs import Run, cut, cut_answers, forget, run_workload, what_counts
from reference.bench.gpu_steady import AFTER, STEADY, decode_load, made_up
from reference.bench.harness import Measurement, Result, Timing
from reference.bench.plots import heat_map, lines
from reference.bench.workloads import Workload, workloads

EVERYTHING = "everything"
# Requests and tokens of each answer: an eager step takes ten times as long, and shows it in a hundred steps.
SHORTENED = {
    "decode_heavy": (256, 128), "mixed": (128, 128), "single": (1, 128), "prefill": (32, 1), "shared_prefix": (64, 32),
}  # fmt: skip
# What is left out. The few-row products are fused kernels, too.
STEPWISE = {
    "eager": ("graphs", "fused", "few_rows", "overlap"),
    "graph": ("fused", "few_rows", "overlap"),
    "graph + fused": ("overlap",),
    "graph + fused + overlap": (),
}
LONG = 2.0  # seconds of a run
PROMPT = 256  # tokens, where the batch size varies


def measure_ablation(bench: Bench) -> Path:
    """Short workloads through the whole engine, and through engines that lack one part. Returns the file."""
    options = bench.options
    result = Result(
        f"speed_ablation_{options.model_shape}",
        "Without graphs the host launches a few hundred kernels per step and decides everything; without the fused "
        "kernels each step has twice as many, and activations cross memory more often; the few-row products matter to "
        "`single` alone; without overlap the host's share of a step is added to the GPU's. Graphs of steps with "
        "prompts and the kernel for chunks matter where prompts are computed, the prefix cache where they begin alike.",
    )
    variants = {EVERYTHING: (), **{f"without {part}": (part,) for part in options.parts}}
    works = {name: shortened(workloads()[name], options) for name in SHORTENED}
    seconds: dict[str, dict[str, float]] = {name: {} for name in works}
    for variant, without in variants.items():
        llm = checked_engine(bench, without)
        for name, work in works.items():
            runs = timed_runs(llm, work, launches="graphs" in without)
            unit, amount = what_counts(work)
            timing = Timing.of([run.seconds for run in runs])
            seconds[name][variant] = timing.min
            times = timing.min / seconds[name][EVERYTHING]
            result.measurements.append(
                Measurement.rate(f"{name}, {variant}", timing, amount, unit, note=f"{times:.2f} times the time")
            )
            bench.say(f"{result.measurements[-1].name}: {timing.min:.3f} s, {times:.2f} times {EVERYTHING}")
        path = result.save(options.out)
        del llm
        bench.empty_device()
    left_out = [variant for variant in variants if variant != EVERYTHING]
    slower = [[each[variant] / each[EVERYTHING] for each in seconds.values()] for variant in left_out]
    labels = ("", "", "times the time of the whole engine")
    heat_map(slower, left_out, list(seconds), labels, options.model_shape).save(options.out / f"{result.name}.svg")
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
    llm = bench.build(without)
    bench.check(llm, thorough=False)
    return llm


def shortened(work: Workload, options: Any) -> Workload:
    """As long as an ablation needs it; for a trial still shorter."""
    requests, tokens = SHORTENED[work.name]
    return cut(cut_answers(work, requests, tokens), options.requests, options.tokens)


def timed_runs(llm: Any, work: Workload, launches: bool) -> list[Run]:
    """Two runs, or one long one, after one that captures every graph; of an engine without graphs after a short one.

    Prefixes are found in `shared_prefix` alone, where the first run has left them.
    """
    first = run_workload(llm, cut_answers(work, None, 4) if launches else work)
    runs = []
    for _ in range(1 if launches or first.seconds > LONG else 2):
        if work.name != "shared_prefix":
            forget(llm)
        runs.append(run_workload(llm, work))
    return runs


def steady_step(llm: Any, rows: int, name: str, options: Any) -> Measurement:
    """Median of the time from the end of a step to the end of the next, while `rows` answers grow together."""
    steady, length = min(STEADY, options.tokens or STEADY), min(PROMPT, options.tokens or PROMPT)
    work = decode_load("steady", [made_up(length, row) for row in range(rows)], steady)
    run_workload(llm, cut_answers(work, None, 8))  # captures
    forget(llm)
    run = run_workload(llm, work)
    timing = Timing.of([1000 * seconds for seconds in run.cycles[-steady - AFTER : -AFTER]])
    return replace(Measurement.of_timing(name, timing), unit="ms")
