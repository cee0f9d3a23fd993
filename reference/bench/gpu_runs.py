"""An engine on the device, and one run of a workload through it: timed step by step, its tokens counted."""

import argparse
import importlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from reference.bench.gpu_parts import change_without, options_without
from reference.bench.harness import Measurement, Timing
from reference.bench.roofline import Machine, Shape, decode_parts, generate_floor, prompt_parts
from reference.bench.workloads import Workload, common_prefix
from stages import stage_names
from stages.s01_forward.sampling_params import SamplingParams

TEMPERATURE = 0.6
MAX_MODEL_LEN, MAX_NUM_SEQS = 4096, 256


def build(folder: Path, options: argparse.Namespace, without: Sequence[str] = (), **others: Any) -> Any:
    """The stage's `LLM` with a cache as large as the memory share allows, and room for every workload.

    without: of `PARTS`, those that are left out. others: options of `LLM`.
    """
    name = next(name for name in stage_names() if name.startswith(f"s{options.stage:02d}_"))
    llm_class = importlib.import_module(f"stages.{name}.llm").LLM
    memory = {"kv_cache_mb": options.kv_cache_mb} if options.kv_cache_mb else {"memory_share": options.memory_share}
    usual = {
        "max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": options.batched_tokens,
    }  # fmt: skip
    chosen = usual | memory | options_without(without) | others
    llm = llm_class(folder, device=options.device, dtype="bfloat16", **chosen)
    change_without(llm, without)
    return llm


def forget(llm: Any) -> None:
    """An empty prefix cache: new books over the same memory."""
    old = llm.engine.scheduler
    cache = llm.make_cache(old.cache.pool.num_blocks, old.cache.block_size)
    llm.engine.scheduler = llm.make_scheduler(cache, old.swap)


@contextmanager
def replaced(owner: Any, **others: Any) -> Iterator[None]:
    """Attributes of an object, exchanged inside the block."""
    before = {name: vars(owner)[name] for name in others if name in vars(owner)}
    for name, value in others.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in others:
            delattr(owner, name)
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def timed_steps(llm: Any) -> Iterator[list[tuple[float, float]]]:
    """When each step of the engine inside the block began and ended, in seconds of `time.perf_counter`."""
    times: list[tuple[float, float]] = []
    step = llm.engine.step

    def timed() -> Any:
        start = time.perf_counter()
        events = step()
        times.append((start, time.perf_counter()))
        return events

    with replaced(llm.engine, step=timed):
        yield times


@dataclass(frozen=True)
class Run:
    """One run of a workload."""

    seconds: float
    steps: list[float]  # seconds of each
    first_tokens: list[float]  # seconds until each request's first token
    reused: int  # prompt tokens found in the prefix cache
    cycles: tuple[float, ...] = ()  # seconds from the end of each step to the end of the next: what is outside, too
    replays: int | None = None  # steps that were a graph; None where there are no graphs


def run_workload(llm: Any, work: Workload) -> Run:
    """Everything at once through `LLM.generate`. Raises RuntimeError if a token is missing or one too many."""
    params = [SamplingParams(temperature=TEMPERATURE, max_tokens=n, ignore_eos=True) for n in work.output_lens]
    prompts = [list(prompt) for prompt in work.prompts]
    graphs = getattr(llm.engine.runner, "graphs", None)
    before = graphs.replays if graphs else 0
    with timed_steps(llm) as steps:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
    made = [len(output.token_ids) for output in outputs]
    if made != list(work.output_lens):
        raise RuntimeError(f"{work.name}: {sum(made)} tokens came, {work.output_tokens} were asked for")
    reused = sum(output.num_cached_tokens for output in outputs)
    cycles = tuple(later - earlier for (_, earlier), (_, later) in zip(steps, steps[1:], strict=False))
    durations = [end - begin for begin, end in steps]
    replays = graphs.replays - before if graphs else None
    return Run(seconds, durations, [output.timings.first_token for output in outputs], reused, cycles, replays)


def measurements(work: Workload, runs: Sequence[Run], shape: Shape, machine: Machine | None) -> list[Measurement]:
    """Throughput of all runs, the best of them as a share of the machine's floor, and how long its steps took."""
    unit, amount = what_counts(work)
    timing = Timing.of([run.seconds for run in runs])
    best = min(runs, key=lambda run: run.seconds)
    times = ", ".join(f"{run.seconds:.3f}" for run in runs)
    floor = run_floor(work, best.reused, shape, machine) if machine is not None else None
    name, milliseconds = work.name, 1000 * np.array(best.steps)
    found = [
        Measurement.rate(name, timing, amount, unit, note=f"runs of {times} s"),
        replace(
            Measurement.single(f"{name}, best run", amount / best.seconds, unit),
            roofline=floor and floor / best.seconds,
        ),
        Measurement.single(f"{name}, seconds of the best run", best.seconds, "s"),
        Measurement.single(f"{name}, steps", len(best.steps), "", note=through_graphs(best)),
        Measurement.single(f"{name}, outside the steps", best.seconds - sum(best.steps), "s"),
        Measurement.single(f"{name}, prompt tokens found in the cache", best.reused, "tokens"),
    ]
    for share in (50, 99):
        step, ttft = np.percentile(milliseconds, share), np.percentile(best.first_tokens, share)
        found.append(Measurement.single(f"{name}, step, p{share}", float(step), "ms"))
        found.append(Measurement.single(f"{name}, time to first token, p{share}", float(ttft), "s"))
    return found


def run_floor(work: Workload, reused: int, shape: Shape, machine: Machine) -> float:
    """Seconds of a run at least, in which so many prompt tokens were found in the cache."""
    lens, shared = [len(prompt) for prompt in work.prompts], common_prefix(work)
    if not reused:
        return generate_floor(shape, machine, lens, work.output_lens)
    found = reused // len(lens)
    seconds = sum(prompt_parts(shape, machine, [(found, n - found) for n in lens], shared=shared).values())
    for step in range(1, max(work.output_lens)):
        running = [p + step for p, n in zip(lens, work.output_lens, strict=True) if n > step]
        seconds += sum(decode_parts(shape, machine, running, shared=shared).values())
    return seconds


def through_graphs(run: Run) -> str:
    """How many of its steps were replays of a graph."""
    return "" if run.replays is None else f"{run.replays} of them were a graph"


def what_counts(work: Workload) -> tuple[str, int]:
    """The unit in which engines are compared, and how much of it the workload is."""
    return ("input tok/s", work.prompt_tokens) if work.name == "prefill" else ("tok/s", work.output_tokens)


def cut(work: Workload, requests: int | None, tokens: int | None) -> Workload:
    """For trials: the first requests only, of each the last tokens of its prompt and the first of its answer."""
    prompts = tuple(prompt[-(tokens or 0) :] for prompt in work.prompts)
    return cut_answers(replace(work, prompts=prompts), requests, tokens)


def cut_answers(work: Workload, requests: int | None, tokens: int | None) -> Workload:
    """The first requests only, with their whole prompts and the first tokens of their answers."""
    lens = tuple(min(n, tokens or n) for n in work.output_lens[:requests])
    return replace(work, prompts=work.prompts[:requests], output_lens=lens)
