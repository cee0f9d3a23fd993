"""What continuous batching buys: `python -m stages.s04_continuous_batching.bench`.

Four results in reference/results: `s04_ragged` (requests of mixed lengths at once, against Hugging Face in three ways,
in turns), `s04_concurrency` (throughput by the number of requests), `s04_swap` (keeping the K/V of preempted requests
in host memory against computing it again) and `s04_scheduler` (what a step costs on the host, without a model).
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from reference.baselines.hf_batching import continuous_batching
from reference.baselines.hf_generate import one_by_one, padded_generate
from reference.bench.gpu_shapes import random_checkpoint
from reference.bench.harness import RESULTS, Measurement, Result, Timing, compare
from reference.bench.plots import bars, lines
from reference.checkpoints import build_tiny, demo_model
from stages.s01_forward.bench import DTYPES, hf_model
from stages.s02_kv_cache.bench import THREADS, save
from stages.s03_paged_kv.llm import LLM as Waves
from stages.s04_continuous_batching.bench_swap import measure_swap
from stages.s04_continuous_batching.llm import LLM
from stages.s04_continuous_batching.ragged_load import Load, our_run, ragged_load
from stages.s04_continuous_batching.scheduler_cost import step_costs

OURS, WAVES = "stage 04", "stage 03, in waves"
PADDED, SINGLY, BATCHING = "HF generate, padded", "HF generate, one by one", "HF continuous batching"


Run = Callable[[Load], list[list[int]]]


def ragged_runs(folder: Path, dtype: str, load: Load, stack: ExitStack) -> dict[str, Run]:
    """Everybody, ready to be given a load like this one."""
    longest = max(len(p) + n for p, n in zip(load.prompts, load.output_lens, strict=True))
    options: dict[str, Any] = {"device": "cpu", "dtype": dtype, "max_model_len": longest, "kv_cache_mb": 1024}
    model = hf_model(str(folder), dtype)
    # A model of its own: transformers switches its attention to a paged one.
    batching = continuous_batching(hf_model(str(folder), dtype), len(load.prompts) * longest)
    batch = stack.enter_context(batching)
    return {
        OURS: partial(our_run, LLM(folder, **options)),
        WAVES: partial(our_run, Waves(folder, **options)),
        PADDED: lambda load: padded_generate(model, load.prompts, load.output_lens),
        SINGLY: lambda load: one_by_one(model, load.prompts, load.output_lens),
        BATCHING: lambda load: batch(load.prompts, load.output_lens),
    }


def timed(runs: Mapping[str, Run], load: Load, repeats: int) -> tuple[dict[str, Timing], dict[str, list[list[int]]]]:
    """Timings, in turns and after a short load to warm up, and everybody's answers."""
    answers: dict[str, list[list[int]]] = {}

    def keep(name: str) -> None:
        answers[name] = runs[name](load)

    for run in runs.values():
        run(Load([prompt[:8] for prompt in load.prompts[:2]], [3, 2]))
    return compare({name: partial(keep, name) for name in runs}, 0, repeats), answers


def measure_ragged(folder: Path, loads: Mapping[str, Load], repeats: int) -> Result:
    """Useful tokens per second of everybody, in turns; a load for each dtype."""
    result = Result(
        "s04_ragged",
        "A row that ends leaves the batch at once, and no prompt is padded: only tokens that somebody wants are "
        "computed. A padded batch computes the longest prompt and the longest answer for every row.",
    )
    verdicts = []
    for dtype, load in loads.items():
        with ExitStack() as stack:
            timings, answers = timed(ragged_runs(folder, dtype, load, stack), load, repeats)
        for name, timing in timings.items():
            note = f"{asked(load)}; {same_ids(answers[name], answers[SINGLY])}"
            result.measurements.append(
                Measurement.rate(f"{name}, {dtype}", timing, load.output_tokens, "tok/s", note=note)
            )
        theirs = {name: timings[name].median for name in (PADDED, SINGLY, BATCHING)}
        best = min(theirs, key=theirs.__getitem__)
        verdicts.append(f"{theirs[best] / timings[OURS].median:.2f} times that of {best} in {dtype}")
    result.wins = f"The throughput is, against the best of Hugging Face's three, {' and '.join(verdicts)}."
    result.loses = "Requests of one length: then a padded batch wastes nothing either."
    return result


def asked(load: Load) -> str:
    return f"{len(load.prompts)} requests, {sum(map(len, load.prompts))} and {load.output_tokens} tokens"


def same_ids(found: list[list[int]], expected: list[list[int]]) -> str:
    """How many answers are equal; in bf16 near-ties may fall either way."""
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    return f"{same} of {len(expected)} answers as {SINGLY}"


def measure_concurrency(folder: Path, counts: Sequence[int], prompt: int, tokens: int, repeats: int) -> Result:
    """So many equal requests at once, each with its own prompt, in fp32."""
    result = Result(
        "s04_concurrency",
        "A decode step reads every weight once, however many rows it has: throughput grows nearly with the number of "
        "requests until the processor's arithmetic, not its memory, is the limit.",
    )
    llm = LLM(folder, device="cpu", dtype="float32", max_model_len=prompt + tokens, kv_cache_mb=1024)
    rng = Random(1)
    prompts = [[rng.randrange(3, llm.config.vocab_size) for _ in range(prompt)] for _ in range(max(counts))]
    loads = {count: Load(prompts[:count], [tokens] * count) for count in counts}
    runs = {str(count): partial(our_run, llm, load) for count, load in loads.items()}
    runs[str(counts[0])]()  # a warm-up
    for count, timing in compare(runs, warmup=0, repeats=repeats).items():
        amount = loads[int(count)].output_tokens
        result.measurements.append(Measurement.rate(f"{count} at once", timing, amount, "tok/s"))
    first, last = result.measurements[0], result.measurements[-1]
    result.wins = (
        f"{counts[-1]} requests at once ({prompt} prompt tokens, {tokens} output tokens each) give "
        f"{last.median / first.median:.1f} times the tokens per second of {counts[0]}."
    )
    return result


def measure_scheduler(counts: Sequence[int], steps: int) -> Result:
    """Microseconds on the host per decode step, with tokens out of thin air instead of a model."""
    result = Result(
        "s04_scheduler",
        "Per row a step costs a few Python calls, so its cost grows with the rows and not with the lengths.",
    )
    for count in counts:
        for name, seconds in step_costs(count, steps).items():
            result.measurements.append(microseconds(f"{count} running, {name}", seconds))
    return result


def microseconds(name: str, seconds: Sequence[float]) -> Measurement:
    low, median, high = np.percentile(1e6 * np.array(seconds), (10, 50, 90)).tolist()
    note = "lowest and highest are the 10th and 90th percentile"
    return Measurement(name, median, low, high, "µs", len(seconds), note=note)


def run(
    parts: Sequence[str], folder: Path, out: Path, quick: bool, dtypes: Sequence[str], whole: bool, repeats: int
) -> None:
    if "scheduler" in parts:
        save(measure_scheduler((4, 16) if quick else (1, 16, 64, 256), 20 if quick else 1000), out)
    if "ragged" in parts:
        # Without bf16 instructions bf16 takes ten times as long for everybody: a quarter of the requests then.
        vocab = 500 if quick else 49_000
        small, cut = ragged_load(vocab, 4, 320, 160), set(DTYPES if quick else () if whole else ("bfloat16",))
        loads = {dtype: small if dtype in cut else ragged_load(vocab) for dtype in dtypes}
        result = measure_ragged(folder, loads, repeats)
        result.name += "_bf16" if list(dtypes) == ["bfloat16"] else ""
        save(result, out)
        bars(result.measurements, "Ragged requests, all at once").save(out / f"{result.name}.svg")
    if "concurrency" in parts:
        counts = (1, 4) if quick else (1, 2, 4, 8, 16, 32, 64)
        result = measure_concurrency(folder, counts, 8 if quick else 16, 8 if quick else 32, repeats)
        save(result, out)
        picture = lines({OURS: result.measurements}, counts, "requests at once", "Throughput by concurrency", log=True)
        picture.save(out / "s04_concurrency.svg")
    if "swap" in parts:
        load = ragged_load(500, 4, 320, 160) if quick else ragged_load(49_000, 8, 1280, 576)
        sizes = (16, 64) if quick else (16, 64, 256, 1024)
        save(measure_swap(folder, sizes, load, 160 if quick else 900, repeats), out)


def model_folder(options: argparse.Namespace, scratch: Path) -> Path:
    """The checkpoint that is asked for; one that must be made is made in `scratch`."""
    if options.quick:
        return build_tiny("llama", scratch)
    if not options.random:
        return demo_model()
    random_checkpoint("smollm2-135m", scratch, "cpu")
    return scratch


def main(arguments: list[str] | None = None) -> None:
    parts = ("scheduler", "ragged", "concurrency", "swap")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and one repeat: does it run? Keeps nothing")
    parser.add_argument("--only", choices=parts, help="this part alone")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="of the ragged load")
    parser.add_argument("--whole", action="store_true", help="the whole ragged load in bf16, too")
    parser.add_argument("--random", action="store_true", help="random weights of the demo model's shape: no download")
    parser.add_argument("--repeats", type=int, default=2, help="of every run that is timed")
    parser.add_argument("--out", type=Path, help="folder for the results (default: reference/results)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1 if options.quick else THREADS)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        out = options.out or (Path(scratch) if options.quick else RESULTS)
        folder = Path(scratch) / "tiny"
        if options.only != "scheduler":
            folder = model_folder(options, folder)
        repeats = 1 if options.quick else options.repeats
        only = [options.only] if options.only else parts
        run(only, folder, out, options.quick, options.dtypes, options.whole, repeats)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
