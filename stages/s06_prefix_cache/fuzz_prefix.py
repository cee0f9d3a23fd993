"""`python -m stages.s06_prefix_cache.fuzz_prefix`: random histories of a prefix cache, and random loads on an engine.

Caches with different indexes live through the same history and must agree in everything: what is found, which blocks
are handed out, which are free and in what order. Beside them a subscriber that hears nothing but the events must know
what can be found, and a memory of what was written into each block must agree with the index.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stages.s02_kv_cache.sequence import Sequence
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s05_chunked_prefill.fuzz_scheduler import ChunkedFuzz
from stages.s06_prefix_cache.hash_chain import ExtraKey, HashChain, TokenBlock
from stages.s06_prefix_cache.prefix_cache import KVEvent, PrefixCache, PrefixIndex
from stages.s06_prefix_cache.radix_tree import RadixTree


def same_key(parent: bytes, tokens: TokenBlock) -> bytes:
    """The worst of all hashes."""
    return b""


def last_token(parent: bytes, tokens: TokenBlock) -> bytes:
    """Not much better."""
    return bytes([tokens[-1] % 256])


BOTH: tuple[Callable[[], PrefixIndex], ...] = (HashChain, RadixTree)
COLLIDING: tuple[Callable[[], PrefixIndex], ...] = (lambda: HashChain(same_key), lambda: HashChain(last_token))


@dataclass(eq=False)
class Known:
    """A block that a subscriber has heard of."""

    parent: Known | None
    tokens: TokenBlock
    block: int | None
    children: dict[TokenBlock, Known] = field(default_factory=dict)


class Subscriber:
    """Replays the events: a tree of what was stored, from which what moved or was evicted is taken out."""

    def __init__(self) -> None:
        self.roots: dict[ExtraKey, Known] = {}
        self.blocks: dict[int, Known] = {}

    def __call__(self, event: KVEvent) -> None:
        if event.kind == "evicted":
            assert self.blocks[event.block].tokens == event.tokens
        if (old := self.blocks.pop(event.block, None)) is not None and old.parent is not None:
            if old.parent.children.get(old.tokens) is old:
                del old.parent.children[old.tokens]
        if event.kind == "stored":
            parent = self.root(event.extra) if event.parent is None else self.blocks[event.parent]
            assert event.tokens not in parent.children, "stored twice"
            self.blocks[event.block] = parent.children[event.tokens] = Known(parent, event.tokens, event.block)

    def root(self, extra: ExtraKey) -> Known:
        return self.roots.setdefault(extra, Known(None, (), None))

    def find(self, extra: ExtraKey, blocks: list[TokenBlock]) -> list[int | None]:
        """The blocks of the longest path that begins with these."""
        place, found = self.root(extra), []
        for tokens in blocks:
            if tokens not in place.children:
                break
            place = place.children[tokens]
            found.append(place.block)
        return found


class History:
    """Some caches and the sequences that live in all of them at once; `lives[i]` is a sequence's part in cache i."""

    def __init__(self, seed: int, indexes: tuple[Callable[[], PrefixIndex], ...], num_blocks: int = 0) -> None:
        self.rng = rng = random.Random(seed)
        num_blocks, self.size = num_blocks or rng.randint(4, 14), rng.randint(1, 3)
        self.caches = [PrefixCache(num_blocks, self.size, index()) for index in indexes]
        self.subscribers = [Subscriber() for _ in indexes]
        for cache, subscriber in zip(self.caches, self.subscribers, strict=True):
            cache.subscribers.append(subscriber)
        self.alive: list[list[Sequence]] = []
        self.unwritten: list[list[Sequence]] = []  # planned, and the step is still under way
        self.written: list[dict[int, tuple[ExtraKey, TokenBlock]]] = [{} for _ in indexes]  # all tokens up to its end
        self.done: Counter[str] = Counter()

    def run(self, operations: int) -> Counter[str]:
        """So many operations. Raises AssertionError or RuntimeError at the first fault."""
        kinds = {self.begin: 6, self.grow: 4, self.fork: 1, self.end: 5, self.write: 6}
        for kind in self.rng.choices(list(kinds), list(kinds.values()), k=operations):
            kind()
            self.agree()
        self.check_indexes()
        return self.done

    def begin(self) -> None:
        """A sequence arrives, with or without a look-up, and gets room for some of its tokens if there is any."""
        length = self.rng.randint(1, 5 * self.size)
        tokens = [self.rng.choice((0, 0, 0, 0, 0, 1)) for _ in range(length)]
        extra: ExtraKey = self.rng.choice(((), (), (("salt", "x"),)))
        lives = [Sequence(list(tokens), extra_key=extra) for _ in self.caches]
        if self.rng.random() < 0.85:
            self.look_up(lives)
        self.plan(lives)

    def look_up(self, lives: list[Sequence]) -> None:
        for cache, subscriber, life in zip(self.caches, self.subscribers, lives, strict=True):
            full = [cache.tokens_of(life, number) for number in range((life.num_tokens - 1) // self.size)]
            known = subscriber.find(life.extra_key, full)
            assert cache.match(life) == len(known) * self.size == life.num_kv < life.num_tokens
            assert life.block_table == known, "the subscriber knows better, or not as well"
            self.done["hit"] += bool(known)
            self.done["look-up"] += 1

    def plan(self, lives: list[Sequence]) -> None:
        """Room for some of the new tokens. What the blocks held is forgotten before they are written to."""
        target = self.rng.randint(lives[0].num_kv + 1, lives[0].num_tokens)
        for place, (cache, life) in enumerate(zip(self.caches, lives, strict=True)):
            old = set(life.block_table)
            if cache.reserve(life, target) is None:
                cache.release(life)
                self.done["no room"] += 1
                continue
            for block in set(life.block_table) - old:
                assert block not in cache.index.by_block, "a recycled block keeps its key"  # type: ignore[attr-defined]
                self.done["recycled"] += self.written[place].pop(block, None) is not None
            life.num_kv = target
        if lives[0].block_table:
            self.alive.append(lives)
            self.unwritten.append(lives)

    def write(self) -> None:
        """The step ends: K/V is there, full blocks may be published."""
        for lives in self.unwritten:
            for place, (cache, life) in enumerate(zip(self.caches, lives, strict=True)):
                for number in range(life.num_kv // self.size):
                    prefix = tuple(life.token_ids[: (number + 1) * self.size])
                    self.written[place][life.block_table[number]] = life.extra_key, prefix
                cache.commit(life, life.num_kv)
        self.unwritten = []

    def grow(self) -> None:
        """New tokens, or more of the prompt, for one whose last step has ended."""
        ready = [lives for lives in self.alive if lives not in self.unwritten]
        if ready:
            lives = self.rng.choice(ready)
            if lives[0].num_new == 0:
                token = self.rng.choice((0, 0, 1))
                for life in lives:
                    life.token_ids.append(token)
            self.alive.remove(lives)
            self.plan(lives)

    def fork(self) -> None:
        """A second answer to the same prompt shares all but its last token."""
        ready = [lives for lives in self.alive if lives not in self.unwritten and lives[0].num_kv > 1]
        if ready:
            sources = self.rng.choice(ready)
            lives = [Sequence(source.token_ids[: source.num_kv], extra_key=source.extra_key) for source in sources]
            for cache, source, life in zip(self.caches, sources, lives, strict=True):
                cache.fork_prefix(source, life, life.num_tokens - 1)
            self.plan(lives)
            self.done["fork"] += 1

    def end(self) -> None:
        """A sequence ends or is preempted, at times in the middle of a step: that is never published."""
        if self.alive:
            lives = self.alive.pop(self.rng.randrange(len(self.alive)))
            self.done["left in a step"] += lives in self.unwritten
            self.unwritten = [other for other in self.unwritten if other is not lives]
            for cache, life in zip(self.caches, lives, strict=True):
                cache.release(life)
            self.done["end"] += 1

    def agree(self) -> None:
        """All caches are in the same state."""
        first = self.caches[0]
        for cache in self.caches[1:]:
            assert list(cache.pool.free) == list(first.pool.free)
            assert cache.pool.ref_counts == first.pool.ref_counts
            assert (cache.queried_tokens, cache.hit_tokens) == (first.queried_tokens, first.hit_tokens)
        for lives in self.alive:
            assert all(life.block_table == lives[0].block_table for life in lives)

    def check_indexes(self) -> None:
        """Every block that can be found holds the very tokens under which it is found."""
        for cache, subscriber, written in zip(self.caches, self.subscribers, self.written, strict=True):
            cache.pool.check()
            assert subscriber.blocks.keys() == cache.index.by_block.keys()  # type: ignore[attr-defined]
            for extra, root in subscriber.roots.items():
                paths = [(root, cache.index.root(extra), ())]
                while paths:
                    known, place, tokens = paths.pop()
                    for child in known.children.values():
                        found = cache.index.find(place, child.tokens)
                        assert found is not None and found.block == child.block
                        paths.append((child, found, tokens + child.tokens))  # type: ignore[arg-type]
                        assert written[found.block] == (extra, tokens + child.tokens)


class CachedFuzz(ChunkedFuzz):
    """Random loads on an engine whose cache remembers; prompts begin alike, and some have salts."""

    def make_cache(self, num_blocks: int, block_size: int) -> PagedCache:
        return PrefixCache(num_blocks, block_size, self.rng.choice((*BOTH, *COLLIDING))())

    def drain(self) -> None:
        super().drain()
        cache: Any = self.cache
        self.done["hit token"] += cache.hit_tokens
        assert 0 <= cache.hit_tokens <= cache.queried_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Random histories of a prefix cache, every rule checked.")
    parser.add_argument("--histories", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of an engine on top of it")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    done: Counter[str] = Counter()
    for number in range(arguments.histories):
        done += History(arguments.seed + number, BOTH).run(20)
    print(f"{arguments.histories} histories, no fault: {', '.join(f'{n} x {kind}' for kind, n in done.items())}")
    loads = CachedFuzz(arguments.seed).run(arguments.steps)
    print(f"{loads.pop('step')} steps, no fault: {', '.join(f'{n} x {kind}' for kind, n in loads.items())}")


if __name__ == "__main__":
    main()
