"""The engine over its life: waves, and pages that come back whatever happens."""

import pytest
import torch

from stages.s01_forward.llm import LLM as Uncached
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.llm import LLM
from tests.fixtures import each_family

PROMPTS = [[7], [10, 11, 12, 13, 14, 15], list(range(100, 119)), [3, 4], [400, 401, 402]]
PARAMS = [SamplingParams(max_tokens=3 + i, temperature=0.8 * (i % 2), seed=i, n=1 + i % 3) for i in range(5)]


@pytest.fixture
def llm(tiny) -> LLM:
    return LLM(tiny("qwen2"), device="cpu", max_num_seqs=3, max_model_len=64)


def all_free(llm: LLM) -> bool:
    return sorted(llm.cache.free_pages) == list(range(llm.cache.num_pages))


def ids(llm: LLM | Uncached) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in llm.generate(PROMPTS, PARAMS)]


@each_family
def test_any_number_of_rows_gives_the_ids_of_stage_01(family, tiny):
    expected = ids(Uncached(tiny(family), device="cpu"))
    for rows in (1, 2, 3, 8):
        llm = LLM(tiny(family), device="cpu", max_num_seqs=rows)
        assert ids(llm) == expected, f"{rows} rows"
        assert all_free(llm)


def test_pages_come_back_as_soon_as_an_answer_ends(llm):
    """Answers of 2, 4 and 6 tokens."""
    held = []
    for event in llm.stream([[5]] * 3, [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 4, 6)]):
        if event.request == 2:  # the last row of each step
            held.append(llm.cache.num_pages - len(llm.cache.free_pages))
    assert held == [3, 2, 2, 1, 1, 1]
    assert all_free(llm)


@pytest.mark.parametrize("call", [1, 2, 4])
def test_pages_come_back_when_the_model_fails(llm, call):
    """In the prefill, in the first decode and later; afterwards the engine works."""
    calls = iter(range(1, 100))

    def fail(*_: object) -> None:
        if next(calls) == call:
            raise MemoryError("a rigged failure")

    hook = llm.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError, match="rigged"):
        llm.generate([[5, 6, 7]] * 2, SamplingParams(max_tokens=6, ignore_eos=True))
    hook.remove()
    assert all_free(llm)
    assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=6, ignore_eos=True))[0].token_ids) == 6


@pytest.mark.parametrize("events", [0, 1, 3, 4])
def test_pages_come_back_when_a_stream_is_left(llm, events):
    stream = llm.stream([[5, 6], [7], [8], [9]], SamplingParams(max_tokens=6, ignore_eos=True))
    for _ in range(events):
        next(stream)
    assert all_free(llm) == (events == 0)
    stream.close()
    assert all_free(llm)


def test_pages_come_back_after_a_broken_row(llm):
    """NaN in one row's embedding: that row ends with an error, and its page is free again."""
    with torch.no_grad():
        llm.model.embed_tokens.weight[499] = float("nan")
    broken, healthy = llm.generate([[499, 5], [6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert (broken.finish_reason, healthy.finish_reason) == ("error", "length")
    assert all_free(llm)
    again = llm.generate([[8, 9]] * 3, SamplingParams(max_tokens=3, ignore_eos=True))
    assert [output.finish_reason for output in again] == ["length"] * 3, "the NaN that it left behind reaches nobody"


def test_a_bad_request_takes_nothing(llm):
    for prompts in ([[5], []], [[5], [512]], [[5], [9] * 65]):
        with pytest.raises(ValueError, match="prompt 1"):
            llm.generate(prompts)
        assert all_free(llm)
    assert llm.generate([[5]], SamplingParams(max_tokens=2))[0].token_ids


def test_streams_in_turns_share_the_pages(llm):
    """Two of three pages are taken: the second stream gets along with one, and a third is told that none is left."""
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    alone = [output.token_ids for output in llm.generate([[5], [6], [7], [8]], params)]
    first, second = llm.stream([[5], [6]], params), llm.stream([[7], [8]], params)
    events = [next(first), next(second)]
    third = llm.stream([[9]], params)
    with pytest.raises(RuntimeError, match="no page is free: all 3"):
        next(third)
    events += [*second, *first]
    assert sorted(e.token_id for e in events) == sorted(token for answer in alone for token in answer)
    assert all_free(llm)


def test_the_whole_length_of_the_model_can_be_used(llm):
    """The last token is never written: prompt and answer fill max_model_len exactly."""
    for length in (1, 62, 63):
        (output,) = llm.generate([[9] * length], SamplingParams(max_tokens=None, ignore_eos=True))
        assert (len(output.token_ids), output.finish_reason) == (64 - length, "length")
    assert all_free(llm)


def test_length_is_lowered_to_the_default_budget(tiny, monkeypatch):
    """Nobody named a budget or a length: what fits is served, and a warning says so. A named length is not lowered."""
    monkeypatch.setattr("stages.s02_kv_cache.llm.DEFAULT_KV_MB", 0.1)
    with pytest.warns(UserWarning, match="max_model_len is 136 tokens, not 256"):
        llm = LLM(tiny("qwen2"), device="cpu")
    assert llm.max_model_len == 136
    (output,) = llm.generate([[5] * 130], SamplingParams(max_tokens=None, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (6, "length")
    with pytest.raises(ValueError, match="136"):
        llm.generate([[5] * 136])
    with pytest.raises(ValueError, match="holds 136 tokens.*grow to 200"):
        LLM(tiny("qwen2"), device="cpu", max_model_len=200)
