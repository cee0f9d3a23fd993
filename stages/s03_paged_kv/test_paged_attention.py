"""The torch version of paged attention and of the K/V write, against the textbook formula in float64."""

import dataclasses
from typing import Any

import pytest
import torch

from stages.s03_paged_kv.attention_cases import Case, exact_attention, make_case
from stages.s03_paged_kv.attention_plan import make_plan as make_kernel_plan
from stages.s03_paged_kv.paged_attention import make_plan, paged_attention, store_kv
from stages.s03_paged_kv.tile_sizes import AttentionShape, TileSizes, pick_split, pick_tiles


def attend(case: Case) -> torch.Tensor:
    plan = make_plan(case.q_lens, case.kv_lens, case.block_table, case.shape)
    return paged_attention(*case.inputs, plan, case.scale)


BATCHES = {
    "decode": ([1] * 7, [1, 15, 16, 17, 63, 64, 65]),
    "decode, equal lengths": ([1, 1], [48, 48]),
    "decode with a padding row": ([1, 1, 1], [0, 31, 0]),
    "prefill": ([15, 16, 17, 2, 64], [15, 16, 17, 2, 64]),
    "chunk": ([5, 16, 3, 31], [16, 33, 47, 32]),
    "mixed": ([1, 20, 1, 4, 1], [33, 20, 0, 36, 1]),
}


@pytest.mark.parametrize("layout", ["layers", "blocks"])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("group", "block_size"), [(1, 16), (3, 32), (7, 16)])
def test_equals_the_formula(name: str, group: int, block_size: int, layout: str) -> None:
    """NaN fills block 0 and all slots past each row's end, so this also shows that neither is ever read."""
    case = make_case(*BATCHES[name], group=group, block_size=block_size, layout=layout)
    torch.testing.assert_close(attend(case).double(), exact_attention(case), atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    case = make_case(*BATCHES["mixed"], dtype=dtype)
    exact = exact_attention(case)
    assert float((attend(case).double() - exact).norm() / exact.norm()) < (4e-3 if dtype == torch.bfloat16 else 5e-4)


def test_where_blocks_lie_changes_no_bit() -> None:
    cases = [make_case(*BATCHES["mixed"], shuffle=n) for n in (1, 2)]
    assert not torch.equal(cases[0].block_table, cases[1].block_table)
    assert torch.equal(attend(cases[0]), attend(cases[1]))


@pytest.mark.parametrize("layout", ["layers", "blocks"])
def test_store_writes_the_slots_and_nothing_else(layout: str) -> None:
    case = make_case([1], [60], head_dim=80, layout=layout)
    k, v = torch.randn(2, 4, 2, 80)
    slots = torch.tensor([2 * 16 + 15, 3 * 16, 1 * 16 + 7, 0])  # the last token is padding
    expected_k, expected_v = case.k_cache.clone(), case.v_cache.clone()
    for token, (block, offset) in enumerate([(2, 15), (3, 0), (1, 7), (0, 0)]):
        expected_k[block, offset], expected_v[block, offset] = k[token], v[token]
    store_kv(k, v, case.k_cache, case.v_cache, slots)
    torch.testing.assert_close(case.k_cache, expected_k, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(case.v_cache, expected_v, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("slot", [-1, 96])
def test_store_refuses_slots_outside_the_cache(slot: int) -> None:
    k_cache, v_cache = torch.zeros(2, 6, 16, 2, 64)
    k, v = torch.ones(2, 2, 2, 64)
    with pytest.raises(IndexError, match=f"{slot}.*0 to 95"):
        store_kv(k, v, k_cache, v_cache, torch.tensor([17, slot]))
    assert not k_cache.any()


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "message"),
    [
        ([1, 3], [4, 2], "row 1: 3 queries with 2 keys"),
        ([0], [5], "row 0: 0 queries"),
        ([2], [0], "row 0: 2 queries with 0 keys"),
        ([1], [4, 4], "1 query lengths but 2 sequence lengths"),
    ],
)
def test_impossible_lengths_are_refused(q_lens: list[int], kv_lens: list[int], message: str) -> None:
    table, shape = torch.ones(2, 1, dtype=torch.int32), AttentionShape(4, 2, 64, 16, 4)
    for make in (make_plan, make_kernel_plan):
        with pytest.raises(ValueError, match=message):
            make(q_lens, kv_lens, table, shape)


def test_a_group_larger_than_a_tile_is_refused() -> None:
    shape = AttentionShape(256, 1, 64, 16, 4)
    with pytest.raises(ValueError, match="256 query heads per KV head do not fit a tile of 128 rows"):
        make_kernel_plan([1], [5], torch.ones(1, 1, dtype=torch.int32), shape)


def test_tensors_that_do_not_fit_are_refused() -> None:
    case = make_case([1], [20])
    wrong: dict[str, dict[str, Any]] = {
        r"q \[1, 3, 64\]": {"q": case.q[:, :3]},
        r"q \[1, 4, 64\] torch.float16": {"q": case.q.half()},
        "same strides": {"v_cache": case.v_cache.transpose(1, 2).contiguous().transpose(1, 2)},
        "row counts differ": {"cu_q": case.cu_q[:1]},
        "last strides must be 1": {"q": case.q.transpose(1, 2).contiguous().transpose(1, 2)},
    }
    for message, tensors in wrong.items():
        with pytest.raises(ValueError, match=message):
            attend(dataclasses.replace(case, **tensors))


def test_tiles_cover_every_query_once_and_the_longest_come_first() -> None:
    q_lens, kv_lens, table = [100, 1, 37, 129], [100, 50, 300, 129], torch.ones(4, 20, dtype=torch.int32)
    shape, sizes = AttentionShape(6, 2, 64, 16, 2), TileSizes(64, 32, 4, 2, True)
    plan = make_kernel_plan(q_lens, kv_lens, table, shape, long_sizes=sizes, short_sizes=sizes, tile_multiple=4)
    seen: set[tuple[int, int]] = set()
    keys: list[int] = []
    for launch in plan.launches:
        assert launch.tile_map is not None
        assert launch.num_tiles % 4 == 0
        for row, start in launch.tile_map.T.tolist():
            if row >= 0:
                stop = min(start + launch.queries_per_tile, q_lens[row])
                keys.append(kv_lens[row] - q_lens[row] + stop)
                tile = {(row, query) for query in range(start, stop)}
                assert not tile & seen
                seen |= tile
        assert keys == sorted(keys, reverse=True)
        keys = []
    assert len(seen) == sum(q_lens)


def test_decode_needs_no_tile_map_and_splits_depend_on_bounds_alone() -> None:
    shape, table = AttentionShape(16, 8, 128, 16, 2), torch.ones(4, 1024, dtype=torch.int32)
    short = make_kernel_plan([1] * 4, [1, 16384, 5, 0], table, shape).launches
    long = make_kernel_plan([1] * 4, [16384] * 4, table, shape).launches
    assert short == long
    assert long[0].tile_map is None
    assert long[0].num_splits == 8
    assert long[0].keys_per_split * long[0].num_splits >= 16384
    assert make_kernel_plan([1] * 256, [1024] * 256, table, shape).launches[0].num_splits == 1


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_tiles_hold_what_they_must(group: int, head_dim: int, element_size: int) -> None:
    shape = AttentionShape(group * 2, 2, head_dim, 16, element_size)
    for query_rows in (group, 5 * group, 64, 65, 4096):
        sizes = pick_tiles(shape, 3, query_rows, 2000)
        assert sizes.block_m >= group
        if query_rows <= 64:
            assert sizes.block_m >= query_rows  # a short row is one tile
    assert pick_split(shape, 8, 1 << 20) * 64 >= 1 << 20
