"""`python -m stages.s03_paged_kv.fuzz_pool`: random sequences on few blocks, every rule of the books checked each time.

The model of ownership is simple on purpose: the owners of a block are the tables that name it, and a memory of one
token per slot shows whether anybody's tokens were overwritten.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter

from stages.s02_kv_cache.sequence import Sequence
from stages.s03_paged_kv.block_pool import DUMMY
from stages.s03_paged_kv.paged_cache import PagedCache


class Fuzz:
    """A cache, the sequences that live in it, and what each slot holds."""

    def __init__(self, seed: int, num_blocks: int = 24, block_size: int = 4) -> None:
        self.rng = random.Random(seed)
        self.cache, self.block_size = PagedCache(num_blocks, block_size), block_size
        self.alive: list[Sequence] = []
        self.memory: list[int | None] = [None] * (num_blocks * block_size)  # the token whose K/V a slot holds
        self.done: Counter[str] = Counter()  # how often each thing happened

    def run(self, operations: int) -> Counter[str]:
        """So many operations, with all checks after each. Raises AssertionError or RuntimeError at the first fault."""
        kinds = {self.begin: 3, self.grow: 6, self.fork: 2, self.end: 4, self.wrong: 1}
        for kind in self.rng.choices(list(kinds), list(kinds.values()), k=operations):
            kind()
            self.check()
        for sequence in self.alive:
            self.cache.release(sequence)
        self.alive = []
        self.check()
        assert self.cache.pool.num_free == self.cache.pool.num_blocks - 1
        return self.done

    def begin(self) -> None:
        sequence = Sequence([self.token() for _ in range(self.rng.randint(1, 4 * self.block_size))])
        if self.compute(sequence):
            self.alive.append(sequence)

    def grow(self) -> None:
        if self.alive:
            sequence = self.rng.choice(self.alive)
            new = self.rng.choice((1, 1, 1, self.rng.randint(1, 2 * self.block_size)))
            sequence.token_ids += [self.token() for _ in range(new)]
            if not self.compute(sequence):
                del sequence.token_ids[sequence.num_kv :]

    def fork(self) -> None:
        if self.alive:
            self.alive.append(self.cache.fork(self.rng.choice(self.alive)))
            self.done["fork"] += 1

    def end(self) -> None:
        """Twice, at times: a sequence that holds nothing may be released again."""
        if self.alive:
            sequence = self.alive.pop(self.rng.randrange(len(self.alive)))
            for _ in range(self.rng.randint(1, 2)):
                self.cache.release(sequence)
            self.done["end"] += 1

    def wrong(self) -> None:
        """Shares or gives back what nobody holds, or the same block once too often: refused, and nothing is changed."""
        pool = self.cache.pool
        held = [block for block, count in enumerate(pool.ref_counts) if count and block != DUMMY]
        bad = [*pool.free, DUMMY, -1, pool.num_blocks]
        block = self.rng.choice(bad + held)
        blocks = [block] * (pool.ref_counts[block] + 1) if block in held else [*held[:2], block]
        before = (list(pool.ref_counts), list(pool.free))
        for call in (pool.share, pool.give_back):
            try:
                call(blocks)
            except RuntimeError:
                pass
            else:
                raise AssertionError(f"{call.__name__}({blocks}) passed")
            assert (list(pool.ref_counts), list(pool.free)) == before
        self.done["refused"] += 1

    def token(self) -> int:
        return self.rng.randrange(1 << 30)

    def compute(self, sequence: Sequence) -> bool:
        """What a step does to the books and the memory; False if there was no room."""
        pool = self.cache.pool
        before = (list(sequence.block_table), list(pool.ref_counts), list(pool.free))
        full = -(-sequence.num_tokens // self.block_size)
        first = sequence.num_kv // self.block_size
        writes_shared = sequence.num_kv % self.block_size > 0 and pool.is_shared(sequence.block_table[first])
        fits = full - len(sequence.block_table) + writes_shared <= pool.num_free
        copies = self.cache.reserve(sequence, sequence.num_tokens)
        assert (copies is not None) == fits
        if copies is None:
            assert (sequence.block_table, pool.ref_counts, list(pool.free)) == before
            self.done["no room"] += 1
            return False
        assert len(copies) == writes_shared
        for source, target in copies:
            assert (source, target) == (before[0][first], sequence.block_table[first])
            start, end = source * self.block_size, target * self.block_size
            self.memory[end : end + self.block_size] = self.memory[start : start + self.block_size]
            self.done["copy"] += 1
        assert len(sequence.block_table) == full
        for position in range(sequence.num_kv, sequence.num_tokens):
            self.memory[self.slot(sequence, position)] = sequence.token_ids[position]
        self.cache.commit(sequence, sequence.num_tokens)
        self.done["step"] += 1
        return True

    def slot(self, sequence: Sequence, position: int) -> int:
        block, place = divmod(position, self.block_size)
        return sequence.block_table[block] * self.block_size + place

    def check(self) -> None:
        """The pool agrees with itself and with the tables, and everybody reads back their own tokens."""
        pool = self.cache.pool
        pool.check()
        owners = Counter(block for sequence in self.alive for block in sequence.block_table)
        assert DUMMY not in owners
        assert owners == Counter({b: count for b, count in enumerate(pool.ref_counts) if count and b != DUMMY})
        assert pool.num_free + len(owners) + 1 == pool.num_blocks
        for sequence in self.alive:
            assert sequence.num_kv == sequence.num_tokens
            stored = [self.memory[self.slot(sequence, position)] for position in range(sequence.num_kv)]
            assert stored == sequence.token_ids


def main() -> None:
    parser = argparse.ArgumentParser(description="Random operations on the paged cache's books, all rules checked.")
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    done = Fuzz(arguments.seed).run(arguments.operations)
    print(f"{arguments.operations} operations, no fault: {', '.join(f'{n} {kind}' for kind, n in done.items())}")


if __name__ == "__main__":
    main()
