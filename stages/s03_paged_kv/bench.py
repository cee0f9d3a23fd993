"""What paging buys: `python -m stages.s03_paged_kv.bench`. The kernel's own figures: `bench_kernel.py`, on a GPU.

Two results in reference/results: `s03_memory` (slots held against slots used, contiguous against paged: the real books,
no model) and `s03_cpu` (tokens per second of stages 02 and 03 against Hugging Face with its cache, in turns).
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from reference.bench.harness import RESULTS, Measurement, Result
from reference.bench.plots import bars
from reference.checkpoints import build_tiny, demo_model
from reference.draw import kv_blocks
from reference.picture import GREY, Picture, colour
from stages.s02_kv_cache.bench import THREADS, measure_generate, save
from stages.s02_kv_cache.contiguous_cache import ContiguousCache, KVCache
from stages.s02_kv_cache.llm import LLM as Contiguous
from stages.s02_kv_cache.sequence import Sequence as Row
from stages.s03_paged_kv.block_map import block_map
from stages.s03_paged_kv.llm import LLM
from stages.s03_paged_kv.paged_cache import PagedCache

LONGEST = 1024  # tokens that a sequence may grow to
BLOCK_SIZES = (1, 16, 64, 256)


@dataclass(frozen=True)
class Ragged:
    """A request: the step in which it comes, its prompt and its answer in tokens."""

    arrival: int
    prompt: int
    output: int


def ragged_requests(count: int, seed: int = 0) -> list[Ragged]:
    """Prompts of up to 256 and answers of up to 768 tokens, a new one every 0 to 48 steps."""
    rng, arrival, requests = Random(seed), 0, []
    for _ in range(count):
        requests.append(Ragged(arrival, rng.randint(1, LONGEST // 4), rng.randint(1, 3 * LONGEST // 4)))
        arrival += rng.randint(0, 48)
    return requests


def replay(cache: KVCache, slots_per_block: int, requests: Sequence[Ragged]) -> list[tuple[int, int]]:
    """Run each request from its arrival to its end, a token per step. Returns (slots held, slots used) of each step."""
    waiting = list(requests)
    running: list[tuple[Ragged, Row]] = []
    history: list[tuple[int, int]] = []
    while waiting or running:
        while waiting and waiting[0].arrival <= len(history):
            request = waiting.pop(0)
            running.append((request, Row([0] * request.prompt)))
        for _, row in running:
            if cache.reserve(row, row.num_tokens) is None:
                raise RuntimeError(f"the cache is too small for {len(running)} sequences of this trace")
            cache.commit(row, row.num_tokens)
        held = slots_per_block * sum(len(row.block_table) for _, row in running)
        history.append((held, sum(row.num_kv for _, row in running)))
        for request, row in running:
            row.token_ids.append(0)
            if row.num_tokens == request.prompt + request.output:  # the last token is never written
                cache.release(row)
        running = [(request, row) for request, row in running if row.block_table]
    return history


def sequences_that_fit(cache: KVCache, requests: Sequence[Ragged]) -> int:
    """How many of the requests, each at its full length, the cache holds at once."""
    for count, request in enumerate(requests):
        row = Row([0] * (request.prompt + request.output - 1))
        if cache.reserve(row, row.num_tokens) is None:
            return count
    raise RuntimeError(f"all {len(requests)} requests fit: this says nothing about the limit")


def blocks_of_answers(prompt: int, output: int, n: int, block_size: int) -> tuple[int, int]:
    """Blocks that n answers to one prompt hold at their end: forked from it, and each on its own."""
    cache = PagedCache(1 + 2 * n * -(-(prompt + output) // block_size), block_size)
    first = Row([0] * prompt)
    cache.reserve(first, prompt)
    cache.commit(first, prompt)
    free = cache.pool.num_free + len(first.block_table)
    for row in [first, *(cache.fork(first) for _ in range(n - 1))]:
        cache.reserve(row, prompt + output - 1)
    return free - cache.pool.num_free, n * cache.blocks_for(prompt + output - 1)


def measure_memory(requests: Sequence[Ragged]) -> tuple[Result, dict[str, list[tuple[int, int]]]]:
    """The figures, and for each cache its (held, used) by step."""
    result = Result(
        "s03_memory",
        f"A page of {LONGEST} tokens is held from the first token to the last; blocks are taken as tokens come, so no "
        "more than one block less one slot of each sequence is held in vain.",
    )
    enough = len(requests) * LONGEST
    histories = {"contiguous": replay(ContiguousCache(len(requests), LONGEST), LONGEST, requests)}
    for size in BLOCK_SIZES:
        histories[f"blocks of {size}"] = replay(PagedCache(1 + enough // size, size), size, requests)
    for name, history in histories.items():
        peak = max(held for held, _ in history)
        result.measurements.append(Measurement.single(f"held at the peak, {name}", peak, "slots"))
    peak = max(used for _, used in histories["contiguous"])
    result.measurements.append(Measurement.single("used at the peak", peak, "slots"))
    shares = {name: [100 * used / held for held, used in h if held] for name, h in histories.items()}
    for name, share in shares.items():
        note = f"on average over {len(share)} steps; {min(share):.1f} % at worst"
        result.measurements.append(
            Measurement.single(f"used of what is held, {name}", statistics.mean(share), "%", note=note)
        )
    memory, size = 8 * LONGEST, 16
    caches: dict[str, KVCache] = {
        "contiguous": ContiguousCache(memory // LONGEST, LONGEST),
        f"blocks of {size}": PagedCache(memory // size, size),  # the dummy is one of them
    }
    for name, cache in caches.items():
        count = sequences_that_fit(cache, requests)
        result.measurements.append(Measurement.single(f"sequences in {memory} slots, {name}", count, "sequences"))
    shared, alone = blocks_of_answers(500, 100, 4, size)
    result.measurements += [
        Measurement.single("4 answers of 100 tokens to a prompt of 500, forked", shared, "blocks"),
        Measurement.single("4 answers of 100 tokens to a prompt of 500, each on its own", alone, "blocks"),
    ]
    result.wins = (
        f"Ragged lengths: {statistics.mean(shares['blocks of 16']):.0f} % of what is held is used in blocks of 16, "
        f"{statistics.mean(shares['contiguous']):.0f} % in pages. Answers that share a prompt hold it once."
    )
    result.loses = (
        "Sequences that all reach the longest length: then pages are full too. Large blocks waste again, and blocks of "
        "one token have the longest tables."
    )
    return result, histories


def plot_memory(histories: Mapping[str, list[tuple[int, int]]]) -> Picture:
    """Slots by step: held in pages, held in blocks of 16, used."""
    picture = Picture(height=3.8)
    ax = picture.axes_grid()[0, 0]
    steps = range(0, len(histories["contiguous"]), 8)  # every eighth: a small file, and nothing that an eye would miss
    for index, name in enumerate(("contiguous", "blocks of 16")):
        ax.plot(steps, [histories[name][step][0] for step in steps], color=colour(index), label=f"held, {name}")
    used = [histories["contiguous"][step][1] for step in steps]
    ax.fill_between(steps, used, color=GREY, alpha=0.35, lw=0, label="used")
    ax.set(xlabel="step", ylabel="slots", title="Memory of ragged requests", ylim=(0, None))
    ax.grid(color=GREY, alpha=0.25)
    ax.legend(labelcolor=GREY, framealpha=0)
    return picture


def picture_of_blocks() -> Picture:
    """A pool of 31 blocks of 4 tokens after a while: grown in turns, one ended, one forked and gone on twice."""
    cache = PagedCache(32, 4)
    rows = {name: Row([0] * prompt) for name, prompt in {"A": 9, "B": 14, "C": 6}.items()}

    def step(times: int) -> None:
        for _ in range(times):
            for row in rows.values():
                row.token_ids.append(0)
                cache.reserve(row, row.num_tokens)
                cache.commit(row, row.num_tokens)

    step(7)
    cache.release(rows.pop("B"))
    rows["D"] = cache.fork(rows["C"])
    step(9)
    rows["E"] = Row([0] * 17)
    step(2)
    return kv_blocks(*block_map(cache, rows), cache.block_size)


def run(parts: Sequence[str], folder: Path, out: Path, quick: bool) -> None:
    if "memory" in parts:
        result, histories = measure_memory(ragged_requests(24 if quick else 128))
        save(result, out)
        plot_memory(histories).save(out / "s03_memory.svg")
        picture_of_blocks().save(out / "s03_memory_blocks.svg")
    if "generate" in parts:
        engines = {"stage 02": Contiguous, "stage 03": LLM}
        result = measure_generate("s03_cpu", folder, engines, 8 if quick else 128, 1 if quick else 5)
        save(result, out)
        bars(result.measurements, "One sequence, with a cache").save(out / "s03_cpu.svg")


def main(arguments: list[str] | None = None) -> None:
    parts = ("memory", "generate")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and one repeat: does it run? Keeps nothing")
    parser.add_argument("--only", choices=parts, help="this part alone")
    parser.add_argument("--out", type=Path, help="folder for the results (default: reference/results)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        out = options.out or (Path(scratch) if options.quick else RESULTS)
        folder = Path(scratch) / "tiny"
        if options.only != "memory":
            folder = build_tiny("llama", folder) if options.quick else demo_model()
        run([options.only] if options.only else parts, folder, out, options.quick)


if __name__ == "__main__":
    main()
