"""A decode step against requests and context: `python -m reference.bench gpu-scaling`.

Every cell is a batch of so many requests with so many tokens each, all decoding, in the whole engine: scheduler,
graphs, sampling, overlap. The way there is left out (`gpu_steady.py`), but a few prompts alone are timed before. What
finds no room in the K/V cache is told, not measured; of one batch that does not fit it is measured what the engine does
then. The result is `speed_scaling_<shape>`, with three maps.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from reference.bench.gpu_bench import Bench, add_engine_options, check_device, prepared
from reference.bench.gpu_runs import forget, replaced, run_workload
from reference.bench.gpu_shapes import SHAPES
from reference.bench.gpu_steady import AFTER, BEFORE, STEADY, context_lens, decode_load, fill, fill_store, made_up
from reference.bench.harness import Measurement, Result, Timing
from reference.bench.plots import heat_map
from reference.bench.report import markdown_table
from reference.bench.roofline import H200, Machine, Shape, decode_floor, prefill_floor
from reference.bench.workloads import Workload

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16_384)
PROMPTS = (2048, 8192, 30_720)
BLOCK = 16


def cell_load(rows: int, context: int, steady: int) -> Workload:
    """Requests that have about `context` tokens in the cache in the middle of the steps that are timed.

    Up to a block more or less: blocks fill in turns, as among requests that came one by one.
    """
    lens = [context - (BEFORE + steady // 2) + BLOCK // 2 - row % BLOCK for row in range(rows)]
    return decode_load("steady", [made_up(max(1, length), row) for row, length in enumerate(lens)], steady)


def measure_prompt(llm: Any, length: int, shape: Shape, machine: Machine | None) -> Measurement:
    """Tokens per second of one prompt alone, of which nothing is in the cache, from the call to its first token."""
    times = []
    for repeat in range(3):  # the first meets sizes of steps that nobody had before
        forget(llm)
        times.append(run_workload(llm, Workload("prompt", "a prompt", (made_up(length, repeat),), (1,))).seconds)
    timing = Timing.of(times[1:])
    floor = prefill_floor(shape, machine, [length]) if machine else None
    share = floor and floor / timing.median
    return Measurement.rate(f"one prompt of {length} tokens", timing, length, "tok/s", roofline=share)


def blocks_of(work: Workload) -> int:
    """Blocks that all its requests hold at their ends."""
    return sum(
        -(-(len(prompt) + answer) // BLOCK) for prompt, answer in zip(work.prompts, work.output_lens, strict=True)
    )


def measure_cell(
    llm: Any, rows: int, context: int, steady: int, shape: Shape, machine: Machine | None
) -> list[Measurement]:
    """Time of a step, tokens per second; where there is no room for all, only how much is wanted."""
    name, work = f"{rows} rows, {context} tokens", cell_load(rows, context, steady)
    wanted, there = blocks_of(work), llm.engine.scheduler.cache.pool.num_blocks - 1
    if wanted > there:
        return [Measurement.single(f"{name}: no room", BLOCK * wanted, "tokens", note=f"{BLOCK * there:,} fit")]
    fill(llm)
    run = run_workload(llm, work)
    timing = Timing.of([1000 * seconds for seconds in run.cycles[-steady - AFTER : -AFTER]])
    share = 1000 * decode_floor(shape, machine, context_lens(work)) / timing.median if machine else None
    step = Measurement(f"{name}: step", timing.median, timing.min, timing.max, "ms", len(timing.times), share)
    return [step, Measurement.single(f"{name}: rate", 1000 * rows / timing.median, "tok/s")]


def measure_overload(llm: Any, rows: int, context: int, steady: int) -> list[Measurement]:
    """What happens to a batch that does not fit. Raises RuntimeError unless every answer is complete all the same."""
    work, most = cell_load(rows, context, steady), 0
    fill(llm)
    execute = llm.engine.runner.execute

    def counted(plan: Any) -> Any:
        nonlocal most
        most = max(most, len(plan.rows))
        return execute(plan)

    with replaced(llm.engine.runner, execute=counted):
        run = run_workload(llm, work)
    name, stepped_back = f"{rows} rows, {context} tokens, too many", llm.engine.scheduler.num_preemptions
    return [
        Measurement.single(f"{name}: at once", most, "rows", note=f"the others wait; {stepped_back} stepped back"),
        Measurement.single(f"{name}: rate", work.output_tokens / run.seconds, "tok/s", note="of all, to their ends"),
    ]


def memory(llm: Any) -> list[Measurement]:
    """What a token, a request and the whole engine take of the device."""
    store, state = llm.engine.runner.step.store.data, llm.engine.runner.state
    room = (llm.engine.scheduler.cache.pool.num_blocks - 1) * llm.engine.scheduler.cache.block_size
    sent, seen = state.flat.nbytes / state.num_slots, state.history.nbytes / state.num_slots
    weights = sum(each.nbytes for each in llm.model.parameters())
    found = [
        Measurement.single("weights", weights, "B"),
        Measurement.single("K/V of a token", store.nbytes / (store.shape[2] * store.shape[3]), "B"),
        Measurement.single("K/V in all", store.nbytes, "B", note=f"room for {room:,} tokens"),
        Measurement.single("state of a request: columns and block table", sent, "B"),
        Measurement.single("state of a request: tokens seen, for penalties", seen, "B"),
    ]
    if llm.device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        graphs = llm.engine.runner.graphs
        note = f"activations, {len(graphs.captured) if graphs else 0} graphs, libraries"
        rest = total - free - weights - store.nbytes - state.flat.nbytes - state.history.nbytes
        found.append(Measurement.single("everything else on the device", rest, "B", note=note))
    return found


def measure_scaling(bench: Bench) -> Path:
    """All cells. Returns the result's file."""
    options, shape = bench.options, Shape.from_config(SHAPES[bench.options.model_shape])
    machine = H200 if options.device == "cuda" and "H200" in torch.cuda.get_device_name() else None
    result = Result(
        f"speed_scaling_{options.model_shape}",
        "A step takes what reading weights and K/V takes: it hardly grows with the rows while the weights are most of "
        "it, then in proportion to all tokens in the cache. The first limit is the memory of the K/V.",
    )
    longest = max(max(options.contexts), *options.prompts) + BEFORE + STEADY + AFTER
    llm = bench.build(max_num_seqs=max(options.rows), max_model_len=longest)
    steady = min(STEADY, options.tokens or STEADY)
    bench.check(llm, thorough=False)
    bench.drop_model()
    for length in options.prompts:
        result.measurements.append(measure_prompt(llm, length, shape, machine))
        bench.say(f"{result.measurements[-1].name}: {result.measurements[-1].median:,.0f} tok/s")
    fill_store(llm)
    for context in options.contexts:
        for rows in options.rows:
            if time.perf_counter() - bench.began > options.until:
                bench.say(f"no time for {rows} rows of {context} tokens")
                continue
            found = measure_cell(llm, rows, context, steady, shape, machine)
            result.measurements += found
            bench.say(f"{found[0].name}: {found[0].median:,.3f} {found[0].unit}")
        result.save(options.out)
    refused = [name.split(" ") for each in result.measurements if (name := each.name).endswith("no room")]
    if refused:
        rows, _, context = min(refused, key=lambda words: (int(words[2]), -int(words[0])))[:3]
        result.measurements += measure_overload(llm, int(rows), int(context), steady)
    result.measurements += memory(llm)
    for name, labels in {"rate": "tokens per second", "step": "ms per step", "floor": "% of the floor's rate"}.items():
        if values := cells(result, name, options.rows, options.contexts):
            axes = ("running requests", "tokens in the cache of each", labels)
            picture = heat_map(values, options.rows, options.contexts, axes, options.model_shape, log=name != "floor")
            picture.save(options.out / f"{result.name}_{name}.svg")
    return result.save(options.out)


def cells(result: Result, what: str, rows: Sequence[int], contexts: Sequence[int]) -> list[list[float | None]] | None:
    """[rows][contexts] of "rate", "step" or "floor" (in per cent); None where a cell does not fit, or if all are."""
    known = {each.name: each for each in result.measurements}

    def value(row: int, context: int) -> float | None:
        each = known.get(f"{row} rows, {context} tokens: {'step' if what == 'floor' else what}")
        if each is None or (what == "floor" and each.roofline is None):
            return None
        return 100 * (each.roofline or 0.0) if what == "floor" else each.median

    found = [[value(row, context) for context in contexts] for row in rows]
    return found if any(each is not None for row in found for each in row) else None


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print the result."""
    with prepared(parse(arguments), write=False) as bench:
        print(markdown_table(measure_scaling(bench)))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m reference.bench gpu-scaling", description=__doc__)
    parser.add_argument("--model-shape", choices=tuple(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="running requests")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens of each in the cache")
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS, help="tokens of prompts that come alone")
    parser.add_argument("--until", type=float, default=float("inf"), help="no cell begins after so many seconds")
    parser.add_argument("--batched-tokens", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--requests", type=int, help="for a trial: at most so many")
    parser.add_argument("--tokens", type=int, help="for a trial: contexts, prompts and timed steps of at most so many")
    add_engine_options(parser, memory_share=0.9, longest_check=300)
    options = parser.parse_args(arguments)
    check_device(parser, options, trial="--device cpu --model-shape tiny --requests 4 --tokens 32")
    for name, most in (("rows", options.requests), ("contexts", options.tokens), ("prompts", options.tokens)):
        given = getattr(options, name)
        if bad := [each for each in given if each < 1]:
            parser.error(f"--{name} must be at least 1, got {bad[0]}")
        setattr(options, name, sorted({min(each, most or each) for each in given}))
    options.stage = 7
    return options


if __name__ == "__main__":
    main()
