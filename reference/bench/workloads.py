"""The five workloads by which engines are compared. One generator draws them all, so everybody has the same ids."""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

LARGEST_ID = 10_000
NAMES = ("mixed", "decode_heavy", "single", "prefill", "shared_prefix")


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, and how many tokens each must produce (the end token is ignored)."""

    name: str
    measures: str
    prompts: tuple[tuple[int, ...], ...]
    output_lens: tuple[int, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lens)


def common_prefix(work: Workload) -> int:
    """Tokens with which all prompts of several begin."""
    return len(os.path.commonprefix(work.prompts)) if len(work.prompts) > 1 else 0


@functools.cache
def workloads(seed: int = 0) -> Mapping[str, Workload]:
    """All five by name. The order of the draws is part of the definition: a change makes other workloads."""
    rng = Random(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(rng.randint(0, LARGEST_ID) for _ in range(n))

    def make(name: str, measures: str, prompts: Sequence[tuple[int, ...]], lens: Sequence[int]) -> Workload:
        return Workload(name, measures, tuple(prompts), tuple(lens))

    prefix = ids(2048)
    mixed = [ids(rng.randint(100, 1024)) for _ in range(256)]
    mixed_lens = [rng.randint(100, 1024) for _ in range(256)]
    decode_heavy = [ids(32) for _ in range(256)]
    single = [ids(128)]
    prefill = [ids(2048) for _ in range(64)]
    shared_prefix = [prefix + ids(64) for _ in range(64)]
    made = (
        make("mixed", "throughput of a real mix", mixed, mixed_lens),
        make("decode_heavy", "attention bandwidth and host time per step", decode_heavy, [1024] * 256),
        make("single", "latency of one stream", single, [512]),
        make("prefill", "compute", prefill, [1] * 64),
        make("shared_prefix", "prefix cache and time to first token", shared_prefix, [32] * 64),
    )
    return {workload.name: workload for workload in made}
