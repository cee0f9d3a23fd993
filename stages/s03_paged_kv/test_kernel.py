"""The Triton kernels in Triton's interpreter, on the CPU: a pairwise selection of what `reference.gpu_checks` covers.

The interpreter multiplies bf16 wrongly (it takes the bit patterns for numbers), so bf16 is checked on a GPU only.
"""

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from stages.s03_paged_kv.attention_cases import exact_attention, make_case
from stages.s03_paged_kv.interpreted import run_attention, run_store
from stages.s03_paged_kv.paged_attention import store_kv
from stages.s03_paged_kv.tile_sizes import AttentionShape, TileSizes

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton has no package for this platform, so its kernels cannot run here", allow_module_level=True)

B = 16  # the smallest block size
Batch = tuple[list[int], list[int], int | None]  # query lengths, key lengths, keys per split
KINDS: dict[str, Callable[[int], Batch]] = {  # of the fewest queries that make a row "long"
    "decode": lambda _: ([1] * 4, [1, B - 1, 3 * B, 0], None),
    "decode, split": lambda _: ([1] * 3, [5 * B - 1, 4 * B, 3], 32),
    "several queries": lambda _: ([5, 2], [2 * B + 1, 2], None),
    "prefill": lambda long: ([2, long], [2, long], None),
    "chunk, split": lambda long: ([long], [long + 2 * B], 64),
    "mixed": lambda long: ([1, long, 1, 3], [2 * B, 2 * B + long, 0, B + 1], None),
}
GROUPS, HEAD_DIMS, BLOCK_SIZES = (1, 2, 3, 4, 7, 8), (64, 80, 96, 128, 256), (16, 32, 64)
FACTORS = (tuple(KINDS), GROUPS, HEAD_DIMS, BLOCK_SIZES, ("float32", "float16"), ("layers", "blocks"))


def pairwise(*factors: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Few combinations in which every two values of different factors meet at least once (greedily chosen)."""
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in itertools.product(*factors)}
    todo = dict.fromkeys(itertools.chain.from_iterable(sorted(p, key=repr) for p in pairs.values()))
    while todo:
        first = next(iter(todo))
        case = max((c for c in pairs if first in pairs[c]), key=lambda c: len(pairs[c] & todo.keys()))
        for pair in pairs[case]:
            todo.pop(pair, None)
        yield case


@pytest.fixture
def pool(interpreted: ProcessPoolExecutor) -> ProcessPoolExecutor:
    return interpreted


def check(pool: ProcessPoolExecutor, keys_per_split: int | None, arguments: dict[str, Any], **overrides: Any) -> None:
    out = pool.submit(run_attention, arguments, keys_per_split=keys_per_split, **overrides).result()
    exact = exact_attention(make_case(**arguments))
    tolerance = 2e-3 if arguments.get("dtype") == torch.float16 else 3e-6
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("kind", "group", "head_dim", "block_size", "dtype", "layout"), list(pairwise(*FACTORS)))
def test_attention(pool, kind, group, head_dim, block_size, dtype, layout):
    """NaN fills block 0 and every slot past a row's end, blocks are scattered, caches are views of larger tensors."""
    q_lens, kv_lens, keys_per_split = KINDS[kind](64 // group + 1)
    arguments = {
        "q_lens": q_lens, "kv_lens": kv_lens, "num_kv_heads": 2 if group < 3 else 1, "group": group,
        "head_dim": head_dim, "block_size": block_size, "dtype": getattr(torch, dtype), "layout": layout,
    }  # fmt: skip
    check(pool, keys_per_split, arguments)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_lengths_around_multiples_of_the_block_size(pool, block_size):
    lengths = [block_size - 1, block_size, block_size + 1, 3 * block_size - 1, 3 * block_size, 3 * block_size + 1]
    for queries in (1, 3):
        check(pool, None, {"q_lens": [queries] * 6, "kv_lens": lengths, "block_size": block_size, "num_kv_heads": 1})


@pytest.mark.parametrize("split", [None, 32])
@pytest.mark.parametrize("sizes", [TileSizes(16, 16, 4, 2, True), TileSizes(64, 32, 4, 2, False)])
def test_any_tile_sizes_give_the_same_answer(pool, sizes, split):
    """Also with empty tiles at the end of the grid."""
    arguments = {"q_lens": [1, 33, 3], "kv_lens": [77, 50, 40], "num_kv_heads": 1}
    check(pool, split, arguments, short_sizes=sizes, long_sizes=sizes, tile_multiple=4)


def test_where_blocks_lie_changes_no_bit(pool):
    arguments = {"q_lens": [1, 20], "kv_lens": [50, 33], "num_kv_heads": 1}
    outs = [pool.submit(run_attention, {**arguments, "shuffle": n}).result() for n in (1, 2)]
    assert torch.equal(*outs)


def test_a_plan_for_another_batch_is_refused(pool):
    arguments = {"q_lens": [1, 1], "kv_lens": [50, 33]}
    with pytest.raises(ValueError, match="plan for 1 rows .* called with 2"):
        pool.submit(run_attention, arguments, q_lens=[1], seq_lens=[50]).result()
    with pytest.raises(ValueError, match="num_heads=8.* called with .*num_heads=4"):
        pool.submit(run_attention, arguments, shape=AttentionShape(8, 2, 64, 16, 4)).result()


def test_store_equals_the_torch_version(pool):
    """Values written by float32 into a float16 cache; the last two tokens are padding."""
    cache = torch.zeros(2, 5, 16, 3, 80, dtype=torch.float16)
    qkv = torch.randn(6, 9, 80)  # packed: the tokens of k and v are not contiguous
    k, v = qkv[:, 3:6], qkv[:, 6:9]
    slots = torch.tensor([79, 16, 33, 47, 0, 0])
    written = pool.submit(run_store, k, v, cache.clone(), slots).result()
    store_kv(k, v, cache[0], cache[1], slots)
    assert torch.equal(written[:, 1:], cache[:, 1:])
    negative = pool.submit(run_store, k, v, torch.zeros_like(cache), torch.tensor([79, 16, 33, 47, -1, -1])).result()
    assert torch.equal(negative[:, 1:], cache[:, 1:])
    assert not negative[:, 0].any()
