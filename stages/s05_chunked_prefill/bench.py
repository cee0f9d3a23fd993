"""What chunks buy, and what they cost: `python -m stages.s05_chunked_prefill.bench`.

One result in reference/results, `s05_latency`: some requests decode while long prompts arrive, with prompts computed
whole (stage 04) and in chunks of several sizes. The pictures show the time between two tokens as it happened, and its
distribution.
"""

import argparse
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from reference.bench.harness import RESULTS, Measurement, Result
from reference.checkpoints import build_tiny, demo_model
from reference.draw import latency_percentiles
from reference.picture import GREY, Picture, colour
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.bench import THREADS, save
from stages.s04_continuous_batching.llm import LLM as Whole
from stages.s04_continuous_batching.recorder import recorded_batches, token_gaps
from stages.s05_chunked_prefill.llm import LLM

WHOLE = "whole prompts"


@dataclass(frozen=True)
class Arrivals:
    """Readers decode from the start; a long prompt comes each time the first reader has got so many tokens."""

    readers: int
    tokens: int  # that each reader gets
    long_prompt: int
    at: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """One run: (when, seconds since the token before) of all readers' tokens, and what the long prompts got."""

    gaps: list[tuple[float, float]]
    first_tokens: list[float]  # seconds from a long prompt's arrival to its first token
    seconds: float
    waits: int  # the most tokens that a step computed beside a decode


def replay(llm: Any, arrivals: Arrivals) -> Trace:
    """Drive the engine step by step, so that long prompts arrive at the same point whatever the scheduler does."""
    rng = Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(3, llm.config.vocab_size) for _ in range(length)]

    def add(length: int, tokens: int) -> Any:
        request = llm.requests.build([prompt(length)], SamplingParams(max_tokens=tokens, ignore_eos=True))[0]
        return llm.add(request, deque())[0]

    left, long, came = list(arrivals.at), [], []
    with recorded_batches(llm.engine) as batches:
        readers = [add(16, arrivals.tokens) for _ in range(arrivals.readers)]
        while llm.engine.has_work:
            llm.engine.step()
            if left and len(readers[0].generation.token_ids) >= left[0]:
                left.pop(0)
                long.append(add(arrivals.long_prompt, 2))
                came.append(batches[-1].seconds)
    for request in (*readers, *long):
        del llm.inboxes[request]
    gaps = sorted(gap for request in readers for gap in token_gaps(batches, request.id))
    first = [next(batch.seconds for batch in batches if request.id in batch.tokens) for request in long]
    decoding = [batch for batch in batches if any(row.kind == "decode" for row in batch.rows)]
    largest = max(sum(row.computed for row in batch.rows) for batch in decoding)
    return Trace(gaps, [b - a for a, b in zip(came, first, strict=True)], batches[-1].seconds, largest)


def measure_latency(folder: Path, arrivals: Arrivals, budgets: Sequence[int], repeats: int) -> tuple[Result, Any]:
    """The figures, and the last trace of each engine."""
    result = Result(
        "s05_latency",
        "A whole prompt holds up every reader for as long as it takes. With a budget of tokens per step nobody waits "
        "longer than a step of that budget; the long prompt's own first token comes later, since it shares its steps "
        "and reads the weights, and its own keys, once per chunk.",
    )
    options: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "kv_cache_mb": 512, "max_num_seqs": arrivals.readers + len(arrivals.at),
        "max_model_len": max(arrivals.long_prompt + 2, arrivals.tokens + 16),
    }  # fmt: skip
    engines: dict[str, Any] = {WHOLE: Whole(folder, **options)}
    engines |= {f"budget {budget}": LLM(folder, max_num_batched_tokens=budget, **options) for budget in budgets}
    traces: dict[str, list[Trace]] = {name: [] for name in engines}
    warm = Arrivals(arrivals.readers, 4, arrivals.long_prompt, (2,))
    for llm in engines.values():
        replay(llm, warm)
    for _ in range(repeats):
        for name, llm in engines.items():
            traces[name].append(replay(llm, arrivals))
    for name, runs in traces.items():
        percentiles = [np.percentile([gap for _, gap in run.gaps], (50, 99, 100)) for run in runs]
        note = f"{len(runs[0].gaps)} gaps a run; at most {runs[0].waits} tokens in a step that decodes"
        for place, what in enumerate(("p50", "p99", "longest")):
            values = [float(each[place]) for each in percentiles]
            result.measurements.append(spread(f"inter-token latency, {what}, {name}", values, note))
        first = [float(np.mean(run.first_tokens)) for run in runs]
        result.measurements += [
            spread(f"first token of a prompt of {arrivals.long_prompt}, {name}", first, "mean over the prompts"),
            spread(f"the whole run, {name}", [run.seconds for run in runs], ""),
        ]
    judge(result, list(engines), arrivals.long_prompt)
    return result, {name: runs[-1] for name, runs in traces.items()}


def spread(name: str, values: Sequence[float], note: str) -> Measurement:
    """Seconds: median and extremes over the runs."""
    return Measurement(name, float(np.median(values)), min(values), max(values), "s", len(values), note=note)


def judge(result: Result, names: Sequence[str], long_prompt: int) -> None:
    """Say what the figures show, for the smallest budget against whole prompts."""
    whole, least = names[0], names[1]

    def ratio(what: str) -> float:
        return result[f"{what}, {least}"].median / result[f"{what}, {whole}"].median

    result.wins = (
        f"With {least} the longest wait for a token is shorter by a factor of "
        f"{1 / ratio('inter-token latency, longest'):.1f}, the 99th percentile by "
        f"{1 / ratio('inter-token latency, p99'):.1f}."
    )
    first = f"first token of a prompt of {long_prompt}"
    result.loses = (
        f"With {least} the first token of a long prompt takes {ratio(first):.2f} times as long to come, and the whole "
        f"run {ratio('the whole run'):.2f} times as long as with {whole}."
    )


def plot_gaps(traces: Mapping[str, Trace]) -> Picture:
    """Every reader's token: when it came, and how long after the one before it."""
    picture = Picture(height=1.5 + 1.2 * len(traces))
    grid = picture.axes_grid(len(traces), 1, sharex=True, sharey=True)
    for index, (name, trace) in enumerate(traces.items()):
        ax = grid[index, 0]
        when, gaps = zip(*trace.gaps, strict=True)
        ax.vlines(when, 0, 1000 * np.array(gaps), color=colour(index), lw=1)
        ax.set_title(name, fontsize=9, color=GREY)
        ax.grid(color=GREY, alpha=0.25)
    grid[-1, 0].set_xlabel("seconds since the start")
    picture.supylabel("since the token before, ms", color=GREY, fontsize=10)
    return picture


def run(folder: Path, out: Path, quick: bool) -> None:
    arrivals = Arrivals(2, 24, 100, (4, 12)) if quick else Arrivals(8, 96, 512, (16, 40, 64))
    measure = partial(measure_latency, folder, arrivals)
    result, traces = measure((16, 64), 1) if quick else measure((64, 128, 256), 2)
    save(result, out)
    plot_gaps(traces).save(out / "s05_gaps.svg")
    seconds = {name: [gap for _, gap in trace.gaps] for name, trace in traces.items()}
    latency_percentiles(seconds).save(out / "s05_latency.svg")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and one repeat: does it run? Keeps nothing")
    parser.add_argument("--out", type=Path, help="folder for the results (default: reference/results)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1 if options.quick else THREADS)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        out = options.out or (Path(scratch) if options.quick else RESULTS)
        folder = build_tiny("llama", Path(scratch) / "tiny") if options.quick else demo_model()
        run(folder, out, options.quick)


if __name__ == "__main__":
    main()
