"""What the pictures of the batch rest on: the recorder tells what the engine did, and leaves it as it was."""

import pytest

from reference import draw
from stages.s01_forward.sampling_params import SamplingParams
from stages.s04_continuous_batching.llm import LLM
from stages.s04_continuous_batching.recorder import (
    RecordedBatch,
    RecordedRow,
    computed_and_reused,
    recorded_batches,
    timeline,
    token_gaps,
)

PROMPTS = [[5, 6, 7, 8, 9], [40] * 9, [11, 12]]


def params(*counts):
    return [SamplingParams(max_tokens=n, ignore_eos=True) for n in counts]


@pytest.fixture
def small(tiny):
    """An engine whose pool holds one and a half of the requests: the second is preempted on the way."""
    each = 2 * 3 * 4 * 16 * 4 * 4  # bytes of a block: K and V, layers, KV heads, head_dim, slots, fp32
    return LLM(tiny("llama"), device="cpu", block_size=4, max_model_len=24, kv_cache_mb=9 * each / 2**20)


def test_it_tells_what_each_request_did_in_each_step(tiny):
    llm = LLM(tiny("llama"), device="cpu", max_num_seqs=2, max_model_len=64, kv_cache_mb=4)
    with recorded_batches(llm.engine) as batches:
        llm.generate(PROMPTS, params(3, 2, 2))
    states, computed = timeline(batches)
    assert states == {
        0: ["prefill", "decode", "decode", ""],
        1: ["prefill", "decode", "", ""],
        2: ["waiting", "waiting", "prefill", "decode"],
    }
    assert computed == {0: [5, 1, 1, 0], 1: [9, 1, 0, 0], 2: [0, 0, 2, 1]}
    assert computed_and_reused(batches) == {0: (7, 0), 1: (10, 0), 2: (3, 0)}
    assert [batch.tokens for batch in batches] == [(0, 1), (0, 1), (0, 2), (2,)]


def test_preemption_is_seen_and_what_is_computed_again_counts_again(small):
    with recorded_batches(small.engine) as batches:
        outputs = small.generate(PROMPTS[:2], params(12, 12))
    assert [len(output.token_ids) for output in outputs] == [12, 12]
    states, _ = timeline(batches)
    assert states[1].count("preempted") == small.engine.scheduler.num_preemptions == 1
    back = states[1].index("preempted") + states[1][states[1].index("preempted") :].index("prefill")
    again = next(row for row in batches[back].rows if row.request == 1)
    assert again.start == 0 and again.computed > 9 and again.samples
    assert sum(row.computed for batch in batches for row in batch.rows) == 5 + 11 + 9 + 11 + again.computed - 1


def test_a_swapped_request_goes_on_decoding_on_what_it_had(tiny, small):
    each = small.engine.scheduler.cache.pool.num_blocks
    assert each == 9
    llm = LLM(tiny("llama"), device="cpu", block_size=4, max_model_len=24, kv_cache_mb=9 * 6144 / 2**20, swap_mb=1)
    with recorded_batches(llm.engine) as batches:
        llm.generate(PROMPTS[:2], params(12, 12))
    states, _ = timeline(batches)
    assert states[1].count("preempted") == 1 and states[1].count("prefill") == 1
    assert computed_and_reused(batches)[1][0] == 9 + 11, "nothing is computed twice"
    assert computed_and_reused(batches)[1][1] > 9


def test_answers_to_one_prompt_reuse_it(tiny):
    llm = LLM(tiny("llama"), device="cpu", max_model_len=64, kv_cache_mb=4)
    with recorded_batches(llm.engine) as batches:
        llm.generate([[7] * 10], SamplingParams(max_tokens=3, n=3, temperature=1.0, seed=0, ignore_eos=True))
    assert computed_and_reused(batches) == {0: (12, 0), 1: (3, 9), 2: (3, 9)}


def test_the_engine_is_left_as_it_was_and_a_failed_step_is_left_out(tiny, monkeypatch):
    llm = LLM(tiny("llama"), device="cpu", max_model_len=64, kv_cache_mb=4)
    before, forward, calls = dict(vars(llm.engine.scheduler)), llm.engine.runner.execute, []

    def fails_once(plan):
        calls.append(plan)
        if len(calls) == 1:
            raise MemoryError("no room")
        return forward(plan)

    monkeypatch.setattr(llm.engine.runner, "execute", fails_once)
    with recorded_batches(llm.engine) as batches:
        with pytest.raises(MemoryError):
            llm.generate(PROMPTS[0], params(2))
        assert batches == []
        llm.generate(PROMPTS[1], params(2))
    assert [[row.kind for row in batch.rows] for batch in batches] == [["prefill"], ["decode"]]
    assert vars(llm.engine.scheduler).keys() == before.keys()


def test_gaps_lie_between_a_requests_own_tokens():
    def batch(seconds, *tokens):
        return RecordedBatch(seconds, (RecordedRow(0, "decode", 0, 1, 0, True),), (), (), tokens)

    batches = [batch(1.0, 0), batch(1.5, 0, 1), batch(2.5, 1), batch(4.0, 0, 0)]
    assert token_gaps(batches, 0) == [(1.5, 0.5), (4.0, 2.5), (4.0, 0.0)]
    assert token_gaps(batches, 1) == [(2.5, 1.0)]


def test_the_pictures_take_what_the_recorder_gives(small):
    with recorded_batches(small.engine) as batches:
        small.generate(PROMPTS[:2], params(12, 12))
    svg = draw.batch_timeline(*timeline(batches))._repr_svg_()
    assert all(word in svg for word in ("prefill", "decode", "preempted", "waiting"))
    assert "reused" in draw.computed_and_reused(computed_and_reused(batches))._repr_svg_()
    gaps = {"A": [gap for _, gap in token_gaps(batches, 0)]}
    assert "p99" in draw.latency_percentiles(gaps)._repr_svg_()
