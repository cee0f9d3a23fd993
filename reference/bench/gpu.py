"""An engine of this course on a GPU, by the five workloads: `python -m reference.bench.gpu --model-shape qwen3-0.6b`.

Random bf16 weights of the real shape, made on the device. Before anything is timed, the engine's logits are compared
with Hugging Face's, through the scheduler and the paged cache that are timed: prefill whole and in chunks, decode, and
prompts found in the prefix cache. That is the warm-up, too. Tokens are counted after every run. One result,
`<stage>_gpu_<shape>`, which is written again after each run.
"""

import argparse
import gc
import importlib
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from reference.bench.gpu_shapes import SHAPES, random_checkpoint
from reference.bench.harness import RESULTS, Measurement, Result, Timing
from reference.bench.report import markdown_table
from reference.bench.roofline import H200, Machine, Shape, generate_floor
from reference.bench.workloads import LARGEST_ID, NAMES, Workload, workloads
from stages import stage_names
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.recorder import recorded_steps
from stages.s04_continuous_batching.recorder import RecordedBatch, recorded_batches

ALLOWED = 1.5  # times the error that Hugging Face's own bf16 logits have against its fp32 ones
CHECKED_TOKENS = 6  # of each answer
CHECKED_LENGTHS = (1, 17, 300, 700, 1500, 2500)  # prompts
CHECKED_BUDGET = 600  # tokens of a step, where prompts are to be cut into chunks
TEMPERATURE = 0.6


@dataclass(frozen=True)
class Agreement:
    """The largest relative error |logits - exact| / |exact| of any row, ours and Hugging Face's in bf16."""

    rows: int
    chunks: int  # rows that computed a part of a prompt
    reused: int  # prompt tokens that came from the prefix cache
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """How much larger ours is."""
        return self.ours / self.theirs


def check_logits(
    llm: Any, hf_model: Any, lengths: Sequence[int], tokens: int, chunk_budget: int | None = None
) -> Agreement:
    """The engine's logits of every token of some answers, against Hugging Face's over the same ids.

    Each prompt is asked three times: as the engine is; with steps of `chunk_budget` tokens and an empty prefix cache;
    and once more, when prefixes are found. Exact is Hugging Face in fp32; `hf_model` is left in fp32. Raises
    RuntimeError where ours are further from it than allowed.
    """
    rng = Random(1)
    prompts = [[rng.randint(0, LARGEST_ID) for _ in range(length)] for length in lengths]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    asked, mine, chunks, reused = [], [], 0, 0
    for budget in (None, chunk_budget, chunk_budget):
        if budget is not None and budget != llm.engine.scheduler.max_num_batched_tokens:
            forget(llm)
            llm.engine.scheduler.max_num_batched_tokens = budget
        with recorded_batches(llm.engine) as batches, recorded_steps(llm.model) as steps:
            outputs = llm.generate(prompts, params)
        mine += sampled_logits(batches, [step.logits for step in steps])
        asked += [output.prompt_token_ids + output.token_ids[:-1] for output in outputs]
        chunks += sum(row.kind == "chunk" for batch in batches for row in batch.rows)
        reused += sum(output.num_cached_tokens for output in outputs)
    forget(llm)
    theirs = hf_logits(hf_model, asked, tokens)
    exact = hf_logits(hf_model.float(), asked, tokens)
    found = Agreement(len(asked) * tokens, chunks, reused, largest_error(mine, exact), largest_error(theirs, exact))
    if not found.ratio <= ALLOWED:
        raise RuntimeError(
            f"the logits differ from Hugging Face's in fp32 by {found.ours:.4f}, its own in bf16 by "
            f"{found.theirs:.4f}: {found.ratio:.2f} times as much, {ALLOWED} are allowed"
        )
    return found


def sampled_logits(batches: Sequence[RecordedBatch], steps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Per request, in their order, the logits [tokens, V] that its tokens were sampled from."""
    rows: dict[int, list[torch.Tensor]] = defaultdict(list)
    sampling = [[row.request for row in batch.rows if row.samples] for batch in batches]
    for requests, logits in zip(filter(None, sampling), steps, strict=True):
        for request, each in zip(requests, logits, strict=True):
            rows[request].append(each.float())
    return [torch.stack(rows[request]) for request in sorted(rows)]


@torch.inference_mode()
def hf_logits(model: Any, ids: Sequence[Sequence[int]], last: int) -> list[torch.Tensor]:
    """The last logits [last, V] of each sequence, in fp32."""
    inputs = [torch.tensor([list(each)], device=model.device) for each in ids]
    return [model(each, use_cache=False, logits_to_keep=last).logits[0].float() for each in inputs]


def largest_error(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    errors = [(a - b).norm(dim=-1) / b.norm(dim=-1) for a, b in zip(found, exact, strict=True)]
    return max(error.max().item() for error in errors)


def forget(llm: Any) -> None:
    """An empty prefix cache: new books over the same memory."""
    old = llm.engine.scheduler
    cache = llm.make_cache(old.cache.pool.num_blocks, old.cache.block_size)
    llm.engine.scheduler = llm.make_scheduler(cache, old.swap)


@contextmanager
def timed_steps(llm: Any) -> Iterator[list[float]]:
    """Seconds of each step of the engine inside the block. A step ends with its tokens on the host."""
    seconds: list[float] = []
    step = llm.engine.step

    def timed() -> Any:
        start = time.perf_counter()
        events = step()
        seconds.append(time.perf_counter() - start)
        return events

    llm.engine.step = timed
    try:
        yield seconds
    finally:
        del llm.engine.step


@dataclass(frozen=True)
class Run:
    """One run of a workload."""

    seconds: float
    steps: list[float]  # seconds of each
    first_tokens: list[float]  # seconds until each request's first token
    reused: int  # prompt tokens found in the prefix cache


def run_workload(llm: Any, work: Workload) -> Run:
    """Everything at once through `LLM.generate`. Raises RuntimeError if a token is missing or one too many."""
    params = [SamplingParams(temperature=TEMPERATURE, max_tokens=n, ignore_eos=True) for n in work.output_lens]
    prompts = [list(prompt) for prompt in work.prompts]
    with timed_steps(llm) as steps:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
    made = [len(output.token_ids) for output in outputs]
    if made != list(work.output_lens):
        raise RuntimeError(f"{work.name}: {sum(made)} tokens came, {work.output_tokens} were asked for")
    reused = sum(output.num_cached_tokens for output in outputs)
    return Run(seconds, steps, [output.timings.first_token for output in outputs], reused)


def measurements(work: Workload, runs: Sequence[Run], shape: Shape, machine: Machine | None) -> list[Measurement]:
    """Throughput of all runs, the best of them as a share of the machine's floor, and where its time went.

    `shared_prefix` has no floor here: how much of it must be computed depends on what the cache holds.
    """
    by_input = work.name == "prefill"
    unit, amount = ("input tok/s", work.prompt_tokens) if by_input else ("tok/s", work.output_tokens)
    timing = Timing.of([run.seconds for run in runs])
    best = min(runs, key=lambda run: run.seconds)
    times = ", ".join(f"{run.seconds:.3f}" for run in runs)
    lens = [len(prompt) for prompt in work.prompts]
    floor = None
    if machine is not None and work.name != "shared_prefix":
        floor = generate_floor(shape, machine, lens, work.output_lens)
    name, milliseconds = work.name, 1000 * np.array(best.steps)
    found = [
        Measurement.rate(name, timing, amount, unit, note=f"runs of {times} s"),
        replace(
            Measurement.single(f"{name}, best run", amount / best.seconds, unit),
            roofline=floor and floor / best.seconds,
        ),
        Measurement.single(f"{name}, seconds of the best run", best.seconds, "s"),
        Measurement.single(f"{name}, steps", len(best.steps), ""),
        Measurement.single(f"{name}, outside the steps", best.seconds - sum(best.steps), "s"),
        Measurement.single(f"{name}, prompt tokens found in the cache", best.reused, "tokens"),
    ]
    for share in (50, 99):
        step, ttft = np.percentile(milliseconds, share), np.percentile(best.first_tokens, share)
        found.append(Measurement.single(f"{name}, step, p{share}", float(step), "ms"))
        found.append(Measurement.single(f"{name}, time to first token, p{share}", float(ttft), "s"))
    return found


def cut(work: Workload, requests: int | None, tokens: int | None) -> Workload:
    """For trials: the first requests only, of each the last tokens of its prompt and the first of its answer."""
    prompts = tuple(prompt[-(tokens or 0) :] for prompt in work.prompts[:requests])
    return replace(work, prompts=prompts, output_lens=tuple(min(n, tokens or n) for n in work.output_lens[:requests]))


def build(stage: int, folder: Path, options: argparse.Namespace) -> Any:
    """The stage's `LLM` with a cache as large as the memory share allows, and room for every workload."""
    name = next(name for name in stage_names() if name.startswith(f"s{stage:02d}_"))
    llm_class = importlib.import_module(f"stages.{name}.llm").LLM
    memory = {"kv_cache_mb": options.kv_cache_mb} if options.kv_cache_mb else {"memory_share": options.memory_share}
    return llm_class(
        folder, device=options.device, dtype="bfloat16", max_model_len=4096, max_num_seqs=256,
        max_num_batched_tokens=options.batched_tokens, **memory,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    works = workloads()
    result = Result(
        f"s{options.stage:02d}_gpu_{options.model_shape}",
        "Eager steps launch every operation from Python, so a step takes as long as the host needs for its launches, "
        "however few tokens it computes: far from the floor in decode, nearer to it in prefill.",
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch) / "model"
        hf_model = random_checkpoint(options.model_shape, folder, options.device)
        say("the checkpoint is written")
        start = time.perf_counter()
        llm = build(options.stage, folder, options)
        run_workload(llm, cut(works["single"], None, 16))
        started = time.perf_counter() - start
    shape = Shape.from_config(SHAPES[options.model_shape])
    machine = H200 if options.device == "cuda" and "H200" in torch.cuda.get_device_name() else None
    blocks = llm.engine.scheduler.cache.pool.num_blocks
    say(f"the engine is up, {blocks} blocks")
    lengths = [n for n in CHECKED_LENGTHS if n <= options.longest_check]
    budget = CHECKED_BUDGET if options.stage >= 5 else None
    found = check_logits(llm, hf_model, lengths, CHECKED_TOKENS, budget)
    say(f"logits agree: {found}")
    del hf_model
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    note = (
        f"Hugging Face's own in bf16: {found.theirs:.4f}; {found.rows} rows, {found.chunks} chunks, {found.reused} "
        "prompt tokens reused"
    )
    result.measurements = [
        Measurement.single("largest relative error of the logits", found.ours, "", note=note),
        Measurement.single("from the checkpoint to the first tokens", started, "s", note=f"{blocks} blocks of 16"),
    ]
    for name in options.workloads:
        work = cut(works[name], options.requests, options.tokens)
        runs: list[Run] = []
        before = list(result.measurements)
        while len(runs) < options.runs and (not runs or time.perf_counter() - began < options.until):
            if name != "shared_prefix":
                forget(llm)
            runs.append(run_workload(llm, work))
            say(f"{name}: {runs[-1].seconds:.3f} s, {work.output_tokens / runs[-1].seconds:.0f} tok/s")
            result.measurements = before + measurements(work, runs, shape, machine)
            path = result.save(options.out)
    print(markdown_table(path))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    stages = [int(name[1:3]) for name in stage_names() if int(name[1:3]) >= 4]
    parser.add_argument("--model-shape", choices=tuple(SHAPES), required=True)
    parser.add_argument("--stage", type=int, choices=stages, default=stages[-1])
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--runs", type=int, default=2, help="runs of each workload")
    parser.add_argument("--until", type=float, default=float("inf"), help="no second run begins after so many seconds")
    parser.add_argument("--batched-tokens", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--memory-share", type=float, default=0.7, help="of the GPU, for weights and cache")
    parser.add_argument("--kv-cache-mb", type=float, help="the cache's size instead (needed on a CPU)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--requests", type=int, help="for a trial: only so many of each workload")
    parser.add_argument("--tokens", type=int, help="for a trial: prompts and answers of at most so many tokens")
    parser.add_argument("--longest-check", type=int, default=CHECKED_LENGTHS[-1], help="longest one compared")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU is here; `--device cpu --model-shape tiny --requests 4 --tokens 32` tries the rest")
    return options


if __name__ == "__main__":
    main()
