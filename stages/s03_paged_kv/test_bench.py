"""What the figures and the pictures of memory rest on."""

from stages.s02_kv_cache.contiguous_cache import ContiguousCache
from stages.s02_kv_cache.sequence import Sequence
from stages.s03_paged_kv.bench import LONGEST, Ragged, blocks_of_answers, ragged_requests, replay, sequences_that_fit
from stages.s03_paged_kv.block_map import block_map
from stages.s03_paged_kv.paged_cache import PagedCache


def test_block_map_names_all_owners_and_counts_their_tokens():
    """A: 6 tokens in blocks 1 and 2; B forked from it and on to 7 in a copy, 3; C has room for 5 and no token yet."""
    cache = PagedCache(8, 4)
    a = Sequence([0] * 6)
    cache.reserve(a, 6)
    cache.commit(a, 6)
    b, c = cache.fork(a), Sequence([0] * 5)
    shared = block_map(cache, {"A": a, "B": b})
    assert shared == ([None, "A, B", "A, B", *[None] * 5], [0, 4, 2, *[0] * 5])
    cache.reserve(b, 7)
    cache.commit(b, 7)
    cache.reserve(c, 5)
    owners, used = block_map(cache, {"A": a, "B": b, "C": c})
    assert owners == [None, "A, B", "A", "B", "C", "C", None, None]
    assert used == [0, 4, 2, 3, 0, 0, 0, 0]


def test_replay_by_hand():
    """Prompts of 3 and 4, answers of 2 and 3, the second a step later; the last token of an answer is never written."""
    requests = [Ragged(0, 3, 2), Ragged(1, 4, 3)]
    assert replay(PagedCache(9, 4), 4, requests) == [(4, 3), (8, 8), (8, 5), (8, 6)]
    assert replay(ContiguousCache(2, 10), 10, requests) == [(10, 3), (20, 8), (10, 5), (10, 6)]


def test_every_cache_is_asked_for_the_same_and_gives_all_back():
    requests = ragged_requests(12)
    contiguous, paged = ContiguousCache(12, LONGEST), PagedCache(1 + 12 * LONGEST // 16, 16)
    histories = replay(contiguous, LONGEST, requests), replay(paged, 16, requests)
    assert [used for _, used in histories[0]] == [used for _, used in histories[1]]
    assert all(held >= used for history in histories for held, used in history)
    assert len(contiguous.free_pages) == 12
    assert paged.pool.num_free == paged.pool.num_blocks - 1


def test_capacity_by_hand():
    """10 + 6 - 1 tokens are 4 blocks of 4: two such sequences in 11 blocks; three answers to one prompt share 2."""
    assert sequences_that_fit(PagedCache(12, 4), [Ragged(0, 10, 6)] * 5) == 2
    assert sequences_that_fit(ContiguousCache(3, 20), [Ragged(0, 10, 6)] * 5) == 3
    assert blocks_of_answers(prompt=10, output=6, n=3, block_size=4) == (2 + 3 * 2, 3 * 4)
