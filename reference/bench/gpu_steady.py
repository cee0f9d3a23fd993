"""Steps of one kind, without the way there: the K/V of all prompts is taken to lie in the cache when a run begins."""

from collections.abc import Sequence
from typing import Any

import torch

from reference.bench.gpu_runs import forget
from reference.bench.workloads import LARGEST_ID, Workload

BEFORE, STEADY, AFTER = 8, 32, 4  # decode steps that are timed, and those around them that are not


def fill(llm: Any) -> None:
    """Books by which a request that starts has the K/V of its whole prompt, but for the last token.

    Its first step is a decode step, then, however long the prompt is. What it shares with others is found as ever.
    `forget` gives ordinary books back.
    """
    forget(llm)
    cache = llm.engine.scheduler.cache
    find = cache.match

    def match(sequence: Any) -> int:
        found, filled = find(sequence), sequence.num_tokens - 1
        cache.reserve(sequence, filled)  # if there is no room, neither has the row that is tried next, so it waits
        sequence.num_kv = filled
        return found

    cache.match = match


def fill_store(llm: Any) -> None:
    """Random numbers for all K/V: what nobody has written may be anything, NaN too."""
    with torch.inference_mode():
        getattr(llm.engine.runner, "step", llm.engine.runner).store.data.normal_()


def decode_load(name: str, prompts: Sequence[Sequence[int]], steady: int = STEADY) -> Workload:
    """Answers that grow together, over a cache that `fill` has prepared: `steady` steps are to be timed."""
    answer = BEFORE + steady + AFTER
    return Workload(name, "decode steps", tuple(map(tuple, prompts)), (answer,) * len(prompts))


def context_lens(work: Workload) -> list[int]:
    """Tokens in the cache of each row in the middle of the steps that are timed."""
    middle = (BEFORE + work.output_lens[0] - AFTER) // 2
    return [len(prompt) + middle for prompt in work.prompts]


def made_up(length: int, row: int = 0) -> tuple[int, ...]:
    """A prompt of so many tokens that begins unlike that of any other row."""
    return (row % LARGEST_ID, row // LARGEST_ID, *(number % LARGEST_ID for number in range(length)))[:length]
