"""What the server costs beside the engine: 64 streams of a dry run, by the engine's loop alone and over HTTP."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil

from reference.baselines.servers import free_port, serving
from reference.bench.harness import Measurement, Result, Timing
from stages.s01_forward.sampling_params import SamplingParams
from stages.s09_server.answers import add_message
from stages.s09_server.engine_loop import EngineLoop
from stages.s09_server.engine_process import EngineSettings, make_llm
from stages.s09_server.load import Run, drive, run_on_loop, warm_up
from stages.s09_server.load_prompts import Lengths, bodies, random_questions
from stages.s09_server.load_report import summarise
from stages.s09_server.load_target import Target
from stages.s09_server.messages import encode

SHOWN = 12  # functions of the profile


@dataclass(frozen=True)
class DryLoad:
    """Streams at a time, tokens of each, how often, and how long a step takes, in ms: 0 is as fast as it goes."""

    streams: int = 64
    tokens: int = 1000
    repeats: int = 3
    step_ms: tuple[float, ...] = (0.0, 4.0)
    profile_seconds: int = 4


def measure_dry_run(model: str, load: DryLoad) -> Result:
    """Tokens per second with HTTP and without, CPU per token of each process, and where the API's time goes."""
    result = Result(
        "s09_dry_run",
        "Text, JSON and HTTP of a token cost the API process less than 30 µs, so two cores carry more than 20,000 "
        "tokens/s over HTTP; and since the engine has a core of its own, steps that take as long as on a GPU are not "
        "held up: at 64 streams HTTP takes less than 10 % of the engine's throughput.",
    )
    for step_ms in load.step_ms:
        name = f"{step_ms:g} ms a step" if step_ms else "no time a step"
        alone = Timing.of([engine_seconds(model, load, step_ms, repeat) for repeat in range(load.repeats)])
        amount = load.streams * load.tokens
        rate = Measurement.rate(f"engine loop alone, {name}", alone, amount, "tokens/s")
        result.measurements.append(rate)
        over = measure_server(result, model, load, step_ms, name)
        share = 100 * (1 - over / rate.median)
        result.measurements.append(Measurement.single(f"lost to HTTP, {name}", share, "%"))
        measure_server(result, model, load, step_ms, f"text in a third process, {name}", third=True)
    fastest = max((each for each in result.measurements if each.name.startswith("over HTTP")), key=lambda x: x.median)
    per_token = result[f"CPU of the API process per token, {name}"].median
    result.wins = (
        f"Over HTTP up to {fastest.median:,.0f} tokens/s reach the client; with {name} {share:.1f} % is lost of the "
        "rate of the engine alone."
    )
    result.loses = (
        f"With {name} the API process takes {1e6 * per_token:.0f} µs of CPU for a token, most of it for the chunk that "
        f"carries it; and three processes, the client among them, share {psutil.cpu_count()} cores."
    )
    return result


def engine_seconds(model: str, load: DryLoad, step_ms: float, seed: int) -> float:
    """Seconds of the engine's loop for all streams, its messages encoded, nobody listening."""
    llm = make_llm(EngineSettings(model, {"max_num_seqs": load.streams}, True, step_ms))
    rng = Random(seed)
    prompts = [[rng.randrange(llm.config.vocab_size) for _ in range(16)] for _ in range(load.streams)]
    params = SamplingParams(max_tokens=load.tokens, ignore_eos=True)
    loop = EngineLoop(llm.engine, llm.requests.eos_token_ids)
    for number, request in enumerate(llm.requests.build(prompts, params)):
        loop.take(add_message(request, number, number))
    start = time.perf_counter()
    while loop.has_work:
        encode(loop.step())
    seconds = time.perf_counter() - start
    if loop.tokens != load.streams * load.tokens:
        raise RuntimeError(f"the engine told {loop.tokens} tokens, asked for {load.streams * load.tokens}")
    return seconds


def measure_server(result: Result, model: str, load: DryLoad, step_ms: float, name: str, third: bool = False) -> float:
    """Add what the server does with the same load; returns its tokens per second. third: with a text process."""
    port = free_port()
    command = [sys.executable, "-m", "stages.cli", "serve", model, "--dry-run", "--dry-run-step-ms", str(step_ms)]
    command += ["--port", str(port), "--max-num-seqs", str(load.streams), *(["--text-process"] if third else [])]
    target, amount = Target(f"http://127.0.0.1:{port}"), load.streams * load.tokens
    with serving(command, port) as server:
        api = psutil.Process(server.pid)
        child = api.children()[0]
        processes = {"API process": api, "text process" if third else "engine process": child}
        if third:
            processes["engine process"] = child.children()[0]
        one_run(target, load, 0)  # whoever comes first waits for imports
        before = {who: process.cpu_times() for who, process in processes.items()}
        runs = [one_run(target, load, repeat) for repeat in range(1, load.repeats + 1)]
        for who, process in processes.items():
            now = process.cpu_times()
            spent = now.user + now.system - before[who].user - before[who].system
            per_token = spent / (load.repeats * amount)
            result.measurements.append(Measurement.single(f"CPU of the {who} per token, {name}", per_token, "s"))
        chunks = sum(len(trace.times) for run in runs for trace in run.traces)
        note = f"{load.repeats * amount / chunks:.1f} tokens a chunk"
        timing = Timing.of([run.seconds for run in runs])
        rate = Measurement.rate(f"over HTTP, {name}", timing, amount, "tokens/s", note=note)
        gaps = summarise(runs[-1], {}, (50.0, 99.0)).latencies["itl"]
        assert gaps is not None
        result.measurements.append(rate)
        result.measurements += [
            Measurement.single(f"inter-token latency over HTTP, p{at:g}, {name}", value, "s")
            for at, value in gaps.percentiles.items()
        ]
        if step_ms == load.step_ms[0] and not third and shutil.which("py-spy"):
            with profiled(server.pid, load.profile_seconds) as shares:
                one_run(target, load, -1, load.profile_seconds)
            result.measurements += [Measurement.single(f"API process, in {at}", 100 * x, "%") for at, x in shares]
    return rate.median


def one_run(target: Target, load: DryLoad, seed: int, times: int = 1) -> Run:
    """All streams at once, `times` answers on each, every answer whole."""
    questions = random_questions(load.streams * times, Lengths(16, load.tokens), Random(seed))
    fields = {"model": run_on_loop(target.first_model()), "stream": True, "ignore_eos": True, "temperature": 0.0}
    fields["stream_options"] = {"include_usage": True}
    asked = bodies(questions, target.chat, fields)
    if seed == 0:
        run_on_loop(warm_up(target, asked[:1]))
    run = run_on_loop(drive(target, asked, [0.0] * len(asked), load.streams))
    report = summarise(run, {})
    if report.failed or report.output_tokens != len(asked) * load.tokens:
        raise RuntimeError(f"{report.output_tokens} tokens in {report.completed} answers, failures: {report.errors}")
    return run


@contextmanager
def profiled(pid: int, seconds: int) -> Iterator[list[tuple[str, float]]]:
    """Sample the process while the block runs; afterwards the list holds its busiest functions, with their shares.

    A sample is the function that holds the interpreter's lock: what waits, or runs without it, is not seen.
    """
    shares: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        raw = Path(scratch) / "samples.txt"
        command = ["py-spy", "record", "--pid", str(pid), "--duration", str(seconds), "--rate", "500", "--gil"]
        command += ["--format", "raw", "--output", str(raw)]
        sampler = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield shares
        if sampler.wait() == 0:
            shares += busiest(raw.read_text(encoding="utf-8").splitlines())


def busiest(stacks: Sequence[str]) -> list[tuple[str, float]]:
    """Of lines `outer;...;inner count`, the functions that were innermost most often, and their share of the time."""
    counts: Counter[str] = Counter()
    for stack in stacks:
        frames, _, count = stack.rpartition(" ")
        function, _, place = frames.rpartition(";")[2].partition(" (")
        path = place.rpartition(":")[0].replace("\\", "/")
        counts[f"{function.rpartition('.<locals>.')[2]} ({path.rpartition('/')[2]})"] += int(count)
    return [(place, count / counts.total()) for place, count in counts.most_common(SHOWN)]
