"""Attention planned for a padded size, without a look at lengths, in Triton's interpreter: as planned for the batch."""

import importlib.util
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from stages.s03_paged_kv.attention_cases import exact_attention, make_case
from stages.s03_paged_kv.tile_sizes import AttentionShape
from stages.s07_cuda_graph.beforehand import beforehand
from stages.s07_cuda_graph.padded_plan import mixed_size, padded_plan
from stages.s07_cuda_graph.step_inputs import StepInputs, StepSize, tile_maps

pytest_plugins = ["stages.s07_cuda_graph.beforehand"]
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton has no package for this platform, so its kernels cannot run here", allow_module_level=True)

CPU = torch.device("cpu")
PROCESSORS = 12  # of a GPU small enough to be interpreted: it wants 24 programs for a launch


def plan_of(q_lens: Sequence[int], kv_lens: Sequence[int]) -> Any:
    """As much of a scheduler's plan as tile maps are made of."""
    spans = [SimpleNamespace(start=kv - q, end=kv, num_new=q) for q, kv in zip(q_lens, kv_lens, strict=True)]
    return SimpleNamespace(rows=[SimpleNamespace(span=span) for span in spans])


def attend(size: StepSize, longest: int, arguments: dict[str, Any]) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """What the kernel says of a batch in a padded step, and (least keys per split, splits) of each launch.

    Padding tokens are NaN, padding rows name block 0, which is NaN.
    """
    from stages.s03_paged_kv.kernel import paged_attention

    arguments = {"num_kv_heads": 1, **arguments}
    case, inputs = make_case(**arguments), StepInputs(size, -(-longest // arguments.get("block_size", 16)), CPU)
    rows, tokens = len(case.q_lens), sum(case.q_lens)
    q = torch.full((size.tokens, *case.q.shape[1:]), float("nan"), dtype=case.q.dtype)
    q[:tokens] = case.q
    inputs.block_table.zero_()
    inputs.block_table[:rows, : case.block_table.shape[1]] = case.block_table[:, : inputs.block_table.shape[1]]
    inputs.seq_lens.zero_()
    inputs.seq_lens[:rows] = case.seq_lens
    inputs.cu_q.copy_(torch.arange(size.rows + 1) if size.decode else torch.tensor(size.tokens))
    inputs.cu_q[: rows + 1] = case.cu_q
    for place, tiles in zip(
        (inputs.short_map, inputs.long_map), tile_maps(plan_of(case.q_lens, case.kv_lens), size), strict=True
    ):
        place.copy_(torch.from_numpy(tiles))
    with patch("stages.s07_cuda_graph.padded_plan.PROCESSORS", PROCESSORS):
        plan = padded_plan(inputs, case.shape, longest)
    out = paged_attention(
        q, case.k_cache, case.v_cache, inputs.block_table, inputs.seq_lens, inputs.cu_q, plan, case.scale
    )
    return out[:tokens], [(launch.keys_per_split, launch.num_splits) for launch in plan.launches]


def decode(bucket: int, kv_heads: int, longest: int, kv_lens: list[int], splits: int) -> tuple[Any, ...]:
    """What `attend` is asked for in a decode step."""
    arguments = {"q_lens": [1] * len(kv_lens), "kv_lens": kv_lens, "num_kv_heads": kv_heads}
    return attend, StepSize(bucket, bucket, queries=1), longest, arguments


def mixed(tokens: int, rows: int, longest: int, q_lens: list[int], kv_lens: list[int]) -> tuple[Any, ...]:
    """The same in a step with chunks."""
    size = mixed_size(tokens, rows, AttentionShape(2, 1, 64, 16, 4), longest)
    return attend, size, longest, {"q_lens": q_lens, "kv_lens": kv_lens}


def check(out: torch.Tensor, **arguments: Any) -> None:
    exact = exact_attention(make_case(**{"num_kv_heads": 1, **arguments}))
    torch.testing.assert_close(out.double(), exact, atol=3e-6, rtol=0)


@beforehand(decode)
@pytest.mark.parametrize(
    ("bucket", "kv_heads", "longest", "kv_lens", "splits"),
    [
        (1, 1, 1024, [900], 8),  # of 128 keys
        (4, 2, 100, [1, 16, 100], 1),
        (4, 1, 1024, [400, 1, 129], 6),
        (12, 1, 2048, [390, 5, 257, 256], 2),  # a row longer than both splits together: each takes half
        (14, 1, 256, [3, 200, 130, 256], 2),  # more programs than processors: by the map, the longest first
    ],
)
def test_decode(answer, bucket, kv_heads, longest, kv_lens, splits):
    out, found = answer
    check(out, q_lens=[1] * len(kv_lens), kv_lens=kv_lens, num_kv_heads=kv_heads)
    assert found == [(128, splits)]


@beforehand(mixed)
@pytest.mark.parametrize(
    ("tokens", "rows", "longest", "q_lens", "kv_lens"),
    [
        (32, 4, 256, [1, 20, 1], [256, 20, 3]),  # splits of both kinds
        (32, 3, 256, [32], [200]),  # one chunk fills the step, and the padding rows have no token
        (32, 6, 128, [1, 1, 1, 1], [5, 128, 1, 16]),  # no row has several tokens
        (96, 2, 300, [90], [290]),  # two tiles for one row
        (64, 11, 2048, [1, 30], [390, 300]),  # rows longer than all splits together
    ],
)
def test_mixed(answer, tokens, rows, longest, q_lens, kv_lens):
    out, splits = answer
    check(out, q_lens=q_lens, kv_lens=kv_lens)
    assert (min(keys * count for keys, count in splits) < max(kv_lens)) == (longest == 2048)


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("tokens", [32, 256])
def test_every_cut_of_a_size_has_room(group, tokens):
    """Tiles for any rows that a size may hold, the worst of them included: each row one token over a whole tile."""
    shape, rng = AttentionShape(2 * group, 2, 64, 16, 2), np.random.default_rng(group)
    for rows in (2, 4, 17):
        size = mixed_size(tokens, rows, shape, 4096)
        worst = [size.queries_per_tile + 1] * min(rows - 1, tokens // (size.queries_per_tile + 1))
        cuts = [worst, [tokens], [2] * min(rows - 1, tokens // 2)]
        cuts += [rng.multinomial(tokens - rows, [1 / rows] * rows).tolist() for _ in range(20)]
        for counts in cuts:
            kept = [count for count in counts if count]
            short, long = tile_maps(plan_of(kept, kept), size)
            assert (short[0] >= 0).sum() == kept.count(1)
            assert (long[0] >= 0).sum() == sum(-(-count // size.queries_per_tile) for count in kept if count > 1)
