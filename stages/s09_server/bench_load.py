"""Latency against request rate, on a CPU: this server, transformers' own, llama.cpp's; same client, same requests."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from reference.baselines.demo_gguf import write_demo_gguf
from reference.baselines.servers import free_port, llama_server, serving, transformers_serve
from reference.bench.harness import Measurement, Result
from stages.s09_server.load import Run, arrivals, drive, run_on_loop, warm_up
from stages.s09_server.load_prompts import Lengths, bodies, random_questions
from stages.s09_server.load_report import Spread, summarise
from stages.s09_server.load_target import Target

OURS, LLAMA, HF, HF_BATCHING = "StepInfer", "llama.cpp", "transformers", "transformers, batching"
WHAT = {"ttft": "time to first token", "itl": "inter-token latency"}
BAND = (10.0, 50.0, 90.0, 99.0)


@dataclass(frozen=True)
class RatedLoad:
    """Requests per second, with how many requests each rate is measured, and the lengths of prompts and answers."""

    rates: dict[float, int]
    lengths: Lengths = field(default_factory=lambda: Lengths(64, 32))


@dataclass(frozen=True)
class Contender:
    """A server: how it is started, and how it is asked for answers of full length."""

    name: str
    command: list[str]
    port: int
    full_length: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})


def contenders(
    folder: Path, scratch: Path, threads: int, tokens: int, names: Collection[str], blocks: int
) -> list[Contender]:
    """Those of `names` that can be started here; all compute in fp32, on the same weights. `blocks`: of HF_BATCHING."""
    ports = [free_port() for _ in range(4)]
    ours = [sys.executable, "-m", "stages.cli", "serve", str(folder), "--device", "cpu", "--dtype", "float32"]
    ours += ["--kv-cache-mb", "512", "--port", str(ports[0])]
    found = [Contender(OURS, ours, ports[0])]
    # transformers takes no ignore_eos: a generation config without an end token asks for the same.
    whole = {"generation_config": json.dumps({"do_sample": False, "max_new_tokens": tokens, "pad_token_id": 0})}
    for name, port, batching in ((HF, ports[1], False), (HF_BATCHING, ports[2], True)):
        command = transformers_serve(folder, port, continuous_batching=batching, blocks=blocks)
        found.append(Contender(name, command, port, whole))
    if LLAMA in names:
        try:
            command = llama_server(scratch / "demo.gguf", ports[3], threads=threads)
        except FileNotFoundError as error:
            print(f"{LLAMA} is left out: {error}")
        else:
            write_demo_gguf(scratch / "demo.gguf", "f32")
            found.append(Contender(LLAMA, command, ports[3]))
    return [each for each in found if each.name in names]


def measure_load(
    result: Result, folder: Path, load: RatedLoad, threads: int, names: Collection[str], blocks: int = 64
) -> None:
    """Every contender at every rate, one after the other on a machine that does nothing else."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        for contender in contenders(folder, Path(scratch), threads, load.lengths.answer, names, blocks):
            with serving(contender.command, contender.port, threads=threads):
                for rate, count in load.rates.items():
                    run = one_run(contender, load, rate, count)
                    result.measurements += figures(contender.name, rate, count, run)
                    print(f"{contender.name}, {rate:g} requests/s: done", flush=True)
    judge(result, load)


def one_run(contender: Contender, load: RatedLoad, rate: float, count: int) -> Run:
    """Requests as they come in an open loop; every answer must be whole."""
    rng, target = Random(f"{rate}"), Target(f"http://127.0.0.1:{contender.port}")
    questions = random_questions(count, load.lengths, rng)
    model = run_on_loop(target.first_model())
    fields = {"model": model, "stream": True, "temperature": 0.0, **contender.full_length}
    fields["stream_options"] = {"include_usage": True}
    trials = bodies(random_questions(2, load.lengths, Random(-1)), target.chat, fields)
    run_on_loop(warm_up(target, trials))
    run: Run = run_on_loop(drive(target, bodies(questions, target.chat, fields), arrivals(count, rate, rng)))
    lengths = {trace.output_tokens for trace in run.traces}
    failures = summarise(run, {}).errors
    if failures or lengths != {load.lengths.answer}:
        raise RuntimeError(f"{contender.name}: answers of {sorted(lengths)} tokens, failures: {failures}")
    return run


def figures(name: str, rate: float, count: int, run: Run) -> list[Measurement]:
    """Median latencies with their 10th and 90th percentile, and the tokens per second that came."""
    report = summarise(run, {}, BAND)
    found = []
    for short, what in WHAT.items():
        spread = report.latencies[short]
        assert isinstance(spread, Spread)
        low, middle, high, worst = spread.percentiles.values()
        note = f"p10 to p90 of {spread.count}; p99 {1000 * worst:,.0f} ms"
        found.append(Measurement(f"{what}, {rate:g} requests/s, {name}", middle, low, high, "s", count, note=note))
    tokens = report.per_second(report.output_tokens)
    note = "; ".join(report.warnings)
    return [*found, Measurement.single(f"output, {rate:g} requests/s, {name}", tokens, "tokens/s", note=note)]


def judge(result: Result, load: RatedLoad) -> None:
    """Say where this server is ahead and where it is behind, by the medians."""
    told: dict[str, list[str]] = {"shorter": [], "longer": []}
    for what in WHAT.values():
        series = series_of(result, what, load.rates)
        for other in [name for name in series if name != OURS]:
            ratios = {
                rate: theirs.median / ours.median
                for rate, ours, theirs in zip(load.rates, series[OURS], series[other], strict=True)
            }
            for word, texts in told.items():
                factors = {rate: x if word == "shorter" else 1 / x for rate, x in ratios.items()}
                if factors := {rate: x for rate, x in factors.items() if x > 1}:
                    numbers = ", ".join(f"{x:.1f}" for x in factors.values())
                    at = ", ".join(f"{rate:g}" for rate in factors)
                    texts.append(f"{what}, {numbers} times {word} than with {other} at {at} requests/s")
    result.wins, result.loses = (f"By the medians: {'; '.join(texts)}." if texts else "" for texts in told.values())


def series_of(result: Result, what: str, rates: Sequence[float] | dict[float, int]) -> dict[str, list[Measurement]]:
    """The figures of one kind by server, in the order of the rates."""
    first = f"{what}, {next(iter(rates)):g} requests/s, "
    names = [each.name.removeprefix(first) for each in result.measurements if each.name.startswith(first)]
    return {name: [result[f"{what}, {rate:g} requests/s, {name}"] for rate in rates] for name in names}
