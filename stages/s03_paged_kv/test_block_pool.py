"""The pool of blocks: every block is free or held, never both, never lost."""

from collections import OrderedDict

import pytest

from stages.s03_paged_kv.block_pool import DUMMY, BlockPool
from stages.s03_paged_kv.fuzz_pool import Fuzz


def state(pool: BlockPool) -> tuple[list[int], list[int]]:
    return list(pool.ref_counts), list(pool.free)


def pool_with(ref_counts: list[int]) -> BlockPool:
    """A pool in which blocks 1, 2, ... have these owners, without a call of `allocate`."""
    pool = BlockPool(len(ref_counts) + 1)
    pool.ref_counts[1:] = ref_counts
    pool.free = OrderedDict.fromkeys(block for block, owners in enumerate(ref_counts, start=1) if owners == 0)
    return pool


def test_allocate_gives_each_block_to_one_owner():
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted(first + second) == [1, 2, 3, 4, 5], "all but the dummy, each once"
    assert pool.ref_counts == [1, 1, 1, 1, 1, 1]
    assert pool.num_free == 0
    pool.check()


def test_allocate_all_or_nothing():
    pool = pool_with([0, 2, 0, 0])
    before = state(pool)
    assert pool.allocate(4) is None
    assert state(pool) == before
    assert pool.allocate(0) == []
    assert state(pool) == before
    assert sorted(pool.allocate(3)) == [1, 3, 4]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.check()


def test_allocate_never_gives_the_dummy():
    pool = BlockPool(4)
    assert DUMMY not in pool.allocate(3)
    assert pool.allocate(1) is None
    assert pool.ref_counts[DUMMY] == 1


def test_give_back_frees_a_block_with_its_last_owner():
    pool = pool_with([1, 2, 3, 0])
    pool.give_back([1, 2])
    assert pool.ref_counts == [1, 0, 1, 3, 0]
    assert sorted(pool.free) == [1, 4]
    pool.give_back([3, 2])
    pool.give_back([3])
    assert pool.ref_counts == [1, 0, 0, 1, 0]
    assert sorted(pool.free) == [1, 2, 4]
    pool.check()


@pytest.mark.parametrize(
    ("blocks", "name"), [([4], 4), ([1, 4], 4), ([1, 1], 1), ([2, 2, 2], 2), ([1, 0], 0), ([1, -1], -1), ([1, 5], 5)]
)
def test_give_back_refuses_what_is_not_held(blocks, name):
    """A free block, one twice, the dummy, and what is no block: refused, and nothing of the call is done."""
    pool = pool_with([1, 2, 3, 0])
    before = state(pool)
    with pytest.raises(RuntimeError, match=f"block {name} "):
        pool.give_back(blocks)
    assert state(pool) == before


@pytest.mark.parametrize("blocks", [[4], [1, 4], [0], [-1], [5]])
def test_share_refuses_what_is_not_held(blocks):
    pool = pool_with([1, 2, 3, 0])
    before = state(pool)
    with pytest.raises(RuntimeError, match=f"block {blocks[-1]} "):
        pool.share(blocks)
    assert state(pool) == before


def test_shared_blocks_are_known():
    pool = pool_with([1, 2, 0])
    assert [pool.is_shared(block) for block in (1, 2, 3)] == [False, True, False]
    pool.share([1])
    assert pool.is_shared(1)


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_has_something_to_give(num_blocks):
    with pytest.raises(ValueError, match=f"pool of {num_blocks} blocks"):
        BlockPool(num_blocks)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda pool: pool.free.popitem(), "without owner"),
        (lambda pool: pool.ref_counts.__setitem__(2, 1), "without owner"),
        (lambda pool: pool.ref_counts.__setitem__(1, 0), "without owner"),
        (lambda pool: pool.ref_counts.__setitem__(DUMMY, 0), "dummy"),
        (lambda pool: pool.free.setdefault(DUMMY), "without owner"),
    ],
)
def test_check_finds_what_is_wrong(spoil, words):
    pool = pool_with([1, 0, 0])
    pool.check()
    spoil(pool)
    with pytest.raises(RuntimeError, match=words):
        pool.check()


@pytest.mark.parametrize(("seed", "num_blocks", "block_size"), [(0, 24, 4), (1, 60, 1), (2, 10, 16)])
def test_ten_thousand_random_operations(seed, num_blocks, block_size):
    """100,000 by `python -m stages.s03_paged_kv.fuzz_pool`."""
    operations = 10_000
    done = Fuzz(seed, num_blocks, block_size).run(operations)
    kinds = {"step", "fork", "end", "refused", "no room"} | ({"copy"} if block_size > 1 else set())
    assert all(done[kind] >= operations // 100 for kind in kinds), done
