"""The engine on a CPU beside others, all in one run: `python -m reference.bench cpu`.

Three loads on the demo model: `single` (a chat prompt of 39 tokens, 128 new ones), `ragged` (16 requests at once,
2,560 prompt tokens and 1,152 new ones) and `prefill` (a prompt of 1,024 tokens, one new one). Greedy, no early end. The
peers are transformers (`generate`, which pads a ragged batch, and continuous batching) and, if the environment variable
LLAMA_SERVER says where it is, llama.cpp's server. In fp32 the engine runs twice: as it comes, and with its decode
steps compiled, which makes no difference to prompts. Everybody takes turns, and begins each run with nothing cached;
only continuous batching comes last, and once: a second thread that computes slows down the first one's parallel loops.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reference.baselines.demo_gguf import Stored, write_demo_gguf
from reference.baselines.hf_batching import continuous_batching
from reference.baselines.hf_generate import padded_generate
from reference.baselines.servers import free_port, llama_server, serving
from reference.bench.gpu_runs import forget
from reference.bench.harness import RESULTS, Measurement, Result, Timing, compare
from reference.bench.plots import bars
from reference.bench.report import markdown_table
from reference.checkpoints import build_tiny, demo_model
from stages.s01_forward.bench import DTYPES, hf_model, some_ids
from stages.s04_continuous_batching.ragged_load import Load, our_run, ragged_load
from stages.s09_server.llm import LLM

OURS, COMPILED = "StepInfer", "StepInfer compiled"
GENERATE, BATCHING, LLAMA = "transformers generate", "transformers batching", "llama.cpp server"
QUESTION = "Tell me a story about a lighthouse in a storm."  # 39 tokens in the demo model's chat template
GGUF: dict[str, Stored] = {"float32": "f32", "bfloat16": "bf16"}
SHORTEST = 8  # tokens of the prompts of a trial

Run = Callable[[Load], list[list[int]]]


def loads(llm: Any, quick: bool) -> dict[str, Load]:
    """The three loads."""
    vocab = llm.config.vocab_size
    if quick:
        return {"single": Load([some_ids(SHORTEST, vocab)], [4]), "ragged": ragged_load(vocab, 4, 320, 80)}
    prompt = llm.chat_ids([{"role": "user", "content": QUESTION}])
    return {
        "single": Load([prompt], [128]),
        "ragged": ragged_load(vocab),
        "prefill": Load([some_ids(1024, vocab)], [1]),
    }


def contenders(folder: Path, dtype: str, quick: bool, llama: bool, stack: ExitStack) -> tuple[Any, Any, dict[str, Run]]:
    """The engine, transformers' model, and everybody ready to be given loads in turns."""
    options: dict[str, Any] = {"device": "cpu", "dtype": dtype, "kv_cache_mb": 1024}
    llm, model = LLM(folder, **options), hf_model(str(folder), dtype)
    runs: dict[str, Run] = {OURS: partial(ours, llm)}
    if dtype == "float32" and not quick:
        runs[COMPILED] = partial(ours, LLM(folder, compiled=True, **options))
    runs[GENERATE] = lambda load: padded_generate(model, load.prompts, load.output_lens)
    if llama:
        runs[LLAMA] = partial(llama_run, start_llama(dtype, stack))
    return llm, model, runs


def ours(llm: Any, load: Load) -> list[list[int]]:
    """The engine of `stepinfer generate` and `stepinfer serve`, with an empty prefix cache."""
    forget(llm)
    return our_run(llm, load)


def start_llama(dtype: str, stack: ExitStack) -> str:
    """llama.cpp's server with the demo model in this dtype; its URL. FileNotFoundError if there is no such program."""
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
    port, threads = free_port(), torch.get_num_threads()
    command = llama_server(scratch / "demo.gguf", port, threads=threads, slots=16, context=1088)
    write_demo_gguf(scratch / "demo.gguf", GGUF[dtype])
    stack.enter_context(serving(command, port, threads=threads))
    return f"http://127.0.0.1:{port}/completion"


def llama_run(url: str, load: Load) -> list[list[int]]:
    """All requests at once, each in a thread that waits for its answer."""

    def ask(prompt: Sequence[int], tokens: int) -> list[int]:
        body = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0.0, "ignore_eos": True}
        body |= {"cache_prompt": False, "return_tokens": True}
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return list(json.load(answer)["tokens"])

    with ThreadPoolExecutor(len(load.prompts)) as pool:
        return list(pool.map(ask, load.prompts, load.output_lens))


def measure(folder: Path, dtypes: Sequence[str], only: Sequence[str], repeats: int, quick: bool, llama: bool) -> Result:
    """Every load, everybody in turns, in each dtype."""
    result = Result(
        "_".join(("speed_cpu", *(GGUF[dtype] for dtype in dtypes if len(dtypes) == 1))),
        "For one token a step takes as long as its weights take to be read, and what every call of PyTorch costs comes "
        "on top: reading with all cores and half of the calls should give 1.4 times transformers' tokens per second. "
        "With several rows no padding is computed. Compiled, the calls are gone: with one stream 1.3 times as fast "
        "as without, and as fast as llama.cpp's server. A prompt is arithmetic, the same for everybody.",
    )
    for dtype in dtypes:
        with ExitStack() as stack:
            llm, model, runs = contenders(folder, dtype, quick, llama, stack)
            chosen = {name: load for name, load in loads(llm, quick).items() if name in only}
            for name, load in chosen.items():
                those = {who: run for who, run in runs.items() if (name, who) != ("prefill", COMPILED)}
                timings, answers = timed(those, load, repeats)
                if name == "ragged":
                    with continuous_batching(model, 8192) as batch:
                        last = timed({BATCHING: lambda load: batch(load.prompts, load.output_lens)}, load, 1)
                    timings, answers = timings | last[0], answers | last[1]
                result.measurements += figures(f"{name}, {dtype}", load, timings, answers)
    return result


def timed(runs: Mapping[str, Run], load: Load, repeats: int) -> tuple[dict[str, Timing], dict[str, list[list[int]]]]:
    """Timings, in turns and after a short load to warm up, and everybody's answers, which must be whole."""
    answers: dict[str, list[list[int]]] = {}

    def keep(who: str) -> None:
        answers[who] = runs[who](load)
        if (lens := [len(answer) for answer in answers[who]]) != load.output_lens:
            raise RuntimeError(f"{who}: answers of {lens} tokens, {load.output_lens} were asked for")

    for run in runs.values():
        run(Load([prompt[:SHORTEST] for prompt in load.prompts[:2]], [3, 2][: len(load.prompts)]))
    return compare({who: partial(keep, who) for who in runs}, 0, repeats), answers


def figures(
    name: str, load: Load, timings: Mapping[str, Timing], answers: Mapping[str, list[list[int]]]
) -> list[Measurement]:
    """Tokens per second of everybody: new ones, or those of the prompt where only one is new."""
    prefill = load.output_tokens == len(load.prompts)
    amount, unit = (sum(map(len, load.prompts)), "prompt tok/s") if prefill else (load.output_tokens, "tok/s")
    found = []
    for who, timing in timings.items():
        same = sum(a == b for a, b in zip(answers[who], answers[OURS], strict=True))
        note = "" if who == OURS else f"{same} of {len(load.prompts)} answers as {OURS}"
        found.append(Measurement.rate(f"{name}, {who}", timing, amount, unit, note=note))
        print(f"{found[-1].name}: {found[-1].median:.1f} {unit}", flush=True)
    return found


def judge(result: Result) -> None:
    """Say where this engine is ahead and where it is behind, by the medians."""
    told: dict[bool, list[str]] = {True: [], False: []}
    rates = {tuple(each.name.rsplit(", ", 1)): each.median for each in result.measurements}
    for (load, who), theirs in rates.items():
        for own in (OURS, COMPILED):
            if (load, own) in rates and who not in (OURS, COMPILED):
                ratio = rates[load, own] / theirs
                told[ratio >= 1].append(f"{own}: {ratio:.2f} times {who} ({load})")
    result.wins, result.loses = (f"{', '.join(told[ahead])}." if told[ahead] else "" for ahead in (True, False))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m reference.bench cpu", description=__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--only", nargs="+", choices=("single", "ragged", "prefill"), help="these loads alone")
    parser.add_argument("--threads", type=int, default=2, help="of everybody")
    parser.add_argument("--repeats", type=int, default=3, help="of every run that is timed")
    parser.add_argument("--no-llama", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one repeat: does it run? Keeps nothing")
    parser.add_argument("--out", type=Path, help="folder for the result (default: reference/results)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1 if options.quick else options.threads)
    only = options.only or ("single", "ragged", "prefill")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = build_tiny("llama", Path(scratch) / "tiny") if options.quick else demo_model()
        llama = not (options.no_llama or options.quick)
        result = measure(folder, options.dtypes, only, 1 if options.quick else options.repeats, options.quick, llama)
        judge(result)
        save(result, options.out or (Path(scratch) if options.quick else RESULTS))


def save(result: Result, out: Path) -> None:
    """The figures, and a plot for each load."""
    print(markdown_table(result.save(out)))
    for load in dict.fromkeys(each.name.partition(",")[0] for each in result.measurements):
        those = [each for each in result.measurements if each.name.startswith(f"{load},")]
        bars(those, f"{load}, on a CPU").save(out / f"{result.name}_{load}.svg")


if __name__ == "__main__":
    main()
