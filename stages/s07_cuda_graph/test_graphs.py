"""Which graph serves which step, and steps through padded sizes, with NaN wherever a GPU leaves something undefined."""

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from stages.s01_forward.sampling_params import SamplingParams
from stages.s04_continuous_batching.plan import Plan
from stages.s06_prefix_cache.llm import LLM as Eager
from stages.s07_cuda_graph import padded_plan
from stages.s07_cuda_graph.chunk_tiles import TRITON_TILES
from stages.s07_cuda_graph.fake_graphs import FakeGraphs
from stages.s07_cuda_graph.graphs import GRAPH_BYTES, MIXED_TOKENS, decode_buckets, graphs_bytes, rows_beside
from stages.s07_cuda_graph.llm import LLM
from stages.s07_cuda_graph.step_inputs import StepInputs, StepSize
from tests.fixtures import each_family

CPU = torch.device("cpu")


def engine(folder: Path, **options: Any) -> LLM:
    """On a CPU, with steps padded as graphs pad them."""
    llm = LLM(folder, device="cpu", **{"dtype": "float32", "block_size": 4, "max_num_seqs": 10, **options})
    runner: Any = llm.engine.runner
    runner.graphs = FakeGraphs(
        runner.step, llm.max_num_seqs, llm.max_num_batched_tokens, llm.max_model_len, llm.common_prefix
    )
    return llm


def ids(outputs: Any) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def plan_of(*counts: int) -> Plan:
    rows = [SimpleNamespace(span=SimpleNamespace(start=0, num_new=count)) for count in counts]
    return Plan(tuple(rows))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def graphs(tiny) -> FakeGraphs:
    return engine(tiny("qwen2"), max_num_seqs=20, max_num_batched_tokens=300).engine.runner.graphs


class TestSizes:
    @pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 64, 100, 256, 257, 1000])
    def test_decode_buckets(self, most):
        """From one row to all; from 33 rows on at most a fifth of a bucket is padding, below at most 7 rows."""
        buckets = decode_buckets(most)
        assert buckets == sorted(set(buckets))
        assert (buckets[0], buckets[-1]) == (1, most)
        for rows in range(1, most + 1):
            bucket = min(size for size in buckets if size >= rows)
            assert bucket - rows <= (bucket / 5 if rows > 32 else 7)

    @pytest.mark.parametrize(
        ("rows", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (17, 20), (20, 20)]
    )
    def test_a_decode_step_takes_the_smallest_bucket_that_holds_it(self, graphs, rows, bucket):
        """Bucket - 1, bucket and bucket + 1; a pool's largest batch has a bucket of its own."""
        assert graphs.size_of(plan_of(*[1] * rows), queries=1) == StepSize(bucket, bucket, queries=1)

    def test_a_mixed_step_has_a_row_for_its_padding(self, graphs):
        for counts in ([2], [31, 1], [32], [1] * 3 + [30], [1] * 19 + [45], [256], [100, 155]):
            size = graphs.size_of(plan_of(*counts), queries=0)
            assert size.rows > len(counts)
            assert size.tokens == min(each for each in MIXED_TOKENS if each >= sum(counts))
            assert not size.decode

    def test_a_step_is_padded_only_while_that_is_faster_than_launching_it_one_by_one(self, tiny):
        """A model whose token takes as long as a thousandth of a step's launches: up to 1,000 tokens cost nothing."""
        graphs = engine(tiny("qwen2"), max_num_seqs=4, max_num_batched_tokens=2048).engine.runner.graphs
        assert {graphs.size_of(plan_of(1000, n), queries=0).tokens for n in (25, 500, 536)} == {1536}
        graphs.token_seconds = graphs.launch_seconds / 1000
        assert graphs.size_of(plan_of(500, 12), queries=0).tokens == 512
        assert graphs.size_of(plan_of(500, 100), queries=0) is None
        assert graphs.size_of(plan_of(1000, 400), queries=0) is None
        assert dict(graphs.eager) == {
            "1024 tokens would take longer than launching fewer one by one": 1,
            "1536 tokens would take longer than launching fewer one by one": 1,
        }
        assert {graphs.size_of(plan_of(1000, n), queries=0).tokens for n in (920, 1000, 1048)} == {2048}

    def test_the_budget_has_a_graph(self, tiny):
        """Whatever it is: most steps of a long prompt fill it, or nearly."""
        graphs = engine(tiny("qwen2"), max_num_seqs=4, max_num_batched_tokens=48).engine.runner.graphs
        assert graphs.mixed_tokens == [32, 48]

    def test_rows_are_few_kinds_where_tokens_are_many(self):
        assert rows_beside(1024, [4, 16, 64, 257]) == [4, 16, 64, 257]
        assert rows_beside(64, [4, 16, 64, 257]) == [4, 16, 64, 257]  # 64 rows of a token, and one for padding
        assert rows_beside(32, [4, 16, 64, 257]) == [4, 16, 64]
        assert rows_beside(1536, [4, 16, 64, 257]) == [64, 257]
        assert rows_beside(2048, [4, 9]) == [9]

    @pytest.mark.parametrize("error", [RuntimeError, SyntaxError])
    def test_a_step_that_cannot_be_recorded_is_launched(self, error, tiny, monkeypatch):
        """Tried once, told why, and every answer as before: for CUDA's reasons, or a compiler's."""
        prompts, params = [[5, 6, 7], [8] * 20], SamplingParams(max_tokens=6, ignore_eos=True)
        expected = [output.token_ids for output in engine(tiny("qwen2")).generate(prompts, params)]
        llm = engine(tiny("qwen2"))
        graphs, tries = llm.engine.runner.graphs, []

        def capture(size):
            tries.append(size)
            raise error("it needs the host")

        monkeypatch.setattr(graphs, "capture", capture)
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected
        assert len(tries) == 1
        assert graphs.eager["cannot be recorded: it needs the host"] >= 5
        assert graphs.replays == 0

    @pytest.mark.parametrize("others", ["captured before", "captured later"])
    @pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
    def test_a_size_that_memory_is_lacking_for_is_launched_alone(self, error, others, tiny, monkeypatch, caplog):
        """Tried once, told once, counted; all other sizes keep their graphs. What was begun is gone when it is given
        back: so are all graphs of the pool, if it was the first, and the others get a new one.
        """
        prompts, params = [[5, 6, 7], [8] * 20], SamplingParams(max_tokens=6, ignore_eos=True)
        expected = ids(engine(tiny("qwen2")).generate(prompts, params))
        llm = engine(tiny("qwen2"), prefix_cache="off")
        graphs, lacking, tries, begun = llm.engine.runner.graphs, StepSize(2, 2, queries=1), [], []
        pools, given_back = iter(range(1, 9)), []
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(pools)))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(begun[-1]() is None))
        capture = graphs.capture

        def scarce(size):
            tries.append(size)
            if size != lacking:
                return capture(size)
            memory = torch.empty(3)
            begun.append(weakref.ref(memory))
            raise error("CUDA out of memory. Tried to allocate 2 GiB")  # the driver's own is a plain RuntimeError

        monkeypatch.setattr(graphs, "capture", scarce)
        if others == "captured later":
            graphs.prepare(lacking)
        for _ in range(2):
            assert ids(llm.generate(prompts, params)) == expected
        assert graphs.replays == 2 and not graphs.refused
        assert dict(graphs.eager) == {"no memory to record 2 tokens in 2 rows": 10}
        assert len(tries) == len(set(tries)) == 2 and list(graphs.captured) == [s for s in tries if s != lacking]
        assert (graphs.no_memory, given_back) == ({lacking}, [True])
        assert graphs.pool == ((0, 1) if others == "captured later" else (0, 0))
        assert len(caplog.records) == 1 and "out of memory" in caplog.text
        assert llm.generate([prompts[0]], params)[0].token_ids == expected[0][0]  # one row
        assert len(graphs.captured) == 2

    def test_capture_at_the_start_goes_on_without_what_memory_is_lacking_for(self, tiny, monkeypatch):
        llm = engine(tiny("qwen2"), max_num_seqs=6, max_num_batched_tokens=64)
        graphs, capture = llm.engine.runner.graphs, llm.engine.runner.graphs.capture
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))

        def scarce(size):
            if size.tokens > 32:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return capture(size)

        monkeypatch.setattr(graphs, "capture", scarce)
        graphs.capture_all()
        assert {size.tokens for size in graphs.captured} == {1, 2, 4, 6, 32}
        assert {size.tokens for size in graphs.no_memory} == {64}
        assert not graphs.eager, "no step has been made"

    def test_capture_at_the_start_makes_all_that_steps_ask_for(self, tiny):
        """The largest first, whatever comes later finds its graph there."""
        llm = engine(tiny("qwen2"), max_num_seqs=6, max_num_batched_tokens=64)
        graphs = llm.engine.runner.graphs
        graphs.capture_all()
        made = list(graphs.captured)
        assert [size.tokens for size in made] == sorted((size.tokens for size in made), reverse=True)
        prompts = [[i] * (1 + 9 * (i % 3)) for i in range(3, 20)]
        llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
        assert list(graphs.captured) == made
        assert graphs.replays > 10

    @pytest.mark.parametrize(("seqs", "tokens"), [(6, 64), (64, 2048)])
    def test_memory_is_set_aside_for_all_that_is_captured(self, seqs, tokens, tiny):
        """Those of rows that begin alike, too; and hardly for more."""
        graphs = engine(tiny("qwen2"), max_num_seqs=seqs, max_num_batched_tokens=tokens).engine.runner.graphs
        graphs.capture_all()
        heads = graphs.step.shape.num_heads
        assert len(graphs.captured) <= graphs_bytes(seqs, tokens, heads) / GRAPH_BYTES < 1.2 * len(graphs.captured)

    def test_every_step_of_prompts_and_answers_finds_its_graph(self, tiny):
        """Of any number of rows and tokens: one prompt, and answers beside it."""
        graphs = engine(tiny("qwen2"), max_num_seqs=64, max_num_batched_tokens=256).engine.runner.graphs
        graphs.capture_all()
        for tokens in range(2, 257):
            for rows in range(1, min(tokens, 64) + 1):
                size = graphs.size_of(plan_of(tokens - rows + 1, *[1] * (rows - 1)), queries=0)
                assert size is None or size in graphs.captured, (tokens, rows, size)


def test_a_step_of_chunks_alone_has_no_launch_for_rows_of_one_token(tiny):
    """As long as its rows are few: else it takes the usual graph. On a CPU tiles of chunks are only counted."""
    with patch.object(padded_plan, "LEAST_QUERIES", 1):
        llm = engine(tiny("qwen2"), max_num_seqs=20, max_num_batched_tokens=48)
        graphs, shape = llm.engine.runner.graphs, llm.engine.runner.step.shape
        graphs.chunks = TRITON_TILES
        sizes = {counts: graphs.size_of(plan_of(*counts), 0) for counts in ((20, 5), (20, 1), (2, 2, 2, 2), (5,) * 5)}
        assert [size.only_chunks for size in sizes.values()] == [True, False, False, False]
        launches = [padded_plan.padded_plan(StepInputs(size, 16, CPU), shape, 64).launches for size in sizes.values()]
        assert [len(each) for each in launches] == [0, 1, 1, 1]
        prompts = [list(range(3, 3 + n)) for n in (40, 22, 1, 9, 30, 2, 17)]
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        wanted = Eager(tiny("qwen2"), device="cpu", dtype="float32").generate(prompts, params)
        assert ids(llm.generate(prompts, params)) == ids(wanted)
        assert {size.only_chunks for size in graphs.captured if size.chunks} == {True, False}


@each_family
def test_every_bucket_and_its_neighbours(family, tiny):
    """1 to 10 rows, shrinking and growing: ids equal the eager ones, and nothing comes out of the padding."""
    prompts = [[(31 * i + j) % 490 for j in range(1 + 5 * (i % 4))] for i in range(10)]
    params = [SamplingParams(max_tokens=3 + 2 * i, temperature=i % 2, seed=i, ignore_eos=True) for i in range(10)]
    llm, eager = engine(tiny(family)), Eager(tiny(family), device="cpu", dtype="float32", block_size=4)
    expected = ids(eager.generate(prompts, params))
    for order in (slice(None), slice(None, None, -1)):
        assert ids(llm.generate(prompts[order], params[order])) == expected[order]
    rows = {size.rows for size in llm.engine.runner.graphs.captured if size.decode}
    assert rows == {1, 2, 4, 8, 10}
    assert not llm.engine.runner.graphs.eager


def test_prompts_up_to_the_length_of_the_model(tiny):
    """63 of 64 tokens, blocks of 16: the last column of the table is there. GeeeekExplorer/nano-vllm#258."""
    llm = engine(tiny("qwen2"), max_model_len=64, block_size=16)
    eager = Eager(tiny("qwen2"), device="cpu", dtype="float32", max_model_len=64)
    prompts = [[9] * 63, [8] * 62, [7] * 3, [6] * 17, [5] * 60]
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    for _ in range(2):
        assert ids(llm.generate(prompts, params)) == ids(eager.generate(prompts, params))
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)
    assert len(llm.generate([[9] * 64], score)[0].prompt_logprobs) == 64


def test_padding_writes_to_the_dummy_block_alone(tiny):
    """3 rows in a bucket of 4, every block in use. vllm-project/vllm#43810."""
    llm = engine(tiny("qwen2"), max_num_seqs=4, kv_cache_mb=0.25)
    store, pool = llm.engine.runner.step.store, llm.engine.scheduler.cache.pool
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    stream = llm.stream([[5] * 3, [6] * 4, [7] * 5], params)
    for _ in range(7):
        next(stream)
    before = store.data.clone()
    written = {b for entry in llm.engine.scheduler.running for b in entry.sequence.block_table}
    next(stream), next(stream), next(stream)
    written |= {b for entry in llm.engine.scheduler.running for b in entry.sequence.block_table}
    same = (store.data == before) | (store.data.isnan() & before.isnan())
    changed = {block for block in range(pool.num_blocks) if not same[:, :, block].all()}
    assert changed <= written | {0}
    assert store.data[:, :, sorted(written)].isfinite().any()
    assert len(list(stream)) == 17


def test_a_graph_outlives_the_requests_that_it_was_captured_for(tiny):
    """A, B over other blocks, A again, and then with other weights in place. gittensor-ai-lab/sparkinfer#150."""
    folder = tiny("qwen2")
    llm, eager = engine(folder), Eager(folder, device="cpu", dtype="float32", block_size=4)
    a, b, params = [[5] * 9], [[8] * 21, [7]], SamplingParams(max_tokens=8, ignore_eos=True)
    runs = [ids(llm.generate(prompts, params)) for prompts in (a, b, a)]
    assert runs == [ids(eager.generate(prompts, params)) for prompts in (a, b, a)]
    c = [[11] * 10, [12] * 3]  # nothing of it is in any cache
    old, changed = ids(eager.generate(c, params)), Eager(folder, device="cpu", dtype="float32")
    with torch.no_grad():
        for model in (llm.model, changed.model):
            model.layers[0].mlp.down_proj.weight.mul_(-3.0)
    assert ids(llm.generate(c, params)) == ids(changed.generate(c, params)) != old


def test_the_slots_of_a_step_are_sent_when_they_change_and_else_not(tiny):
    """A steady decode sends nothing at all but a block now and then."""
    llm = engine(tiny("qwen2"), block_size=64)
    sent, send = [], llm.engine.runner.mailbox.send
    llm.engine.runner.mailbox.send = lambda parts: (sent.append(sum(map(len, parts))), send(parts))[1]
    llm.generate([[5] * 3, [6] * 4, [7] * 5], SamplingParams(max_tokens=30, ignore_eos=True))
    assert len(sent) == 2, "the prompts; and once who sits where"
    assert llm.engine.runner.graphs.replays == 30
    sent.clear()
    llm.generate([[8] * 4, [6] * 4, [7] * 5], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 20, 30)])
    assert len(sent) == 4, "and when one leaves"
