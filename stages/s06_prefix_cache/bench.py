"""What the prefix cache buys, and what its books cost: `python -m stages.s06_prefix_cache.bench`.

Three results in reference/results: `s06_prefix` (time to first token by the length of what is shared), `s06_chat` (a
conversation, turn by turn, and its hit rate) and `s06_index` (chain against radix tree: look-up and publishing, without
a model).
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from reference.bench.harness import RESULTS, Measurement, Result, Timing
from reference.bench.plots import lines
from reference.checkpoints import build_tiny, demo_model
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.bench import THREADS, save
from stages.s02_kv_cache.sequence import Sequence as Row
from stages.s06_prefix_cache.hash_chain import HashChain
from stages.s06_prefix_cache.llm import LLM
from stages.s06_prefix_cache.prefix_cache import PrefixCache
from stages.s06_prefix_cache.radix_tree import RadixTree

KINDS = ("off", "chain", "radix")
BLOCK_SIZE = 16
INDEXES: dict[str, Callable[[], Any]] = {"chain": HashChain, "radix": RadixTree}


def engines(folder: Path, max_model_len: int) -> dict[str, LLM]:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_mb": 512, "max_model_len": max_model_len}
    return {kind: LLM(folder, prefix_cache=kind, **options) for kind in KINDS}  # type: ignore[arg-type]


def some(rng: Random, count: int, vocab: int) -> list[int]:
    return [rng.randrange(3, vocab) for _ in range(count)]


def first_token(llm: LLM, prompt: list[int], tokens: int = 1) -> tuple[float, int, list[int]]:
    """Seconds to the first token, prompt tokens that were found, and the answer."""
    output = llm.generate([prompt], SamplingParams(max_tokens=tokens, ignore_eos=True))[0]
    assert output.timings.first_token is not None
    return output.timings.first_token, output.num_cached_tokens, output.token_ids


def measure_prefix(folder: Path, shared: Sequence[int], own: int, repeats: int) -> Result:
    """A prompt of `shared` tokens that somebody had before, and `own` that are new."""
    result = Result(
        "s06_prefix",
        f"Only the {own} tokens of its own are computed, and at most a block of what is shared: the time to first "
        "token hardly grows with the shared length, where without the cache it grows as that of any prompt.",
    )
    llms = engines(folder, max(shared) + own + 1)
    vocab = next(iter(llms.values())).config.vocab_size
    rng, medians = Random(0), {}
    for length in shared:
        prefix = some(rng, length, vocab)
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        found: dict[str, int] = {}
        for llm in llms.values():
            first_token(llm, prefix + some(rng, own, vocab))  # whoever came first
        for _ in range(repeats):
            prompt = prefix + some(rng, own, vocab)
            answers = []
            for kind, llm in llms.items():
                seconds, found[kind], answer = first_token(llm, prompt)
                times[kind].append(seconds)
                answers.append(answer)
            if answers.count(answers[0]) != len(answers):
                raise RuntimeError(f"with and without the cache the answers differ: {answers}")
        for kind in KINDS:
            note = f"{found[kind]} of {length + own} prompt tokens found"
            result.measurements.append(
                Measurement.of_timing(f"{length} shared, {kind}", Timing.of(times[kind]), note=note)
            )
        medians[length] = result[f"{length} shared, off"].median / result[f"{length} shared, chain"].median
    result.wins = "The first token comes sooner by a factor of " + ", ".join(
        f"{ratio:.1f} with {length} tokens shared" for length, ratio in medians.items()
    )
    result.loses = "Prompts that share nothing: they pay for looking up and publishing, see `s06_index`."
    return result


def measure_chat(folder: Path, turns: int, question: int, answer: int, repeats: int) -> Result:
    """A conversation: each turn sends all before it, and `question` new tokens; `answer` tokens come back."""
    result = Result(
        "s06_chat",
        "All of a turn but its question was computed in the turns before, the answers too: the time to first token "
        "stays nearly level, and without the cache it grows with the conversation.",
    )
    llms = engines(folder, turns * (question + answer))
    vocab = next(iter(llms.values())).config.vocab_size
    times: dict[str, list[list[float]]] = {kind: [[] for _ in range(turns)] for kind in KINDS}
    hits, asked = dict.fromkeys(KINDS, 0), 0
    for repeat in range(repeats):
        rng = Random(repeat)  # a conversation that nobody has had
        history: list[int] = []
        for turn in range(turns):
            history += some(rng, question, vocab)
            asked += len(history)
            replies = []
            for kind, llm in llms.items():
                seconds, found, reply = first_token(llm, history, answer)
                times[kind][turn].append(seconds)
                hits[kind] += found
                replies.append(reply)
            if replies.count(replies[0]) != len(replies):
                raise RuntimeError(f"with and without the cache the answers of turn {turn + 1} differ")
            history = history + replies[0]
    for kind in KINDS:
        for turn in range(turns):
            timing = Timing.of(times[kind][turn])
            result.measurements.append(Measurement.of_timing(f"turn {turn + 1}, {kind}", timing))
        rate = Measurement.single(
            f"hit rate, {kind}", 100 * hits[kind] / asked, "%", note=f"{hits[kind]} of {asked} prompt tokens"
        )
        result.measurements.append(rate)
    last = [result[f"turn {turns}, {kind}"].median for kind in ("off", "chain")]
    result.wins = f"The first token of turn {turns} comes {last[0] / last[1]:.1f} times sooner."
    result.loses = "The first turn: nothing is there yet."
    return result


def index_costs(make: Callable[[], Any], prefix: int, count: int, own: int) -> dict[str, list[float]]:
    """Seconds of each look-up (`match`) and each publishing (`commit`) of prompts that share their first tokens."""
    rng = Random(0)
    shared = some(rng, prefix, 50_000)
    prompts = [shared + some(rng, own, 50_000) for _ in range(count)]
    blocks_each = -(-(prefix + own) // BLOCK_SIZE)
    cache = PrefixCache(1 + (count + 1) * blocks_each, BLOCK_SIZE, make())
    costs: dict[str, list[float]] = {"look-up": [], "publish": []}
    for number, ids in enumerate(prompts):
        row = Row(ids)
        start = time.perf_counter()
        cache.match(row)
        looked = time.perf_counter() - start
        if cache.reserve(row, len(ids)) is None:
            raise RuntimeError(f"{cache.pool.num_blocks} blocks are too few for {count} prompts")
        start = time.perf_counter()
        cache.commit(row, len(ids))
        published = time.perf_counter() - start
        cache.release(row)
        if number > 0:  # the first found nothing
            costs["look-up"].append(looked)
            costs["publish"].append(published)
    return costs


def measure_index(prefixes: Sequence[int], count: int, own: int = 512) -> Result:
    """Microseconds per look-up and per publishing, and per block."""
    result = Result(
        "s06_index",
        "The chain computes a SHA-256 per block. The tree compares whole edges, so a long prefix costs it little more "
        "than a short one; what is published is added block by block to both.",
    )
    totals: dict[str, float] = {}
    for prefix in prefixes:
        for kind, make in INDEXES.items():
            for what, seconds in index_costs(make, prefix, count, own).items():
                blocks = (prefix if what == "look-up" else own) // BLOCK_SIZE
                micro = sorted(1e6 * each for each in seconds)
                low, high = micro[len(micro) // 10], micro[-1 - len(micro) // 10]
                median = 1e6 * Timing.of(seconds).median
                totals[f"{kind}, {what}"] = median / max(blocks, 1)
                note = f"{blocks} blocks, {median / max(blocks, 1):.2f} µs each; 10th to 90th percentile"
                name = f"{what}, {prefix} shared, {kind}"
                result.measurements.append(Measurement(name, median, low, high, "µs", len(seconds), note=note))
    result.wins = "Per block: " + ", ".join(f"{name} {cost:.2f} µs" for name, cost in totals.items()) + "."
    result.loses = "Both are work on the host for every prompt, found or not; against the model's time it is little."
    return result


def plot(result: Result, names: Sequence[str], xs: Sequence[int], xlabel: str, title: str, path: Path) -> None:
    series = {kind: [result[f"{name}, {kind}"] for name in names] for kind in KINDS}
    lines(series, xs, xlabel, title).save(path)


def run(parts: Sequence[str], folder: Path, out: Path, quick: bool) -> None:
    if "index" in parts:
        save(measure_index((64, 256) if quick else (256, 1024, 4096), 8 if quick else 200), out)
    if "prefix" in parts:
        shared = (16, 64) if quick else (64, 128, 256, 512, 1024)
        result = measure_prefix(folder, shared, 8 if quick else 32, 1 if quick else 3)
        save(result, out)
        names = [f"{length} shared" for length in shared]
        plot(result, names, shared, "shared tokens", "Seconds to the first token", out / "s06_prefix.svg")
    if "chat" in parts:
        turns = 3 if quick else 6
        result = measure_chat(folder, turns, 20 if quick else 80, 8 if quick else 24, 1 if quick else 2)
        save(result, out)
        names, xs = [f"turn {turn + 1}" for turn in range(turns)], range(1, turns + 1)
        plot(result, names, xs, "turn", "Seconds to the first token of a turn", out / "s06_chat.svg")


def main(arguments: list[str] | None = None) -> None:
    parts = ("index", "prefix", "chat")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and one repeat: does it run? Keeps nothing")
    parser.add_argument("--only", choices=parts, help="this part alone")
    parser.add_argument("--out", type=Path, help="folder for the results (default: reference/results)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1 if options.quick else THREADS)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        out = options.out or (Path(scratch) if options.quick else RESULTS)
        folder = Path(scratch) / "tiny"
        if options.only != "index":
            folder = build_tiny("llama", folder) if options.quick else demo_model()
        run([options.only] if options.only else parts, folder, out, options.quick)


if __name__ == "__main__":
    main()
