"""Rows that begin alike: which blocks they share, who reads them once, and that nothing else changes."""

import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.s01_forward.sampling_params import SamplingParams
from stages.s03_paged_kv.tile_sizes import AttentionShape
from stages.s04_continuous_batching.plan import Plan
from stages.s06_prefix_cache.llm import LLM as Eager
from stages.s07_cuda_graph import common_prefix
from stages.s07_cuda_graph.beforehand import beforehand
from stages.s07_cuda_graph.chunk_cases import ALLOWED
from stages.s07_cuda_graph.common_cases import CommonCase, large_cases, small_cases
from stages.s07_cuda_graph.common_prefix import LEAST_KEYS, LEAST_ROWS, MANY_ROWS, common_blocks, common_lead
from stages.s07_cuda_graph.fuzz_state import StateFuzz
from stages.s07_cuda_graph.graphs import decode_size, decode_sizes
from stages.s07_cuda_graph.padded_plan import COMMON_TILES, CommonPlan, padded_plan
from stages.s07_cuda_graph.step_inputs import StepInputs
from stages.s07_cuda_graph.test_graphs import engine, ids
from tests.fixtures import each_family

pytest_plugins = ["stages.s07_cuda_graph.beforehand"]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no package for this platform"
)


ANYTHING_COMMON = patch.multiple(common_prefix, LEAST_ROWS=2, LEAST_KEYS=1, MANY_ROWS=1)


@pytest.fixture
def anything_common() -> Iterator[None]:
    """Two rows are enough, and one key."""
    with ANYTHING_COMMON:
        yield


# ---- the kernel ------------------------------------------------------------------------------------------------------


@needs_triton
@beforehand(lambda case: (case.run,))
@pytest.mark.parametrize("case", list(small_cases()), ids=str)
def test_kernel_equals_exact_attention(answer: float, case: CommonCase):
    assert answer <= ALLOWED[case.dtype]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("case", list(large_cases()), ids=str)
def test_on_the_gpu(case: CommonCase):
    assert case.run("cuda") <= ALLOWED[case.dtype]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "tiles", "splits", "own"),
    [
        (16, 8, 64, 2, 8, 1),  # 128 queries of a group
        (16, 8, 256, 8, 4, 1),
        (12, 2, 64, 6, 8, 2),
        (28, 4, 64, 7, 8, 1),
        (28, 4, 24, 3, 8, 3),
    ],
)
def test_programs_enough_for_a_gpu_of_132_processors(heads, kv_heads, rows, tiles, splits, own):
    """Of the common keys and of the rows' own; one size has both, and no look at lengths."""
    shape, size = AttentionShape(heads, kv_heads, 128, 16, 2), replace(decode_size(rows, queries=1), common=True)
    plan = padded_plan(StepInputs(size, 256, torch.device("cpu")), shape, 4096)
    assert isinstance(plan, CommonPlan)
    assert (plan.common.sizes, plan.common.num_tiles, plan.common.num_splits) == (COMMON_TILES, tiles, splits)
    (launch,) = plan.launches
    assert (launch.num_tiles, launch.num_splits) == (rows, own)
    assert launch.tile_map is not None, "padding rows have no tile"


# ---- which blocks ----------------------------------------------------------------------------------------------------

TABLES = st.lists(st.lists(st.sampled_from((1, 1, 1, 2)), min_size=1, max_size=6), min_size=1, max_size=5)


@given(TABLES, st.integers(1, 3), st.data())
def test_the_longest_common_lead(tables, block_size, data):
    """Against brute force: as long as all tables agree and every row has a token behind it."""
    lengths = [len(table) * block_size - data.draw(st.integers(0, block_size)) or 1 for table in tables]
    fits = [
        blocks
        for blocks in range(7)
        if all(table[:blocks] == tables[0][:blocks] for table in tables)
        and all(blocks * block_size < length for length in lengths)
    ]
    assert common_lead(tables, lengths, block_size) == max(fits)


def plan_of(rows: int, common: int, block_size: int = 16) -> Plan:
    """Each row has two blocks of its own behind the common ones."""
    table, length = list(range(1, common + 1)), (common + 2) * block_size
    spans = [
        SimpleNamespace(block_table=[*table, 1000 + 2 * n, 1001 + 2 * n], end=length, num_new=1) for n in range(rows)
    ]
    return Plan([SimpleNamespace(span=span) for span in spans])  # type: ignore[misc]


def test_only_where_it_pays():
    enough = LEAST_KEYS // 16
    for rows, blocks in ((MANY_ROWS, enough), (5 * MANY_ROWS, enough), (MANY_ROWS // 2, 2 * enough)):
        assert common_blocks(plan_of(rows, blocks), 16) == blocks
        assert common_blocks(plan_of(rows, blocks - 1), 16) == 0
    assert common_blocks(plan_of(LEAST_ROWS, 100), 16) == 100
    assert common_blocks(plan_of(LEAST_ROWS - 1, 100), 16) == 0


def test_off_there_are_no_graphs_for_it(tiny):
    llm = engine(tiny("qwen2"), max_num_seqs=40, common_prefix=False)
    graphs = llm.engine.runner.graphs
    assert not any(size.common for size in decode_sizes(graphs.decode_rows, graphs.common))
    assert not graphs.size_of(plan_of(20, 100), queries=1, common=100).common


def test_sizes_of_their_own(tiny):
    """Graphs of rows that begin alike are others than those of the same number of rows; either can be left out."""
    graphs = engine(tiny("qwen2"), max_num_seqs=40).engine.runner.graphs
    usual = graphs.size_of(plan_of(20, 50), queries=1)
    assert graphs.size_of(plan_of(20, 50), queries=1, common=50) == replace(usual, common=True) != usual
    assert [size.rows for size in decode_sizes(graphs.decode_rows) if size.common] == [24, 32, 40]
    graphs.common = False
    assert graphs.size_of(plan_of(20, 50), queries=1, common=50) == usual


# ---- the engine ------------------------------------------------------------------------------------------------------


def counted(llm: Any) -> dict[int, int]:
    """How many steps of an engine were told of so many common blocks."""
    counts: dict[int, int] = {}
    runner = llm.engine.runner
    replay = runner.graphs.replay

    def note(captured: Any) -> Any:
        common = int(captured.inputs.common) if captured.inputs.size.common else 0
        counts[common] = counts.get(common, 0) + 1
        return replay(captured)

    runner.graphs.replay = note
    return counts


@each_family
def test_the_same_answers(family, tiny, anything_common):
    """A prompt of 21 tokens, 5 blocks, behind which nine go on; rows come and leave at different times."""
    system = [(7 * i) % 450 + 20 for i in range(21)]
    prompts = [[*system, *range(30 + n, 30 + 2 * n)] for n in range(9)]
    params = [SamplingParams(max_tokens=4 + 3 * n, temperature=n % 2, seed=n, ignore_eos=True) for n in range(9)]
    llm = engine(tiny(family), max_num_seqs=6)
    expected = ids(Eager(tiny(family), device="cpu", dtype="float32", block_size=4).generate(prompts, params))
    llm.generate([system], SamplingParams(max_tokens=1))
    counts = counted(llm)
    for order in (slice(None), slice(None, None, -1)):
        assert ids(llm.generate(prompts[order], params[order])) == expected[order]
    assert counts[5] > 20


def test_siblings_share_their_prompt_but_for_its_last_block(tiny, anything_common):
    """Four answers to one prompt of 10 tokens: the third block is copied before anybody writes to it."""
    llm, params = engine(tiny("qwen3")), SamplingParams(max_tokens=9, n=4, temperature=1.0, seed=3, ignore_eos=True)
    expected = Eager(tiny("qwen3"), device="cpu", dtype="float32", block_size=4).generate([[9] * 10], params)
    counts = counted(llm)
    assert ids(llm.generate([[9] * 10], params)) == ids(expected)
    assert counts == {0: 1, 2: 9}, "the prompt but for a token, and then all of them"


def test_the_same_slots_with_fewer_blocks_in_common(tiny, anything_common):
    """Who sits where is as before, and what they share is not: it is sent again."""
    llm, params = engine(tiny("qwen2"), max_num_seqs=2), SamplingParams(max_tokens=5, ignore_eos=True)
    long, short = [5] * 17, [5] * 9 + [6] * 8
    eager = Eager(tiny("qwen2"), device="cpu", dtype="float32", block_size=4)
    llm.generate([long], params), llm.generate([short], params)
    counts, slots = counted(llm), llm.engine.runner.slots
    for prompts in ([long, long], [long, short], [long, long]):
        slots.follow(Plan(())), slots.free.sort(reverse=True)  # who comes next sits where the last have sat
        assert ids(llm.generate(prompts, params)) == ids(eager.generate(prompts, params))
    assert {4, 2} <= set(counts)


def test_without_memory_for_a_graph_of_their_own(tiny, anything_common, monkeypatch):
    """The usual graph for as many rows serves them."""
    llm, params = engine(tiny("qwen2"), max_num_seqs=2), SamplingParams(max_tokens=5, ignore_eos=True)
    graphs, prompts = llm.engine.runner.graphs, [[5] * 17, [5] * 17]
    capture = graphs.capture

    def scarce(size):
        if size.common:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return capture(size)

    monkeypatch.setattr(graphs, "capture", scarce)
    llm.generate(prompts[:1], params)
    expected = Eager(tiny("qwen2"), device="cpu", dtype="float32", block_size=4).generate(prompts, params)
    assert ids(llm.generate(prompts, params)) == ids(expected)
    usual = decode_size(2, queries=1)
    assert graphs.no_memory == {replace(usual, common=True)} and usual in graphs.captured and not graphs.eager


def random_loads() -> list[Counter[str]]:
    with ANYTHING_COMMON:
        return [StateFuzz(seed).run(500) for seed in (11, 14, 15)]


@beforehand(lambda: (random_loads,))
def test_every_step_of_random_loads(answer):
    """Prefixes found, rows that come, end, fork and step back, plans one step ahead, groups: never a block too many."""
    assert sum(done["common prefix"] for done in answer) > 50
