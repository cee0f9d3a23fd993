"""The Hopper kernel on a CPU: its own source in a Gluon of ours, now early, now late, right and broken on purpose."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.s03_paged_kv.tile_sizes import TileSizes
from stages.s07_cuda_graph import chunk_cases, fake_gluon, fake_warps
from stages.s07_cuda_graph.beforehand import beforehand
from stages.s07_cuda_graph.chunk_cases import ALLOWED, ChunkCase
from stages.s07_cuda_graph.chunk_tiles import HOPPER_TILES
from stages.s07_cuda_graph.fake_warps import Fault

pytest_plugins = ["stages.s07_cuda_graph.beforehand"]
SOURCES = {
    f"stages.s07_cuda_graph.{name}": (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    for name in ("hopper_load_kernel", "hopper_chunk_kernel", "hopper_chunk")
}
IMPORTS = {  # of modules that need Triton
    "stages.s03_paged_kv.kernel": SimpleNamespace(LOG2_E=1.4426950408889634),
    "stages.s03_paged_kv.store_kv": SimpleNamespace(launch_options=lambda device: {"PDL": False}),
}
SMALL_TILES = TileSizes(32, 32, 4, 3, True)  # many tiles from few tokens
# Older keys end with a block, a tile, within a block; 5, 1 and 20 queries in a tile, for one warpgroup and for both.
RAGGED = ChunkCase((5, 1, 33, 20), (45, 9, 97, 31), 1, 3, 128, torch.float16, SMALL_TILES, block_size=8)


def run(case: ChunkCase, seed: int, sources: Mapping[str, str] = SOURCES, programs: int = 3) -> float:
    """The largest error."""
    module = fake_gluon.execute(sources, seed, IMPORTS)
    module.num_programs = lambda device, group: programs
    with patch.object(chunk_cases, "chunk_attention", return_value=module.chunk_attention):
        return case.run()


def ragged(group: int, dim: int) -> ChunkCase:
    """Two KV heads where they have one query head each."""
    return replace(RAGGED, group=group, head_dim=dim, num_kv_heads=2 if group == 1 else 1)


@beforehand(lambda group, dim: (run, ragged(group, dim), group + dim))
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 7])
def test_equals_exact_attention(answer, group, dim):
    """Whatever comes first."""
    assert answer <= ALLOWED[RAGGED.dtype]


@given(
    rows=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 70)), min_size=1, max_size=3),
    group=st.sampled_from([1, 2, 3]),
    programs=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=10)
def test_any_rows(rows, group, programs, seed):
    """Rows of so many queries behind so many older keys."""
    queries, lengths = tuple(count for count, _ in rows), tuple(sum(row) for row in rows)
    case = replace(RAGGED, q_lens=queries, kv_lens=lengths, group=group, head_dim=64)
    assert run(case, seed, programs=programs) <= ALLOWED[case.dtype]


@pytest.mark.parametrize("block_size", [8, 16, 128])
def test_real_tiles(block_size):
    shape = dict(num_kv_heads=1, group=2, head_dim=128, dtype=torch.bfloat16, sizes=HOPPER_TILES)
    assert run(ChunkCase((130, 65), (147, 265), block_size=block_size, **shape), 0) <= ALLOWED[torch.bfloat16]


@pytest.mark.parametrize("programs", [1, 4])
def test_a_map_without_empty_tiles(programs):
    """Nothing then says that the last item was the last but its number."""
    with patch.object(chunk_cases, "EMPTY", 0):
        assert run(RAGGED, 0, programs=programs) <= ALLOWED[RAGGED.dtype]


READ = r"a copy into tiles\[{}\]\[.\] while a product of _multiply . still reads it"  # tiles of queries, keys, values
COPIED = r"_multiply . asks for tiles\[{}\]\[.\], to which a copy is still on its way"
MUTATIONS = {  # what is broken: the source, the source instead, and what is to be seen of it
    "a tile is never given back": (
        "score = warpgroup_mma_wait(1, deps=[score])\n        mbarrier.arrive(empty_k.index(stage), count=1)",
        "score = warpgroup_mma_wait(1, deps=[score])",
        "nobody can go on: .*load 2 waits for parity . of empty",
    ),
    "keys are given back before their product": (
        "    score = warpgroup_mma_wait(0, deps=[score])\n    mbarrier.arrive(empty_k.index(stage), count=1)\n",
        "    mbarrier.arrive(empty_k.index(stage), count=1)\n    score = warpgroup_mma_wait(0, deps=[score])\n",
        READ.format(1),
    ),
    "values are given back before the last product": (
        "    acc = warpgroup_mma_wait(0, deps=[acc])\n    mbarrier.arrive(empty_v.index(stage), count=1)\n",
        "    mbarrier.arrive(empty_v.index(stage), count=1)\n    acc = warpgroup_mma_wait(0, deps=[acc])\n",
        READ.format(2),
    ),
    "one warpgroup gives back for both": (
        "_barriers(STAGES, 2), _barriers(STAGES, 2)",
        "_barriers(STAGES, 2), _barriers(STAGES, 1)",
        READ.format(2),
    ),
    "queries are not given back by who has none": (
        "            else:\n                mbarrier.arrive(empty_q, count=1)\n",
        "",
        "nobody can go on: .*load 2 waits for parity . of empty",
    ),
    "tiles of the other warpgroup are not given back": (
        "range(number + mine, number + n)",
        "range(number + mine, number + n - 1)",
        "nobody can go on",
    ),
    "the wrong phase is waited for": ("full_v.index(last), last_phase", "full_v.index(last), last_phase ^ 1", "nobody"),
    "a new barrier counts as full": (" (number // STAGES & 1) ^ 1", " number // STAGES & 1", "nobody can go on"),
    "one stage fewer in one place": ("stage = number % STAGES", "stage = number % (STAGES - 1)", "nobody can go on"),
    "an empty tile is not waited for": (
        "    mbarrier.wait(empty.index(stage), (number // STAGES & 1) ^ 1)",
        "",
        "more has come than was expected|a copy into tiles",
    ),
    "empty queries are not waited for": (
        "            mbarrier.wait(empty_q, (items & 1) ^ 1)\n",
        "",
        READ.format(0),
    ),
    "keys are not waited for": (
        "        mbarrier.wait(full_k.index(stage), number // STAGES & 1)\n        score",
        "        score",
        COPIED.format(1),
    ),
    "values are not waited for": (
        "    mbarrier.wait(full_v.index(stage), number // STAGES & 1)\n    _clear",
        "    _clear",
        COPIED.format(2),
    ),
    "too few bytes are expected": ("BLOCK_N * HEAD_DIM * 2)", "BLOCK_N * HEAD_DIM)", "more has come than was expected"),
    "too many bytes are expected": (
        "2 * BLOCK_M * HEAD_DIM * 2)",
        "3 * BLOCK_M * HEAD_DIM * 2)",
        "nobody can go on: .*lacks 0 of 1 arrivals and 4096 bytes",
    ),
    "scores are used too early": ("_wait(1, deps=[score])", "_wait(2, deps=[score])", "used before it was waited for"),
    "the sum is used too early": ("_wait(0, deps=[acc, ", "_wait(1, deps=[acc, ", "used before it was waited for"),
    "stores are not fenced": ("        fence_async_shared()\n", "", "put no fence before the product"),
    "barriers are not fenced": ("    fence_async_shared()\n    work", "    work", "no fence"),
    "older values are not cleared": (
        "        _clear_values(v_tiles, last, i - 1, old_tiles, old, queries)\n",
        "",
        "wrong by nan",
    ),
    "the row's last values are not cleared": (
        "    _clear_values(v_tiles, stage, n - 1, old_tiles, old, queries)\n",
        "",
        "wrong by nan",
    ),
    "one key too many": ("key[None, :] < limit", "key[None, :] <= limit", "wrong by"),
    "one query too many": ("mask=(query < queries)", "mask=(query <= queries)", "a row was written"),
    "sums keep their old scale": (
        "acc = acc * gl.convert_layout(rescale",
        "acc * gl.convert_layout(rescale",
        "wrong by",
    ),
    "one page too many": ("gl.maximum(old - 1, 0) // BLOCK_SIZE", "old // BLOCK_SIZE", "a copy from .77777777, 0, 0."),
    "pages in the order of columns": (
        "(stage * PANELS + panel) * PAGES + page",
        "(stage * PAGES + page) * PANELS + panel",
        "wrong by",
    ),
    "always the same item": ("turn += 1", "turn += 0", "no end after"),
}


def outcome(broken: Mapping[str, str], seed: int) -> str:
    try:
        with patch.object(fake_warps, "MOST_TURNS", 3000):  # without a mistake it takes a quarter of it
            error = run(RAGGED, seed, broken)
    except (Fault, ValueError) as reason:
        return str(reason)
    return "right" if error <= ALLOWED[RAGGED.dtype] else f"wrong by {error}"


def outcomes_of(name: str) -> list[str]:
    """With one seed after the other, until the mistake is seen or 30 have been tried."""
    source, instead, seen = MUTATIONS[name]
    broken = {module: text.replace(source, instead) for module, text in SOURCES.items()}
    outcomes = ["nothing is broken"] if broken == SOURCES else []
    while len(outcomes) < 30 and broken != SOURCES and not (outcomes and re.search(seen, outcomes[-1])):
        outcomes.append(outcome(broken, len(outcomes)))
    return outcomes


@beforehand(lambda name: (outcomes_of, name))
@pytest.mark.parametrize("name", MUTATIONS)
def test_mistakes_are_seen(answer, name):
    """Some only by who comes early or late enough, but by one of a few seeds."""
    _, _, seen = MUTATIONS[name]
    assert re.search(seen, answer[-1]), answer


def test_a_seed_does_the_same_every_time():
    source, instead, _ = MUTATIONS["an empty tile is not waited for"]
    broken = {module: text.replace(source, instead) for module, text in SOURCES.items()}
    first, second = ([outcome(broken, seed) for seed in range(2)] for _ in range(2))
    assert first == second
    assert len(set(first)) > 1
