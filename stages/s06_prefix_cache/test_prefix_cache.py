"""The books of the prefix cache: what is found, what is published when, and who is overwritten first."""

from collections import Counter
from typing import Any

import pytest

from stages.s02_kv_cache.sequence import Sequence
from stages.s06_prefix_cache.fuzz_prefix import BOTH, COLLIDING, CachedFuzz, History, Subscriber
from stages.s06_prefix_cache.hash_chain import HashChain
from stages.s06_prefix_cache.lru_pool import LruPool
from stages.s06_prefix_cache.prefix_cache import KVEvent, PrefixCache
from stages.s06_prefix_cache.radix_tree import RadixTree


class Place:
    def __init__(self, path: tuple, block: int | None, tokens: tuple[int, ...] = ()) -> None:
        self.path, self.block, self.tokens = path, block, tokens


class Paths:
    """An index that is right by construction, whole paths in a dictionary: checks of the books need no other."""

    def __init__(self) -> None:
        self.places: dict[tuple, Place] = {}

    def root(self, extra: tuple) -> Place:
        return Place((extra,), None)

    def find(self, parent: Place, tokens: tuple[int, ...]) -> Place | None:
        return self.places.get((*parent.path, tokens))

    def prefix(self, root: Place, token_ids: list[int], block_size: int, most: int) -> list[Place]:
        places = [root]
        for first in range(0, most * block_size, block_size):
            found = self.find(places[-1], tuple(token_ids[first : first + block_size]))
            if found is None:
                break
            places.append(found)
        return places[1:]

    def put(self, parent: Place, tokens: tuple[int, ...], block: int) -> tuple[Place | None, bool]:
        path = (*parent.path, tokens)
        is_new = path not in self.places
        return self.places.setdefault(path, Place(path, block, tokens)), is_new

    def remove(self, block: int) -> Place | None:
        found = next((path for path, place in self.places.items() if place.block == block), None)
        return self.places.pop(found) if found else None

    def known(self) -> dict[tuple, int]:
        """All paths, without the extra in front, and their blocks."""
        return {path[1:]: place.block for path, place in self.places.items()}


def on_paths(num_blocks: int = 9, block_size: int = 4) -> PrefixCache:
    return PrefixCache(num_blocks, block_size, Paths())


def filled(cache: PrefixCache, tokens: list[int], extra: tuple = (), owners: int = 0) -> list[int]:
    """Put the full blocks of these tokens into the index, as if a sequence had been there, held by so many owners."""
    place, blocks = cache.index.root(extra), []
    for first in range(0, len(tokens) - cache.block_size + 1, cache.block_size):
        (block,) = cache.pool.allocate(1)
        cache.pool.ref_counts[block] = owners
        if not owners:
            cache.pool.free[block] = None
        place, _ = cache.index.put(place, tuple(tokens[first : first + cache.block_size]), block)
        blocks.append(block)
    return blocks


def compute(cache: PrefixCache, sequence: Sequence) -> bool:
    """A step over all that is new; False if there was no room."""
    if cache.reserve(sequence, sequence.num_tokens) is None:
        return False
    cache.commit(sequence, sequence.num_tokens)
    return True


def run(cache: PrefixCache, tokens: list[int], extra: tuple = ()) -> tuple[int, Sequence]:
    """Look up, compute, and stay: (tokens found, the sequence)."""
    sequence = Sequence(list(tokens), extra_key=extra)
    found = cache.match(sequence)
    assert compute(cache, sequence)
    return found, sequence


# ---- exercise by exercise --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 14))
def test_match_leaves_one_token_to_compute(length):
    """Of n known tokens, block * ((n - 1) // block) are taken over."""
    cache = on_paths()
    blocks = filled(cache, list(range(12)))
    sequence = Sequence(list(range(13))[:length])
    found = (length - 1) // 4
    assert cache.match(sequence) == sequence.num_kv == 4 * found
    assert sequence.block_table == blocks[:found]
    assert sequence.num_new >= 1


def test_match_takes_full_blocks_up_to_the_first_that_differs():
    cache = on_paths()
    blocks = filled(cache, list(range(12)))
    for tokens, count in (
        ([*range(8), 99, 9, 10, 11, 12], 2),
        ([*range(4), 99, 5, 6, 7, 8, 9, 10, 11, 12], 1),  # what comes after it does not count
        ([*range(4), 99, 99, 99, 99, 4, 5, 6, 7, 8], 1),  # nor does what would have come next
        ([99, *range(1, 13)], 0),
        ([*range(4, 13)], 0),  # the same tokens elsewhere are other K/V
        ([0, 1, 2], 0),
    ):
        sequence = Sequence(tokens)
        assert cache.match(sequence) == 4 * count
        assert sequence.block_table == blocks[:count]


def test_match_revives_free_blocks_and_shares_held_ones():
    cache = on_paths()
    free, held = filled(cache, [1] * 4), filled(cache, [2] * 8, owners=1)
    before = cache.pool.num_free
    for times in (1, 2):
        assert cache.match(Sequence([1] * 5)) == 4
        assert cache.match(Sequence([2] * 9)) == 8
        assert cache.pool.num_free == before - 1
        assert [cache.pool.ref_counts[block] for block in (*free, *held)] == [times, times + 1, times + 1]
        cache.pool.check()
    assert all(block not in free for block in cache.pool.allocate(cache.pool.num_free))


def test_match_asks_in_the_world_of_its_extra_key():
    """vllm-project/vllm#44701."""
    cache = on_paths()
    filled(cache, [1] * 8, extra=(("salt", "x"),))
    others = [(), (("salt", "y"),), (("adapter", "x"),)]
    assert [cache.match(Sequence([1] * 9, extra_key=extra)) for extra in others] == [0, 0, 0]
    assert cache.match(Sequence([1] * 9, extra_key=(("salt", "x"),))) == 8


def test_match_notes_where_it_ended():
    """`commit` goes on from there, and counts the hit when a step has followed."""
    cache = on_paths()
    filled(cache, list(range(12)))
    for tokens, count in ((list(range(9)), 2), ([*range(4), 9, 9, 9, 9, 9], 1), ([9] * 9, 0)):
        sequence = Sequence(tokens)
        cache.match(sequence)
        blocks, place = cache.published[sequence]
        assert (blocks, len(place.path) - 1) == (count, count)
        assert cache.looked_up[sequence] == (9, 4 * count)
        assert (cache.queried_tokens, cache.hit_tokens) == (0, 0)


def test_commit_publishes_full_blocks():
    cache = on_paths()
    sequence = Sequence(list(range(10)))
    cache.reserve(sequence, 10)
    assert cache.index.known() == {}, "reserved, not computed"
    cache.commit(sequence, 10)
    first, second, _ = sequence.block_table
    expected = {((0, 1, 2, 3),): first, ((0, 1, 2, 3), (4, 5, 6, 7)): second}
    assert sequence.num_kv == 10
    assert cache.index.known() == expected
    sequence.token_ids += [10, 11]
    cache.reserve(sequence, 12)
    cache.commit(sequence, 12)
    assert cache.index.known() == expected | {((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)): sequence.block_table[2]}


def test_commit_publishes_what_is_computed_and_no_more():
    """Chunks: known tokens that have no K/V yet are not in the index. GeeeekExplorer/nano-vllm#163 in spirit."""
    cache = on_paths()
    sequence = Sequence(list(range(16)))
    cache.reserve(sequence, 16)
    for computed in (1, 3, 4, 7, 8, 9, 15, 16):
        cache.commit(sequence, computed)
        assert sequence.num_kv == computed
        assert len(cache.index.known()) == computed // 4
    assert sorted(cache.index.known().values()) == sorted(sequence.block_table)


def test_commit_publishes_the_first_of_equal_blocks():
    """Two sequences computed the same in one step: the first one's block is found, the other's is just freed."""
    cache = on_paths()
    one, two = Sequence([7] * 9), Sequence([7] * 13)
    for sequence in (one, two):
        cache.reserve(sequence, sequence.num_tokens)
    for sequence in (one, two):
        cache.commit(sequence, sequence.num_tokens)
    assert sorted(cache.index.known().values()) == sorted([*one.block_table[:2], two.block_table[2]])


def test_commit_goes_on_where_it_stopped():
    """After a look-up and after each step: every block is asked for once, in its own place."""
    cache = on_paths()
    asked, put = [], cache.index.put
    cache.index.put = lambda parent, tokens, block: (asked.append(tokens), put(parent, tokens, block))[1]
    sequence = Sequence(list(range(4)))
    cache.reserve(sequence, 4)
    cache.commit(sequence, 4)
    for token in range(4, 13):
        sequence.token_ids.append(token)
        cache.reserve(sequence, token + 1)
        cache.commit(sequence, token + 1)
    assert asked == [tuple(range(first, first + 4)) for first in (0, 4, 8)]
    assert len(cache.index.known()) == 3


def test_commit_stops_when_the_index_refuses():
    """A block that cannot be published ends it: what follows could not be found."""
    cache = on_paths()
    put = cache.index.put
    cache.index.put = lambda parent, tokens, block: (None, False) if tokens[0] == 4 else put(parent, tokens, block)
    sequence = Sequence(list(range(16)))
    for computed in (8, 12, 16):
        cache.reserve(sequence, computed)
        cache.commit(sequence, computed)
    assert list(cache.index.known()) == [((0, 1, 2, 3),)]
    assert sequence.num_kv == 16


def test_commit_tells_what_was_stored():
    cache, events = on_paths(), []
    cache.subscribers.append(events.append)
    extra = (("salt", "x"),)
    one, two = Sequence(list(range(8)), extra_key=extra), Sequence(list(range(12)), extra_key=extra)
    for sequence in (one, two):
        cache.reserve(sequence, sequence.num_tokens)
        cache.commit(sequence, sequence.num_tokens)
    first, second = one.block_table
    assert events == [
        KVEvent("stored", first, (0, 1, 2, 3), None, extra),
        KVEvent("stored", second, (4, 5, 6, 7), first, extra),
        KVEvent("stored", two.block_table[2], (8, 9, 10, 11), second, extra),
    ]


def test_commit_counts_the_look_up_once():
    cache = on_paths()
    sequence = Sequence(list(range(9)))
    cache.reserve(sequence, 9)
    cache.looked_up[sequence] = 9, 4
    cache.commit(sequence, 5)
    cache.commit(sequence, 9)
    assert (cache.queried_tokens, cache.hit_tokens) == (9, 4)


def lru_pool(held: int) -> tuple[LruPool, list[int]]:
    """A pool of 8 blocks, so many of which are held, in a table that is in no order; and the blocks that it evicted."""
    evicted: list[int] = []
    pool = LruPool(9, evicted.append)
    for block in range(1, held + 1):
        del pool.free[block]
        pool.ref_counts[block] = 1
    return pool, evicted


def test_give_back_frees_tails_first():
    """What hangs on a prefix is overwritten before the prefix, whatever the blocks' numbers are."""
    pool, _ = lru_pool(4)
    pool.give_back([3, 1, 4, 2])
    assert list(pool.free) == [5, 6, 7, 8, 2, 4, 1, 3]
    pool.check()


def test_give_back_puts_the_last_used_last():
    pool, evicted = lru_pool(6)
    pool.give_back([5, 6])
    pool.give_back(iter([2, 1]))
    pool.give_back([])
    assert list(pool.free) == [7, 8, 6, 5, 1, 2]
    assert pool.allocate(4) == [7, 8, 6, 5]
    assert evicted == [7, 8, 6, 5]


def test_give_back_of_shared_blocks():
    pool, _ = lru_pool(3)
    pool.ref_counts[2] = 2
    pool.give_back([2, 1, 3])
    assert list(pool.free) == [4, 5, 6, 7, 8, 3, 1]
    pool.give_back([2])
    assert list(pool.free)[-1] == 2


@pytest.mark.parametrize(("blocks", "name"), [([1, 2, 2], 2), ([1, 7], 7), ([7, 1], 7), ([1, 0], 0)])
def test_give_back_refuses_all_or_nothing(blocks, name):
    pool, _ = lru_pool(3)
    before = (list(pool.ref_counts), list(pool.free))
    with pytest.raises(RuntimeError, match=f"block {name} "):
        pool.give_back(blocks)
    assert (list(pool.ref_counts), list(pool.free)) == before


# ---- a block's life --------------------------------------------------------------------------------------------------


@pytest.fixture(params=[HashChain, RadixTree])
def make_index(request) -> Any:
    return request.param


def test_the_second_identical_prompt_computes_the_rest(make_index):
    for length in range(1, 18):
        cache = PrefixCache(20, 4, make_index())
        found, sequence = run(cache, list(range(length)))
        assert found == 0
        cache.release(sequence)
        found, sequence = run(cache, list(range(length)))
        assert length - found == length - 4 * ((length - 1) // 4)


def test_a_recycled_block_is_not_found_under_its_old_key(make_index):
    """3 blocks of 4: X (8 tokens), Y (12 others), X again: nothing is found. GeeeekExplorer/nano-vllm#163.

    X takes the two last blocks of Y, so that Y's first is found.
    """
    cache = PrefixCache(4, 4, make_index())
    for tokens, expected in (([1] * 8, 0), ([1] * 8, 4), ([2] * 12, 0), ([1] * 8, 0), ([2] * 12, 4)):
        found, sequence = run(cache, tokens)
        assert found == expected
        cache.release(sequence)
    assert cache.index.by_block.keys() == set(cache.pool.free)


def test_the_least_recently_used_prefix_goes_first_and_its_tail_before_it(make_index):
    cache = PrefixCache(9, 4, make_index())
    for tokens in ([1] * 16, [2] * 16):  # all 8 blocks
        cache.release(run(cache, tokens)[1])
    cache.release(run(cache, [1] * 9)[1])  # uses half of the older again, and takes its last block
    cache.release(run(cache, [3] * 8)[1])  # takes the older's next, which was not used again, and the younger's last
    lengths = []
    for token in (1, 2, 3):
        probe = Sequence([token] * 17)
        lengths.append(cache.match(probe))
        cache.release(probe)
    assert lengths == [8, 12, 8]


def test_a_tail_whose_prefix_was_evicted_is_out_of_reach(make_index):
    """Same-step duplicates: the second's blocks hang on the first's, which leave before it."""
    cache = PrefixCache(8, 2, make_index())
    subscriber = Subscriber()
    cache.subscribers.append(subscriber)
    one, two = Sequence([1, 1]), Sequence([1, 1, 2, 2])
    for sequence in (one, two):
        cache.reserve(sequence, sequence.num_tokens)
    for sequence in (one, two):
        cache.commit(sequence, sequence.num_tokens)
    assert subscriber.find((), [(1, 1), (2, 2)]) == [one.block_table[0], two.block_table[1]]
    cache.release(one)
    others = Sequence([9] * 10)
    assert compute(cache, others)
    assert subscriber.find((), [(1, 1), (2, 2)]) == []
    probe = Sequence([1, 1, 2, 2, 3])
    assert cache.match(probe) == 0
    cache.release(others)
    found, again = run(cache, [1, 1, 2, 2, 3])
    assert found == 0
    assert subscriber.find((), [(1, 1), (2, 2)]) == again.block_table[:2]


def test_a_fork_announces_nothing_twice(make_index):
    cache, events = PrefixCache(9, 4, make_index()), []
    cache.subscribers.append(events.append)
    _, one = run(cache, list(range(10)))
    two = Sequence(list(range(10)))
    cache.fork_prefix(one, two, 9)
    compute(cache, two)
    assert [event.block for event in events] == one.block_table[:2]


def test_what_was_not_computed_is_never_published(make_index):
    """A sequence that leaves before its step has ended."""
    cache = PrefixCache(9, 4, make_index())
    sequence = Sequence([1] * 9)
    cache.match(sequence)
    cache.reserve(sequence, 9)
    cache.release(sequence)
    assert cache.match(Sequence([1] * 9)) == 0
    assert not cache.index.by_block


def test_hits_are_counted_once_per_step_that_follows(make_index):
    cache = PrefixCache(5, 4, make_index())
    cache.release(run(cache, [1] * 9)[1])
    assert (cache.queried_tokens, cache.hit_tokens) == (9, 0)
    _, holder = run(cache, [2] * 4)
    for _ in range(3):  # has to wait, and looks again in every step
        waiting = Sequence([1] * 17)
        assert cache.match(waiting) == 8
        assert cache.reserve(waiting, 17) is None
        cache.release(waiting)
    assert (cache.queried_tokens, cache.hit_tokens) == (13, 0)
    cache.release(holder)
    assert run(cache, [1] * 14)[0] == 8
    assert (cache.queried_tokens, cache.hit_tokens) == (27, 8)


# ---- histories -------------------------------------------------------------------------------------------------------


def test_chain_and_tree_agree_on_ten_thousand_histories():
    """100,000 by `python -m stages.s06_prefix_cache.fuzz_prefix`; a subscriber follows each by its events."""
    done: Counter[str] = Counter()
    for seed in range(10_000):
        done += History(seed, BOTH).run(20)
    assert all(done[kind] > 2_000 for kind in ("hit", "recycled", "no room", "fork", "left in a step")), done


def test_chain_and_tree_agree_on_long_histories():
    done: Counter[str] = Counter()
    for seed in range(8):
        done += History(seed, BOTH, num_blocks=40).run(600)
    assert done["hit"] > 500, done
    assert done["recycled"] > 500, done


@pytest.mark.parametrize("index", COLLIDING)
def test_collisions_serve_nobody_wrong(index):
    """A constant, and the last token alone, for a hash. waybarrios/vllm-mlx#444."""
    done: Counter[str] = Counter()
    for seed in range(500):
        done += History(seed, (index,)).run(25)
    assert done["hit"] > 100, done


def test_ten_thousand_random_steps_of_an_engine():
    """Every index, with chunks, preemption, swapping, salts, aborts and failing steps; each row reads its own K/V."""
    done = CachedFuzz(0).run(10_000)
    assert done["hit token"] > 1_000, done
    assert all(done[kind] > 20 for kind in ("chunk", "preemption", "swap in", "copy", "abort", "failed step")), done
