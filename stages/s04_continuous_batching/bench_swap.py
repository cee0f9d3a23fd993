"""For `bench.py`: what keeping the K/V of preempted requests in host memory costs, against computing it again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reference.bench.harness import Measurement, Result, Timing, compare
from stages.s01_forward.bench import some_ids
from stages.s02_kv_cache.kv_store import kv_bytes_per_token
from stages.s04_continuous_batching.llm import LLM
from stages.s04_continuous_batching.ragged_load import Load, our_run
from stages.s04_continuous_batching.recorder import RecordedBatch, recorded_batches


def swap_seconds(llm: LLM, length: int, repeats: int) -> tuple[Timing, Timing]:
    """For the K/V of so many tokens: to host memory and back, and computing it again as a step of its own."""
    cache = llm.engine.scheduler.cache
    runner: Any = llm.engine.runner
    blocks = cache.pool.allocate(cache.blocks_for(length)) or []
    pairs = [(block, place) for place, block in enumerate(blocks)]
    back = [(place, block) for block, place in pairs]

    def swap() -> None:
        runner.host_store.copy_blocks(pairs, source=runner.store)
        runner.store.copy_blocks(back, source=runner.host_store)

    prompt = some_ids(length, llm.config.vocab_size)
    try:
        timings = compare({"swap": swap, "recompute": partial(our_run, llm, Load([prompt], [1]))}, repeats=repeats)
    finally:
        cache.pool.give_back(blocks)
    return timings["swap"], timings["recompute"]


def measure_swap(folder: Path, sizes: Sequence[int], load: Load, pool_tokens: int, repeats: int) -> Result:
    """By the length of what was preempted; and a whole load in a pool that is too small for it, both ways."""
    result = Result(
        "s04_swap",
        "Copying K/V costs its bytes twice, computing it again costs a forward pass over all its tokens: the copy "
        "wins, by more the longer the sequence is. But it needs host memory, and its step waits for it.",
    )
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    llm = LLM(folder, kv_cache_mb=1024, swap_mb=512, max_model_len=max(sizes) + 1, **options)
    ratios = {}
    for size in sizes:
        swap, again = swap_seconds(llm, size, repeats)
        ratios[size] = again.median / swap.median
        result.measurements += [
            Measurement.of_timing(f"{size} tokens, to the host and back", swap),
            Measurement.of_timing(f"{size} tokens, computed again", again),
        ]
    each = 16 * kv_bytes_per_token(llm.config, llm.dtype) / 2**20  # MB of a block
    longest = max(len(p) + n for p, n in zip(load.prompts, load.output_lens, strict=True))
    blocks = -(-max(pool_tokens, longest) // 16) + 1
    engines = {
        name: LLM(folder, kv_cache_mb=each * blocks * 1.001, swap_mb=swap_mb, max_model_len=longest, **options)
        for name, swap_mb in (("computed again", 0), ("to the host and back", 512))
    }
    recorded: dict[str, list[RecordedBatch]] = {}

    def run_recorded(name: str) -> None:
        with recorded_batches(engines[name].engine) as recorded[name]:
            our_run(engines[name], load)

    for name, timing in compare({name: partial(run_recorded, name) for name in engines}, 0, repeats).items():
        batches = recorded[name]
        preempted = sum(len(batch.preempted) for batch in batches)
        computed = sum(row.computed for batch in batches for row in batch.rows)
        note = f"{preempted} preemptions, {computed} tokens computed in {len(batches)} steps; a pool of {blocks} blocks"
        result.measurements.append(
            Measurement.rate(f"whole load, {name}", timing, load.output_tokens, "tok/s", note=note)
        )
    gain = ", ".join(f"{ratio:.1f} times at {size} tokens" for size, ratio in ratios.items())
    result.wins = f"The copy is faster than computing again as a step of its own by {gain}."
    result.loses = (
        "Recomputation needs no memory and no second path, and beside the decodes of others its tokens share the "
        "reading of the weights. A short sequence is computed again in the time of one step."
    )
    return result
