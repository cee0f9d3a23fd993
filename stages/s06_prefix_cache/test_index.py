"""How blocks are found: keys that cover everything, collisions that serve nobody, and a tree with the same answers."""

import gc
import hashlib
import itertools
import random
from array import array

import pytest

from stages.s06_prefix_cache.fuzz_prefix import last_token, same_key
from stages.s06_prefix_cache.hash_chain import Entry, HashChain, block_hash, root_hash
from stages.s06_prefix_cache.prefix_cache import PrefixIndex
from stages.s06_prefix_cache.radix_tree import RadixTree, blocks_alike

A, B, C = (1, 2), (3, 4), (5, 6)


def readable(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """A key without a hash, so that checks of the chain need no hash function."""
    return parent + repr(tokens).encode()


# ---- exercise by exercise --------------------------------------------------------------------------------------------


def test_block_hash_covers_the_parent_and_every_token():
    parents = [hashlib.sha256(bytes([i])).digest() for i in range(5)]
    blocks = [*itertools.permutations((1, 2, 3, 4)), (1, 2, 3, 5), (0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4)]
    keys = {block_hash(parent, tokens) for parent in parents for tokens in blocks}
    assert len(keys) == len(parents) * len(blocks)
    assert all(len(key) == 32 for key in keys)
    assert block_hash(parents[0], (1, 2, 3, 4)) == block_hash(parents[0], (1, 2, 3, 4))


@pytest.mark.parametrize(
    ("tokens", "others"),
    [
        ((7, 8, 9, 10), (263, 264, 265, 266)),  # equal modulo 256
        ((7, 8), (65543, 65544)),  # modulo 2^16
        ((7, 8), (7 + 2**32, 8 + 2**32)),  # modulo 2^32
        ((1, 23), (12, 3)),  # equal as text
        ((0, 0, 0), (0, 0)),
    ],
)
def test_block_hash_of_ids_that_look_alike(tokens, others):
    """waybarrios/vllm-mlx#444."""
    root = root_hash(())
    assert block_hash(root, tokens) != block_hash(root, others)


def test_find_walks_a_chain():
    chain = HashChain(readable)
    root = chain.root(())
    assert chain.find(root, A) is None
    first, _ = chain.put(root, A, 5)
    second, _ = chain.put(first, B, 3)
    assert chain.find(root, A) is first
    assert chain.find(first, B) is second
    assert (first.block, second.block) == (5, 3)
    assert [chain.find(root, B), chain.find(first, A), chain.find(second, B)] == [None] * 3


@pytest.mark.parametrize("hash_block", [same_key, last_token])
def test_find_compares_tokens_and_parent_when_keys_collide(hash_block):
    """waybarrios/vllm-mlx#444: no wrong block is ever served."""
    chain = HashChain(hash_block)
    root = chain.root(())
    first, _ = chain.put(root, A, 5)
    assert chain.find(root, A) is first
    assert chain.find(root, (9, 2)) is None, "other tokens with the same key"
    assert chain.find(first, A) is None, "the same tokens after something else"
    assert chain.find(chain.root((("salt", "x"),)), A) is None
    assert chain.find(root, (1, 2, 2)) is None
    chain.remove(5)
    assert chain.find(root, A) is None


class PlainChain(HashChain):
    """Looks at every entry, so that checks of `prefix` need no other exercise."""

    def find(self, parent: Entry, tokens: tuple[int, ...]) -> Entry | None:
        return next((each for each in self.entries.values() if each.parent is parent and each.tokens == tokens), None)


def test_prefix_of_a_chain_ends_at_the_first_block_that_is_not_there():
    chain = PlainChain(readable)
    root = chain.root(())
    places = [root]
    for block, tokens in enumerate((A, B, C, A), start=5):
        places.append(chain.put(places[-1], tokens, block)[0])
    for token_ids, most, count in (
        ([*A, *B, *C, *A], 4, 4),
        ([*A, *B, *C, *A, *A, *B], 6, 4),
        ([*A, *B, *C, *A], 3, 3),  # no more than may be asked for
        ([*A, *B, *A, *A], 4, 2),  # what comes after the one that differs does not count
        ([*A, *C, *A], 3, 1),  # nor does a block that is known elsewhere
        ([*A, *B, C[0]], 2, 2),
        ([*B, *A], 2, 0),
        ([A[0]], 0, 0),
    ):
        assert chain.prefix(root, token_ids, 2, most) == places[1 : count + 1]


# ---- both indexes ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=[HashChain, RadixTree])
def index(request) -> PrefixIndex:
    return request.param()


def path(index: PrefixIndex, *blocks: tuple[int, ...], extra=()) -> list[int]:
    """The blocks found along a path."""
    place, found = index.root(extra), []
    for tokens in blocks:
        if (place := index.find(place, tokens)) is None:
            break
        found.append(place.block)
    return found


def grow(index: PrefixIndex, *blocks: tuple[tuple[int, ...], int], extra=()) -> list:
    """Add what is not there yet; the places of the path."""
    places = [index.root(extra)]
    for tokens, block in blocks:
        found = index.find(places[-1], tokens)
        place, is_new = index.put(places[-1], tokens, block)
        assert place is found if found else is_new
        places.append(place)
    return places[1:]


def test_paths_that_part(index):
    grow(index, (A, 1), (B, 2), (C, 3))
    assert path(index, A, B, C, A) == [1, 2, 3]
    grow(index, (A, 8), (C, 4), (B, 5))  # parts after A, which stays block 1
    grow(index, (B, 6))
    assert path(index, A, B, C) == [1, 2, 3]
    assert path(index, A, C, B) == [1, 4, 5]
    assert path(index, B, A) == [6]
    assert path(index, C) == []
    grow(index, (A, 8), (B, 8), (A, 7))
    assert [path(index, A, B, C), path(index, A, B, A)] == [[1, 2, 3], [1, 2, 7]]


def test_what_follows_a_forgotten_block_is_not_found(index):
    a, b, _ = grow(index, (A, 1), (B, 2), (C, 3))
    assert index.remove(1).tokens == A
    assert index.remove(1) is None
    assert path(index, A, B, C) == []
    assert index.put(a, C, 9) == (None, False), "nothing can be hung on it any more"
    grow(index, (A, 4), (B, 5))
    assert path(index, A, B, C) == [4, 5], "the old C was the old B's"
    grow(index, (A, 4), (B, 5), (C, 6))
    assert path(index, A, B, C) == [4, 5, 6]
    assert index.put(b, A, 9) == (None, False), "not on one that was replaced either"
    assert [index.remove(block).tokens for block in (2, 3)] == [B, C]
    assert path(index, A, B, C) == [4, 5, 6]
    assert [index.remove(block).tokens for block in (6, 5, 4)] == [C, B, A]
    assert path(index, A) == []


def test_forgetting_the_end_of_a_path_leaves_the_rest(index):
    grow(index, (A, 1), (B, 2), (C, 3))
    grow(index, (A, 1), (C, 4))
    index.remove(3)
    assert [path(index, A, B, C), path(index, A, C)] == [[1, 2], [1, 4]]
    index.remove(2)
    assert [path(index, A, B, C), path(index, A, C)] == [[1], [1, 4]]
    grow(index, (A, 1), (B, 6), (C, 7))
    assert path(index, A, B, C) == [1, 6, 7]


def test_prefix_is_what_find_finds_block_after_block(index):
    """Long paths that part anywhere, so a tree's edges are split anywhere; ids of any size that is one."""
    rng, blocks, size = random.Random(0), itertools.count(1), 3
    prompts = [[rng.randrange(2**40) for _ in range(40 * size)]]
    for _ in range(60):
        old, cut = rng.choice(prompts), rng.randrange(40 * size)
        prompts.append(old[:cut] + [rng.randrange(2) for _ in range(rng.randrange(10 * size))])
    lengths = set()
    for ids in prompts:
        pieces = [tuple(ids[first : first + size]) for first in range(0, len(ids) - size + 1, size)]
        known, root = path(index, *pieces), index.root(())
        for most in {0, 1, len(known) // 2, len(pieces)}:
            assert [place.block for place in index.prefix(root, ids, size, most)] == known[:most]
        lengths.add(len(known))
        grow(index, *((tokens, next(blocks)) for tokens in pieces))
        assert len(index.prefix(index.root(()), ids, size, len(pieces))) == len(pieces)
        if len(known) % 4 == 3:
            index.remove(known[-1])
            assert len(index.prefix(index.root(()), ids, size, len(pieces))) == len(known) - 1
    assert len(lengths) > 10


SALT, OTHER, ADAPTER = (("salt", "x"),), (("salt", "y"),), (("adapter", "x"),)


def test_extras_are_separate_worlds(index):
    """A salt, another one, an adapter of the same name, and neither. vllm-project/vllm#44701."""
    worlds = [(), SALT, ADAPTER, OTHER]
    for number, extra in enumerate(worlds):
        assert path(index, A, B, extra=extra) == []
        grow(index, (A, 10 * number + 1), (B, 10 * number + 2), extra=extra)
    for number, extra in enumerate(worlds):
        assert path(index, A, B, C, extra=extra) == [10 * number + 1, 10 * number + 2]


def test_worlds_that_nobody_uses_are_forgotten(index):
    """A salt per request must not fill the memory."""
    for number in range(50):
        extra = (("salt", str(number)),)
        grow(index, (A, 1), (B, 2), extra=extra)
        assert path(index, A, B, extra=extra) == [1, 2]
        for block in (2, 1):
            index.remove(block)
    gc.collect()
    assert len(index.roots) == 0


def test_root_hashes_do_not_pose_as_each_other():
    extras = [
        (),
        SALT,
        OTHER,
        ADAPTER,
        (("salt", "x"), ("adapter", "y")),
        (("adapter", "y"), ("salt", "x")),
        (("salt", "xadaptery"),),
        (("salt", ""), ("x", "")),
        (("salt", ""), ("", "x")),
        (("salt", "\ud83d"),),
        (("salt", "\ud83e"),),
    ]
    assert len({root_hash(extra) for extra in extras}) == len(extras)
    chain = HashChain()
    keys = [grow(chain, (A, 1), (B, 2), (C, 3), extra=extra)[-1].key for extra in (SALT, OTHER, ADAPTER)]
    assert len(set(keys)) == 3, "the salt is in every key of the chain"


# ---- each one's own --------------------------------------------------------------------------------------------------


def test_a_run_of_blocks_is_one_edge():
    tree = RadixTree()
    places = grow(tree, (A, 1), (B, 2), (C, 3))
    assert len({id(place.node) for place in places}) == 1
    grow(tree, (A, 1), (C, 4))
    assert [len(place.node.slots) for place in places] == [1, 2, 2], "cut in two where the paths part"
    assert [place.index for place in places] == [0, 0, 1]
    assert len(places[0].node.children) == 2


def test_blocks_that_two_runs_begin_with():
    run = array("Q", range(100, 140))
    for length in range(0, 41, 4):
        for differs in range(length):
            other = run[:differs] + array("Q", [0]) + run[differs + 1 : length]
            assert blocks_alike(run, other, 4) == blocks_alike(other, run, 4) == differs // 4
        assert blocks_alike(run, run[:length], 4) == blocks_alike(run[:length], run, 4) == length // 4


def test_an_edge_knows_all_tokens_of_its_blocks():
    """After it was split, cut, and has grown again."""
    tree = RadixTree()
    for number, blocks in enumerate(((A, B, C), (A, B, A), (A, C, B, A), (A, B, C, C))):
        grow(tree, *((tokens, 10 * number + place) for place, tokens in enumerate(blocks)))
        if number == 2:
            tree.remove(2)
    nodes = [tree.root(()).node]
    for node in nodes:
        assert list(node.token_ids) == [token for slot in node.slots for token in slot.tokens]
        nodes += node.children.values()
    assert len(nodes) == 6


def test_a_tree_deeper_than_the_stack():
    tree, blocks = RadixTree(), itertools.count(1)
    trunk = [(A, next(blocks)) for _ in range(3000)]
    place = tree.root(())
    for tokens, block in trunk:
        place, _ = tree.put(place, tokens, block)
        tree.put(place, B, next(blocks))  # a twig at every block: an edge of its own for each
    assert len(path(tree, *[A] * 3000)) == 3000
    assert tree.remove(1) is not None
    assert path(tree, A) == []
    gc.collect()


def test_a_key_that_is_taken_ends_publishing():
    chain = HashChain(same_key)
    root = chain.root(())
    first, _ = chain.put(root, A, 1)
    assert chain.put(first, B, 2) == (None, False)
    assert chain.put(root, B, 3) == (None, False)
    assert path(chain, A, B) == [1]
    chain.remove(1)
    assert chain.put(first, B, 2) == (None, False), "its parent is lost"
    assert chain.put(root, B, 3)[0].block == 3
    assert path(chain, B) == [3]
