"""The engine over its life: waves that fit the pool, and blocks that come back whatever happens."""

from typing import Any

import pytest
import torch

from stages.s01_forward.llm import LLM as Uncached
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.llm import LLM as Contiguous
from stages.s02_kv_cache.recorder import recorded_steps
from stages.s03_paged_kv.llm import LLM
from tests.fixtures import each_family

PROMPTS = [[7], [10, 11, 12, 13, 14, 15], list(range(100, 119)), [3, 4], [400, 401, 402]]
PARAMS = [SamplingParams(max_tokens=3 + i, temperature=0.8 * (i % 2), seed=i, n=1 + i % 3) for i in range(5)]
BYTES = 768  # per token of the tiny qwen2 in fp32


def megabytes(blocks: int, block_size: int = 4) -> float:
    """The budget of so many blocks and the dummy."""
    return (blocks + 1) * block_size * BYTES / 2**20


@pytest.fixture
def llm(tiny) -> LLM:
    """16 blocks of 4 tokens."""
    return LLM(tiny("qwen2"), device="cpu", block_size=4, kv_cache_mb=megabytes(16), max_model_len=64)


def all_free(llm: LLM) -> bool:
    llm.cache.pool.check()
    return llm.cache.pool.num_free == llm.unpromised == llm.cache.pool.num_blocks - 1


def ids(llm: Any) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in llm.generate(PROMPTS, PARAMS)]


# ---- the same ids, whatever the memory looks like --------------------------------------------------------------------


@each_family
def test_any_block_size_gives_the_ids_of_stages_01_and_02(family, tiny):
    expected = ids(Uncached(tiny(family), device="cpu"))
    assert ids(Contiguous(tiny(family), device="cpu")) == expected
    for block_size in (1, 3, 16, 32):
        llm = LLM(tiny(family), device="cpu", block_size=block_size, kv_cache_mb=2)
        assert ids(llm) == expected, f"block_size {block_size}"
        assert all_free(llm)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_any_number_of_rows_gives_the_same_ids(rows, tiny):
    few = LLM(tiny("qwen2"), device="cpu", max_num_seqs=rows)
    with recorded_steps(few.model) as steps:
        assert ids(few) == ids(LLM(tiny("qwen2"), device="cpu"))
    assert max(len(step.logits) for step in steps) == rows
    assert all_free(few)


# ---- waves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [16, 21])
def test_many_answers_through_a_small_pool(blocks, tiny):
    """Little more than the one sequence that might fill it: prompts of up to 19, up to 3 answers to each."""
    folder = tiny("qwen2")
    small = LLM(folder, device="cpu", block_size=4, kv_cache_mb=megabytes(blocks), max_model_len=64)
    assert small.cache.pool.num_free == blocks
    roomy = LLM(folder, device="cpu", block_size=4, max_model_len=64)
    prompts = [*PROMPTS, *([i] * (1 + 7 * i % 40) for i in range(1, 30))]
    params = [SamplingParams(max_tokens=1 + i % 24, temperature=1.0, seed=i, n=1 + i % 3) for i in range(len(prompts))]
    with recorded_steps(small.model) as steps:
        outputs = small.generate(prompts, params)
    assert all_free(small)
    expected = roomy.generate(prompts, params)
    assert [[a.token_ids for a in o.outputs] for o in outputs] == [[a.token_ids for a in o.outputs] for o in expected]
    assert max(len(step.logits) for step in steps) > 2, "a wave is as large as the pool allows"


def test_a_wave_takes_all_that_fits_and_no_more(llm):
    """An answer of 5 + 4 - 1 tokens may need 2 blocks: 8 of them fill the 16, the ninth waits."""
    with recorded_steps(llm.model) as steps:
        llm.generate([[i] * 5 for i in range(9)], SamplingParams(max_tokens=4, ignore_eos=True))
    assert [len(step.logits) for step in steps] == [8] * 4 + [1] * 4
    with recorded_steps(llm.model) as steps:  # one shared block and 14 of their own; the rest need it again
        llm.generate([[5] * 6], SamplingParams(max_tokens=7, n=9, temperature=1.0, seed=1, ignore_eos=True))
    assert [len(step.input_ids) for step in steps] == [6] + [7] * 6 + [6] + [2] * 6


def test_the_whole_length_of_the_model_can_be_used(llm):
    """The last token is never written: prompt and answer fill max_model_len, and with it the pool."""
    for length in (1, 62, 63):
        (output,) = llm.generate([[9] * length], SamplingParams(max_tokens=None, ignore_eos=True))
        assert (len(output.token_ids), output.finish_reason) == (64 - length, "length")
    assert all_free(llm)


def test_a_request_that_can_never_fit_is_refused_and_others_go_on(tiny):
    """8 blocks of 4: A with a prompt of 40, B with 5 tokens, C with 12 that wants 40 more. vllm-project/vllm#39828."""
    llm = LLM(tiny("qwen2"), device="cpu", block_size=4, kv_cache_mb=megabytes(8), max_model_len=32)
    wanted = SamplingParams(max_tokens=40, ignore_eos=True)
    with pytest.raises(ValueError, match=r"prompt 0 has 40 tokens.*is 32"):
        llm.generate([[9] * 40, [9] * 5, [9] * 12], wanted)
    assert all_free(llm)
    b, c = llm.generate([[9] * 5, [9] * 12], [SamplingParams(max_tokens=3, ignore_eos=True), wanted])
    assert (len(b.token_ids), b.finish_reason) == (3, "length")
    assert (len(c.token_ids), c.finish_reason) == (20, "length")
    assert all_free(llm)


def test_a_single_sequence_that_fills_the_pool(tiny):
    """2 blocks of 4 and a prompt of 8, then one of 7 that wants 8 more. GeeeekExplorer/nano-vllm#274."""
    llm = LLM(tiny("qwen2"), device="cpu", block_size=4, kv_cache_mb=megabytes(2), max_model_len=8)
    with pytest.raises(ValueError, match=r"prompt 0 has 8 tokens.*is 8"):
        llm.generate([[9] * 8], SamplingParams(max_tokens=4))
    (output,) = llm.generate([[9] * 7], SamplingParams(max_tokens=8, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    assert len(llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    assert all_free(llm)


# ---- nothing leaks ---------------------------------------------------------------------------------------------------


def test_blocks_come_back_as_soon_as_an_answer_ends(llm):
    """Prompts of 4, answers of 2, 6 and 10 tokens: after step k, 4 + k tokens of each that goes on are written."""
    held = []
    for event in llm.stream([[5] * 4] * 3, [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 6, 10)]):
        if event.request == 2:  # the last row of each step
            held.append(16 - llm.cache.pool.num_free)
    assert held == [3, 4, 4, 4, 4, 3, 3, 3, 3, 4]
    assert all_free(llm)


@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 3])
def test_blocks_come_back_when_the_model_fails(llm, call, n):
    """In the prefill, in the step that copies shared blocks, and later; afterwards the engine works."""
    calls = iter(range(1, 100))

    def fail(*_: object) -> None:
        if next(calls) == call:
            raise MemoryError("a rigged failure")

    params = SamplingParams(max_tokens=6, n=n, ignore_eos=True)
    hook = llm.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError, match="rigged"):
        llm.generate([[5, 6, 7]] * 2, params)
    hook.remove()
    assert all_free(llm)
    assert len(llm.generate([[5, 6, 7]], params)[0].token_ids) == 6


def test_blocks_come_back_when_sampling_fails(llm, monkeypatch):
    def fail(*_: object) -> None:
        raise MemoryError("a rigged failure")

    monkeypatch.setattr("stages.s03_paged_kv.llm.sample", fail)
    with pytest.raises(MemoryError, match="rigged"):
        llm.generate([[5, 6, 7]] * 2, SamplingParams(max_tokens=6, n=2))
    assert all_free(llm)


@pytest.mark.parametrize("events", [0, 1, 4, 5, 9, 20])
def test_blocks_come_back_when_a_stream_is_left(llm, events):
    """Within the first wave, between two events of a step, and in the second wave."""
    stream = llm.stream([[5] * 6, [7], [8] * 30, [9] * 30], SamplingParams(max_tokens=6, n=2, ignore_eos=True))
    for _ in range(events):
        next(stream)
    assert all_free(llm) == (events == 0)
    stream.close()
    assert all_free(llm)


def test_blocks_come_back_after_a_broken_row(llm):
    """NaN in one row's embedding: that row ends with an error, and who gets its blocks next does not notice."""
    params = SamplingParams(max_tokens=3, n=2, ignore_eos=True)
    healthy = [[a.token_ids for a in o.outputs] for o in llm.generate([[6, 7]] * 3, params)]
    with torch.no_grad():
        llm.model.embed_tokens.weight[499] = float("nan")
    broken, whole = llm.generate([[499, 5], [6, 7]], params)
    assert [a.finish_reason for a in (*broken.outputs, *whole.outputs)] == ["error", "error", "length", "length"]
    assert all_free(llm)
    assert [[a.token_ids for a in o.outputs] for o in llm.generate([[6, 7]] * 3, params)] == healthy


def test_a_bad_request_takes_nothing(llm):
    for prompts in ([[5], []], [[5], [512]], [[5], [9] * 65]):
        with pytest.raises(ValueError, match="prompt 1"):
            llm.generate(prompts)
        assert all_free(llm)
    assert llm.generate([[5]], SamplingParams(max_tokens=2))[0].token_ids


def test_streams_in_turns_never_take_what_another_counts_on(llm):
    """The first may come to need 12 of 16 blocks, and holds 1 as yet: the second gets 4, and a third waits for none."""
    params = [SamplingParams(max_tokens=n, temperature=1.0, seed=1, ignore_eos=True) for n in (45, 13, 5)]
    prompts = [[4, 5, 6, 7], [8, 9, 10], [1]]
    alone = [llm.generate([x], p)[0].token_ids for x, p in zip(prompts, params, strict=True)]
    first, second, third = (llm.stream([x], p) for x, p in zip(prompts, params, strict=True))
    events = [[next(first)], [next(second)]]
    assert 16 - llm.cache.pool.num_free == 2
    with pytest.raises(RuntimeError, match=r"may need 2 blocks.*leave 0"):
        next(third)
    for event in second:
        events[1].append(event)
        events[0].append(next(first))
    events[0] += first
    assert [[e.token_id for e in each] for each in events] == alone[:2]
    assert all_free(llm)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 16, 100, 300])
def test_memory_stays_within_the_budget(block_size, tiny):
    """The dummy and the unused end of the last block are in it."""
    folder, needed = tiny("qwen2"), -(-256 // block_size)
    for budget in (0.4, 0.5, 1.0):
        blocks = int(budget * 2**20) // (block_size * BYTES)
        if blocks - 1 < needed:
            with pytest.raises(
                ValueError, match=f"kv_cache_mb is {budget:g}, which holds {(blocks - 1) * block_size} "
            ):
                LLM(folder, device="cpu", block_size=block_size, kv_cache_mb=budget)
        else:
            llm = LLM(folder, device="cpu", block_size=block_size, kv_cache_mb=budget)
            assert llm.cache.pool.num_blocks == blocks
            assert llm.store.data.nbytes <= budget * 2**20


def test_no_more_memory_than_can_be_used(tiny):
    llm = LLM(tiny("qwen2"), device="cpu", max_num_seqs=3, block_size=16, max_model_len=100)
    assert llm.cache.pool.num_blocks == 1 + 3 * 7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_mb": 0.1}, r"kv_cache_mb is 0\.1, which holds 112 tokens.*256.*kv_cache_mb to 1, .*to 112"),
        ({"kv_cache_mb": 0.01}, r"holds 0 tokens.*raise kv_cache_mb to 1$"),
        ({"kv_cache_mb": -1}, "kv_cache_mb.*-1"),
        ({"kv_cache_mb": float("nan")}, "kv_cache_mb.*nan"),
        ({"kv_cache_mb": "2048"}, "kv_cache_mb.*'2048'"),
        ({"block_size": 0}, "block_size.*0.*1"),
        ({"block_size": 16.0}, "block_size.*16.0"),
        ({"block_size": 10**7}, r"kv_cache_mb is 2048, which holds 0 tokens.*raise kv_cache_mb to 14649"),
        ({"max_num_seqs": 0}, "max_num_seqs.*0.*1"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, words, tiny):
    with pytest.raises((ValueError, TypeError), match=words):
        LLM(tiny("qwen2"), device="cpu", **options)


def test_an_answer_that_streams_leave_no_room_for_is_refused_before_any_work(tiny):
    """The four that would have fitted are not computed and then lost."""
    llm = LLM(tiny("qwen2"), device="cpu", block_size=4, kv_cache_mb=megabytes(8), max_model_len=32)
    stream = llm.stream([[5, 6, 7]], SamplingParams(max_tokens=14, ignore_eos=True))
    next(stream)
    passes = []
    hook = llm.model.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(RuntimeError, match="may need 5 blocks.*leave 4"):
        llm.generate([[1], [2], [3], [4], [5] * 17], SamplingParams(max_tokens=3, prompt_logprobs=1))
    hook.remove()
    assert not passes
    assert len(list(stream)) == 13
