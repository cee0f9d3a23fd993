"""The books of the paged cache: how many blocks, whose, and when a shared one is copied."""

import random

import pytest

from stages.s02_kv_cache.sequence import Sequence
from stages.s03_paged_kv.context import slot_mapping
from stages.s03_paged_kv.paged_cache import PagedCache


class Stock:
    """A stand-in for the pool that these checks need no line of: hands out 1, 2, 3 ... and counts owners."""

    def __init__(self, free: int) -> None:
        self.owners: dict[int, int] = {}
        self.unused = list(range(1, free + 1))

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self.unused):
            return None
        taken, self.unused = self.unused[:count], self.unused[count:]
        self.owners |= dict.fromkeys(taken, 1)
        return taken

    def share(self, blocks: list[int]) -> None:
        for block in blocks:
            self.owners[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self.owners[block] -= 1

    def is_shared(self, block: int) -> bool:
        return self.owners[block] > 1


def cache_of(free: int, block_size: int = 4) -> PagedCache:
    cache = PagedCache(free + 1, block_size)
    cache.pool = Stock(free)
    return cache


def grow(cache: PagedCache, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
    """Tokens become known, get room and are computed."""
    sequence.token_ids += [9] * (num_tokens - sequence.num_tokens)
    copies = cache.reserve(sequence, num_tokens)
    if copies is not None:
        cache.commit(sequence, num_tokens)
    return copies


# ---- reserve ---------------------------------------------------------------------------------------------------------


def test_reserve_takes_blocks_as_they_are_needed():
    cache, sequence = cache_of(5), Sequence([])
    taken = [(grow(cache, sequence, n), len(sequence.block_table)) for n in (1, 3, 4, 5, 8, 9, 17)]
    assert taken == [([], 1), ([], 1), ([], 1), ([], 2), ([], 2), ([], 3), ([], 5)]
    assert sequence.block_table == [1, 2, 3, 4, 5], "in order of the tokens"
    assert grow(cache, sequence, 21) is None
    assert (sequence.block_table, sequence.num_kv) == ([1, 2, 3, 4, 5], 17)


def test_reserve_without_room_changes_nothing():
    cache = cache_of(3)
    first = Sequence([])
    grow(cache, first, 6)
    second = cache.fork(first)
    third = cache.fork(first)
    assert grow(cache, second, 7) == [(2, 3)], "the last free block"
    owners = dict(cache.pool.owners)
    third.token_ids.append(9)
    assert cache.reserve(third, 7) is None
    assert (third.block_table, cache.pool.owners) == ([1, 2], owners)
    assert cache.reserve(third, 6) == [], "nothing is to be written, so nothing is to be copied"


def test_reserve_copies_a_shared_half_full_block_for_all_but_one():
    """6 tokens in blocks of 4, three owners: two copy the second block, the last keeps it. vllm-project/vllm#3347."""
    cache = cache_of(8)
    first = Sequence([])
    grow(cache, first, 6)
    second, third = cache.fork(first), cache.fork(first)
    assert cache.pool.owners == {1: 3, 2: 3}
    assert grow(cache, first, 7) == [(2, 3)]
    assert grow(cache, third, 7) == [(2, 4)]
    assert grow(cache, second, 7) == []
    assert [s.block_table for s in (first, second, third)] == [[1, 3], [1, 2], [1, 4]]
    assert cache.pool.owners == {1: 3, 2: 1, 3: 1, 4: 1}
    assert [grow(cache, s, 10) for s in (first, second, third)] == [[], [], []]
    assert [s.block_table for s in (first, second, third)] == [[1, 3, 5], [1, 2, 6], [1, 4, 7]]


@pytest.mark.parametrize("length", [4, 8])
def test_reserve_never_copies_a_full_block(length):
    cache = cache_of(8)
    first = Sequence([])
    grow(cache, first, length)
    second = cache.fork(first)
    assert [grow(cache, s, length + 1) for s in (first, second)] == [[], []]
    assert first.block_table[:-1] == second.block_table[:-1]
    assert first.block_table[-1] != second.block_table[-1]


def test_reserve_copies_and_grows_at_once():
    """From 6 to 13 tokens in one step: the shared block is copied, and two more follow."""
    cache = cache_of(8)
    first = Sequence([])
    grow(cache, first, 6)
    second = cache.fork(first)
    assert grow(cache, second, 13) == [(2, 3)]
    assert (first.block_table, second.block_table) == ([1, 2], [1, 3, 4, 5])


# ---- slots -----------------------------------------------------------------------------------------------------------


def test_slots_follow_the_block_table():
    """Blocks of 4: token i lies at block_table[i // 4] * 4 + i % 4."""
    whole = Sequence([0] * 6, num_kv=0, block_table=[7, 2])
    decode = Sequence([0] * 6, num_kv=5, block_table=[3, 9])
    chunk = Sequence([0] * 9, num_kv=3, block_table=[5, 1, 4])
    assert slot_mapping([whole], 4) == [28, 29, 30, 31, 8, 9]
    assert slot_mapping([decode], 4) == [37]
    assert slot_mapping([chunk], 4) == [23, 4, 5, 6, 7, 16]
    assert slot_mapping([decode, whole, chunk], 4) == [37, 28, 29, 30, 31, 8, 9, 23, 4, 5, 6, 7, 16]
    assert slot_mapping([decode], 1000) == [3 * 1000 + 5]


def test_slots_belong_to_their_sequence():
    """No slot is negative or in the dummy block, and no two tokens share one. vllm-project/vllm#43810."""
    rng = random.Random(0)
    for block_size in (1, 3, 16):
        blocks = rng.sample(range(1, 41), 40)
        rows = []
        for tokens in (1, block_size, block_size + 1, 5 * block_size - 1):
            table = [blocks.pop() for _ in range(-(-tokens // block_size))]
            rows.append(Sequence([0] * tokens, rng.randrange(tokens), table))
        slots = slot_mapping(rows, block_size)
        assert len(set(slots)) == len(slots) == sum(row.num_new for row in rows)
        owners = [slot // block_size for slot in slots]
        assert 0 not in owners
        assert set(owners) <= {block for row in rows for block in row.block_table}


def test_slots_without_a_block_are_an_error():
    """Never slot -1, which would be somebody's last one. vllm-project/vllm#43810."""
    with pytest.raises(IndexError):
        slot_mapping([Sequence([0] * 5, num_kv=4, block_table=[3])], 4)
    with pytest.raises(IndexError):
        slot_mapping([Sequence([0])], 4)


# ---- a sequence's life -----------------------------------------------------------------------------------------------


def test_lengths_around_multiples_of_the_block_size():
    """1, 3, 4, 5, 8 tokens need 1, 1, 1, 2, 2 blocks; all come back, with no owner. Wenyueh/MinivLLM#87."""
    cache = PagedCache(9, 4)
    assert [cache.blocks_for(n) for n in (0, 1, 3, 4, 5, 8, 9)] == [0, 1, 1, 1, 2, 2, 3]
    sequences = [Sequence([0] * n) for n in (1, 3, 4, 5, 8)]
    assert [grow(cache, s, s.num_tokens) for s in sequences] == [[]] * 5
    assert [len(s.block_table) for s in sequences] == [1, 1, 1, 2, 2]
    in_last_block = [len([slot for slot in slot_mapping([Sequence(s.token_ids, 0, s.block_table)], 4)
                          if slot // 4 == s.block_table[-1]]) for s in sequences]  # fmt: skip
    assert in_last_block == [1, 3, 4, 1, 4]
    for sequence in sequences:
        cache.release(sequence)
        cache.pool.check()
    assert cache.pool.ref_counts == [1] + [0] * 8
    assert sorted(cache.pool.free) == list(range(1, 9))


def test_three_answers_to_a_prompt_of_six():
    """8 blocks of 4, 5 tokens each, ending in the order 2, 1, 3: none is freed twice. vllm-project/vllm#3347."""
    cache = PagedCache(9, 4)
    first = Sequence([0] * 6)
    grow(cache, first, 6)
    answers, copies, peak = [first, cache.fork(first), cache.fork(first)], 0, 0
    for length in range(7, 11):  # the fifth token is never written
        for sequence in answers:
            copies += len(grow(cache, sequence, length))
            cache.pool.check()
        peak = max(peak, 8 - cache.pool.num_free)
        assert cache.pool.ref_counts[answers[0].block_table[0]] == 3
    assert (copies, peak) == (2, 7)
    for number, free in ((2, 3), (1, 5), (3, 8)):
        cache.release(answers[number - 1])
        cache.pool.check()
        assert cache.pool.num_free == free
    assert sorted(cache.pool.free) == list(range(1, 9))


def test_fork_shares_what_is_written_and_no_more():
    """Room that a sequence has reserved and not yet filled stays its own."""
    cache = PagedCache(9, 4)
    first = Sequence([0] * 14, num_kv=0)
    cache.reserve(first, 14)
    cache.commit(first, 6)
    second = cache.fork(first)
    assert second.block_table == first.block_table[:2]
    assert (second.token_ids, second.num_kv) == (first.token_ids, 6)
    second.token_ids.append(1)
    assert len(first.token_ids) == 14, "the lists are two"
    pairs = cache.reserve(second, 15)
    assert len(pairs) == 1
    assert set(second.block_table[1:]).isdisjoint(first.block_table)
    assert cache.reserve(first, 14) == []


def test_release_twice_and_release_of_nothing():
    cache = PagedCache(5, 4)
    sequence = Sequence([0] * 6)
    cache.release(sequence)
    grow(cache, sequence, 6)
    fork = cache.fork(sequence)
    for _ in range(2):
        cache.release(sequence)
        assert (sequence.block_table, sequence.num_kv, cache.pool.num_free) == ([], 0, 2)
    cache.release(fork)
    assert cache.pool.num_free == 4
    assert cache.match(fork) == 0
    cache.pool.check()
