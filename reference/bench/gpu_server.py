"""The server on a GPU, as its clients see it: `python -m reference.bench gpu-server --model-shape qwen3-0.6b`.

Random bf16 weights of the real shape behind the demo model's tokenizer. The same requests, a fixed number of them under
way, go to the engine's process without HTTP and then through `stepinfer serve`, with the load generator of
`stepinfer bench serve` as the client: the difference is what HTTP costs. Then requests arrive at random (Poisson), at
several rates. Answers have full length, and their tokens are counted. Result: `s09_gpu_<shape>`.
"""

import argparse
import asyncio
import math
import shutil
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from reference.bench.fresh import in_fresh_process, write_checkpoint
from reference.bench.gpu_shapes import CPU_SHAPES, SHAPES
from reference.bench.harness import RESULTS, Measurement, Result
from reference.bench.report import markdown_table
from stages.s01_forward.hub import resolve_model
from stages.s01_forward.sampling_params import SamplingParams
from stages.s09_server.async_llm import AsyncLLM
from stages.s09_server.engine_process import EngineSettings
from stages.s09_server.load import Run, arrivals, drive, run_on_loop, warm_up
from stages.s09_server.load_prompts import Lengths, Question, bodies, random_questions
from stages.s09_server.load_report import Report, summarise
from stages.s09_server.load_target import Target
from stages.s09_server.server_process import ServerProcess

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def main(argv: list[str]) -> None:
    """Measure, print and save."""
    options = parse(argv)
    result = Result(
        f"s09_gpu_{options.model_shape}",
        "HTTP and text are another process's work, so they cost the engine nothing until that process is full: one "
        "message per step, and chunks that merge when it is late. So the engine's rate is kept up to tens of "
        "thousands of tokens per second; latencies grow with the batch, and with what waits when arrivals come faster.",
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch) / "model"
        in_fresh_process(write_checkpoint, options.model_shape, folder, options.device)
        for name in TOKENIZER_FILES:
            shutil.copy(options.tokenizer / name, folder / name)
        alone = engine_rates(folder, options)
        result.measurements += [
            Measurement.single(f"{count} streams, engine process alone", rate, "tok/s") for count, rate in alone.items()
        ]
        result.save(options.out)
        with server(folder, options) as started:
            target = Target(started.url)
            for count in options.streams:
                result.measurements += closed(target, options, count, alone[count])
                result.save(options.out)
            for rate in options.rates:
                result.measurements += opened(target, options, rate)
                result.save(options.out)
    print(markdown_table(result.save(options.out)))


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m reference.bench gpu-server", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model-shape", choices=SHAPES | CPU_SHAPES, required=True)
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer; the demo model's if left out")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256], help="requests under way")
    parser.add_argument("--rates", type=float, nargs="+", default=[8, 32, 64], help="arrivals per second")
    parser.add_argument("--input-len", type=int, default=128, help="words of a prompt")
    parser.add_argument("--output-len", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long arrivals last")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    options.tokenizer = options.tokenizer or resolve_model("demo")
    return options


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Of the engine, by the names of `LLM`."""
    memory = {"memory_share": 0.8} if options.device == "cuda" else {"kv_cache_mb": 256}
    sizes = {"max_model_len": 4096, "max_num_seqs": max(256, *options.streams), "max_num_batched_tokens": 8192}
    return {"device": options.device, "dtype": "bfloat16", "capture": "start", **sizes, **memory}


def questions(options: argparse.Namespace, count: int) -> list[Question]:
    """Random prompts."""
    return random_questions(count, Lengths(options.input_len, options.output_len, 0.0, 0), Random(0))


def engine_rates(folder: Path, options: argparse.Namespace) -> dict[int, float]:
    """Tokens per second of the engine's process, asked by `AsyncLLM` in this one: the answers as text, no HTTP."""
    params = SamplingParams(max_tokens=options.output_len, temperature=0.0, ignore_eos=True)

    async def measure() -> dict[int, float]:
        llm = await AsyncLLM.start(EngineSettings(str(folder), engine_options(options)))
        await answer(llm, questions(options, 1), params, 1)
        rates = {}
        for streams in options.streams:
            began = time.perf_counter()
            tokens = await answer(llm, questions(options, 2 * streams), params, streams)
            rates[streams] = tokens / (time.perf_counter() - began)
        await llm.close()
        return rates

    rates: dict[int, float] = run_on_loop(measure())
    return rates


async def answer(llm: AsyncLLM, asked: list[Question], params: SamplingParams, streams: int) -> int:
    """Answer prompts, a number at a time; how many tokens came, which must be all."""
    gate, counts = asyncio.Semaphore(streams), [0] * len(asked)

    async def one(number: int) -> None:
        async with gate:
            async for event in llm.generate(str(asked[number].prompt), params):
                counts[number] += len(event.token_ids)

    await asyncio.gather(*map(one, range(len(asked))))
    if set(counts) != {params.max_tokens}:
        raise RuntimeError(f"answers have {sorted(set(counts))} tokens, {params.max_tokens} were asked for")
    return sum(counts)


def server(folder: Path, options: argparse.Namespace) -> ServerProcess:
    """`stepinfer serve` in processes of its own, ready."""
    given = engine_options(options)
    memory = given.get("memory_share")
    flags = ["--gpu-memory-utilization", memory] if memory else ["--kv-cache-mb", given["kv_cache_mb"]]
    for name in ("device", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        flags += [f"--{name.replace('_', '-')}", given[name]]
    return ServerProcess(folder, *flags, "--served-model-name", "model", "--max-waiting", 100_000)


def load(target: Target, options: argparse.Namespace, count: int, rate: float, most: int | None) -> Report:
    """One load; every answer must have come, whole."""
    fields = {"model": "model", "temperature": 0.0, "stream": True, "ignore_eos": True}
    fields["stream_options"] = {"include_usage": True}
    sent = bodies(questions(options, count), False, fields)

    async def measure() -> Run:
        await warm_up(target, sent[:1])
        return await drive(target, sent, arrivals(count, rate, Random(0)), most)

    report = summarise(run_on_loop(measure()), {})
    if report.failed or report.output_tokens != count * options.output_len:
        raise RuntimeError(
            f"{report.failed} of {count} requests failed ({report.errors}); {report.output_tokens} tokens"
        )
    return report


def closed(target: Target, options: argparse.Namespace, streams: int, alone: float) -> list[Measurement]:
    """A fixed number of requests under way."""
    report = load(target, options, 2 * streams, math.inf, streams)
    rate = report.per_second(report.output_tokens)
    note = f"{rate / alone:.3f} of the engine's; {report.output_tokens / report.chunks:.2f} tokens in a chunk"
    return [
        Measurement.single(f"{streams} streams, through HTTP", rate, "tok/s", note=note),
        *latencies(f"{streams} streams", report),
    ]


def opened(target: Target, options: argparse.Namespace, rate: float) -> list[Measurement]:
    """Arrivals at random."""
    report = load(target, options, round(rate * options.seconds), rate, None)
    name = f"{rate:g} requests/s"
    output = Measurement.single(f"{name}, output", report.per_second(report.output_tokens), "tok/s")
    return [output, *latencies(name, report)]


def latencies(name: str, report: Report) -> list[Measurement]:
    """Time to the first token and between chunks; what the client itself was late."""
    note = "; ".join(report.warnings)
    found = []
    for latency in ("ttft", "itl"):
        spread = report.latencies[latency]
        assert spread is not None
        for at in (50.0, 99.0):
            value = 1000 * spread.percentiles[at]
            found.append(Measurement.single(f"{name}, {latency}, p{at:g}", value, "ms", note=note))
    return found
