"""For benchmarks: many requests of mixed lengths at once."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from stages.s01_forward.sampling_params import SamplingParams


@dataclass(frozen=True)
class Load:
    """Requests that all come at once: prompts, and how many tokens each is to give."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lens)


def lengths(rng: Random, count: int, low: int, high: int, total: int) -> list[int]:
    """So many random whole numbers in [low, high] with this sum."""
    if not count * low <= total <= count * high:
        raise ValueError(f"{count} numbers from {low} to {high} cannot have the sum {total}")
    drawn = [rng.randint(low, high) for _ in range(count)]
    while (missing := total - sum(drawn)) != 0:
        i, step = rng.randrange(count), 1 if missing > 0 else -1
        if low <= drawn[i] + step <= high:
            drawn[i] += step
    return drawn


def ragged_load(vocab: int, count: int = 16, prompt_tokens: int = 2560, output_tokens: int = 1152) -> Load:
    """Prompts of 20 to 300 tokens and answers of 16 to 128, so many in all."""
    rng = Random(0)
    prompt_lens = lengths(rng, count, 20, 300, prompt_tokens)
    output_lens = lengths(rng, count, 16, 128, output_tokens)
    return Load([[rng.randrange(3, vocab) for _ in range(n)] for n in prompt_lens], output_lens)


def our_run(llm: Any, load: Load) -> list[list[int]]:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in load.output_lens]
    return [output.token_ids for output in llm.generate(load.prompts, params)]
