"""The engine with a real model: the same tokens with and without a memory, and only what is new is computed."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.s01_forward.llm import LLM as Uncached
from stages.s01_forward.llm import hidden_states
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.kv_store import kv_bytes_per_token
from stages.s02_kv_cache.recorder import recorded_steps
from stages.s04_continuous_batching.recorder import recorded_batches
from stages.s04_continuous_batching.scheduler import Step
from stages.s06_prefix_cache.fuzz_prefix import Subscriber, last_token, same_key
from stages.s06_prefix_cache.hash_chain import HashChain
from stages.s06_prefix_cache.llm import LLM
from tests.fixtures import each_family

BLOCK = 4
ONE = SamplingParams(max_tokens=1)
MODES = ("chain", "radix", "off")


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(folder, device="cpu", **{"dtype": "float32", "block_size": BLOCK, "kv_cache_mb": 2, **options})


def with_blocks(folder: Path, blocks: int, **options: Any) -> LLM:
    """An engine with so many blocks and the dummy."""
    each = kv_bytes_per_token(Uncached(folder, device="cpu").config, torch.float32)
    return engine(folder, kv_cache_mb=(blocks + 1) * BLOCK * each / 2**20, **options)


def answers(llm: Any, prompts: Any, params: Any) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in llm.generate(prompts, params)]


def computed(llm: LLM, prompts: list[list[int]], params: SamplingParams = ONE) -> tuple[list[int], list[int]]:
    """(tokens that the model computed in each step, cached tokens that each request reports)."""
    sizes: list[int] = []
    hook = llm.model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    outputs = llm.generate(prompts, params)
    hook.remove()
    return sizes, [output.num_cached_tokens for output in outputs]


def all_free(llm: LLM) -> bool:
    pool = llm.engine.scheduler.cache.pool
    pool.check()
    return pool.num_free == pool.num_blocks - 1 and not llm.engine.has_work


# ---- only what is new is computed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["chain", "radix"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 12, 13, 40])
def test_a_second_identical_prompt_computes_the_rest(mode, length, tiny):
    """n - block * ((n - 1) // block) tokens, counted at the model."""
    llm = engine(tiny("qwen2"), prefix_cache=mode)
    prompt, found = [(3 * i) % 490 for i in range(length)], BLOCK * ((length - 1) // BLOCK)
    assert computed(llm, [prompt]) == ([length], [0])
    assert computed(llm, [prompt]) == ([length - found], [found])
    assert computed(llm, [[*prompt, 7]])[1] == [BLOCK * (length // BLOCK)]
    cache = llm.engine.scheduler.cache
    assert (cache.queried_tokens, cache.hit_tokens) == (3 * length + 1, found + BLOCK * (length // BLOCK))


def test_a_prompt_is_looked_up_once_however_often_it_is_preempted(tiny):
    """Or the hit rate would tell of what requests find of their own; the fork and the scored prompt look up nothing."""
    llm = with_blocks(tiny("qwen2"), 20, max_model_len=60)
    prompts = [[first] * 18 for first in range(5, 10)]
    each: list[dict[str, int]] = [{}, {"n": 2}, {}, {}, {"prompt_logprobs": 0}]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, **keys) for keys in each]
    llm.generate(prompts, params)
    cache = llm.engine.scheduler.cache
    assert llm.engine.scheduler.num_preemptions > 5
    assert (cache.queried_tokens, cache.hit_tokens) == (4 * 18, 0)
    llm.generate([[4] * 18], ONE)
    llm.generate([[4] * 18], ONE)
    assert (cache.queried_tokens, cache.hit_tokens) == (6 * 18, 16)


def test_a_fork_that_could_not_start_is_looked_up(tiny):
    """It holds its sibling's blocks for a moment, finds no other, and begins when the sibling has ended."""
    llm = with_blocks(tiny("qwen2"), 5, max_model_len=20)
    llm.generate([[7] * 18], SamplingParams(max_tokens=2, ignore_eos=True, n=2))
    cache = llm.engine.scheduler.cache
    assert llm.engine.scheduler.num_preemptions == 0
    assert (cache.queried_tokens, cache.hit_tokens) == (2 * 18, 16)


def test_off_means_off(tiny):
    llm = engine(tiny("qwen2"), prefix_cache="off")
    for _ in range(2):
        assert computed(llm, [list(range(20))]) == ([20], [0])


@each_family
@pytest.mark.parametrize("mode", ["chain", "radix"])
def test_the_new_tokens_attend_to_the_cached_ones(mode, family, tiny):
    """8 tokens, then the same and 5 more: positions 8..12, logits as without cache. Wenyueh/MinivLLM#98."""
    prompt = [5, 3, 8, 2, 9, 1, 4, 7]
    llm = engine(tiny(family), prefix_cache=mode)
    llm.generate([prompt], ONE)
    with recorded_steps(llm.model) as steps:
        (output,) = llm.generate([[*prompt, 11, 12, 13, 14, 15]], ONE)
    (step,) = steps
    assert (step.input_ids, step.positions) == ([11, 12, 13, 14, 15], [8, 9, 10, 11, 12])
    expected = llm.model.logits(hidden_states(llm.model, output.prompt_token_ids)[-1:])
    assert (step.logits - expected).abs().max().item() <= 1e-4


def test_output_is_found_too(tiny):
    """A conversation: the next prompt begins with the last prompt and its answer. The newest token has no K/V."""
    llm = engine(tiny("qwen2"))
    (output,) = llm.generate([list(range(10))], SamplingParams(max_tokens=7, ignore_eos=True))
    told = [*output.prompt_token_ids, *output.token_ids]  # 17, and 16 of them were computed
    assert computed(llm, [[*told, 3, 4]]) == ([3], [16])


def test_duplicates_in_one_step_are_computed_twice_and_right(tiny):
    """Nothing is found before it is computed; the step after finds it."""
    prompt = list(range(30, 43))
    for mode in MODES:
        llm = engine(tiny("qwen2"), prefix_cache=mode)
        assert computed(llm, [prompt, prompt, prompt]) == ([39], [0, 0, 0])
        expected = 12 if mode != "off" else 0
        assert computed(llm, [prompt, prompt]) == ([26 - 2 * expected], [expected] * 2)
        assert all_free(llm)


def test_a_chunk_is_found_while_the_rest_of_the_prompt_is_computed(tiny):
    """Published when it has been computed, not when the whole prompt has, and not before."""
    prompt = list(range(100, 140))
    llm = engine(tiny("qwen2"), max_chunk=10)
    stream = llm.stream([[5], prompt], SamplingParams(max_tokens=8, ignore_eos=True))
    next(stream)
    assert llm.engine.scheduler.running[1].sequence.num_kv == 10
    (late,) = llm.generate([prompt], ONE)
    assert late.num_cached_tokens == 8, "two full blocks of the first ten tokens"
    assert late.token_ids == Uncached(tiny("qwen2"), device="cpu").generate([prompt], ONE)[0].token_ids
    assert len(list(stream)) == 15
    assert all_free(llm)


def test_forked_answers_and_cached_prompts(tiny):
    """n answers to a prompt that is known already: only the last token of each is computed."""
    llm = engine(tiny("qwen2"))
    prompt = list(range(60, 73))
    params = SamplingParams(max_tokens=5, temperature=1.5, seed=3, n=3, ignore_eos=True)
    expected = answers(Uncached(tiny("qwen2"), device="cpu"), [prompt], params)
    for _ in range(3):
        assert answers(llm, [prompt], params) == expected
        assert all_free(llm)
    sizes, cached = computed(llm, [prompt], params)
    assert cached == [12]
    assert sum(sizes) == 1 + 2 + 3 * 4


# ---- the same ids, whatever is remembered ----------------------------------------------------------------------------


def family_tree(seed: int, count: int) -> list[list[int]]:
    """Prompts that share beginnings of many lengths."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(count):
        old = rng.choice(prompts)[: rng.randint(1, 30)] if prompts and rng.random() < 0.8 else []
        prompts.append(old + [rng.randrange(490) for _ in range(rng.randint(1, 12))])
    return prompts


@each_family
def test_on_and_off_give_the_same_ids_under_pressure(family, tiny):
    """A pool of 20 blocks, so that old prefixes go all the time; chunks, preemption, swapping, salts, n > 1."""
    rounds = [family_tree(seed, 8) for seed in (1, 1, 2)]
    params = [
        SamplingParams(
            max_tokens=2 + i % 4,
            temperature=0.9 * (i % 2),
            seed=i,
            n=1 + 2 * (i == 4),
            cache_salt="x" if i % 5 == 3 else None,
        )
        for i in range(8)
    ]
    expected = [answers(Uncached(tiny(family), device="cpu"), prompts, params) for prompts in rounds]
    hits = {}
    for mode in MODES:
        for options in ({}, {"max_num_batched_tokens": 9, "max_chunk": 5, "swap_mb": 1}):
            llm = with_blocks(tiny(family), 20, prefix_cache=mode, max_model_len=56, max_num_seqs=6, **options)
            assert [answers(llm, prompts, params) for prompts in rounds] == expected, (mode, options)
            assert all_free(llm)
            hits[mode, len(options)] = getattr(llm.engine.scheduler.cache, "hit_tokens", 0)
    assert hits["chain", 0] == hits["radix", 0] > 50
    assert hits["chain", 3] == hits["radix", 3] > 50


@pytest.mark.parametrize("hash_block", [same_key, last_token])
def test_forced_collisions_serve_no_wrong_block(hash_block, tiny):
    """waybarrios/vllm-mlx#444."""
    llm = engine(tiny("qwen2"))
    llm.engine.scheduler.cache.index = HashChain(hash_block)
    prompts = [[7, 8, 9, 10, *range(20, 27)], [263, 264, 265, 266, *range(20, 27)], [8, 7, 9, 10, *range(20, 27)]]
    expected = answers(Uncached(tiny("qwen2"), device="cpu"), prompts, ONE)
    for prompt, answer in zip(prompts, expected, strict=True):
        (output,) = llm.generate([prompt], ONE)
        assert (output.num_cached_tokens, [output.token_ids]) == (0, answer)
    assert llm.generate([prompts[0]], ONE)[0].num_cached_tokens >= 4, "what was first stays"


@pytest.mark.parametrize("mode", ["chain", "radix"])
def test_ids_that_look_alike_share_nothing(mode, tiny):
    """Equal modulo 256, and equal as text. waybarrios/vllm-mlx#444."""
    llm = engine(tiny("qwen2"), prefix_cache=mode, block_size=2)
    for first, second in (([7, 8, 9, 10, 3], [263, 264, 265, 266, 3]), ([1, 23, 5], [12, 3, 5])):
        assert llm.generate([first], ONE)[0].num_cached_tokens == 0
        assert llm.generate([second], ONE)[0].num_cached_tokens == 0
        assert llm.generate([first], ONE)[0].num_cached_tokens == len(first) - 1


@pytest.mark.parametrize("mode", ["chain", "radix"])
def test_salts_are_separate_worlds(mode, tiny):
    """None across them, full hits inside each, and the ids are the same. vllm-project/vllm#44701."""
    llm = engine(tiny("qwen2"), prefix_cache=mode)
    prompt, tokens = list(range(40, 53)), set()
    for expected in (0, 12):
        for salt in (None, "x", "y", "", "half a character \ud83d"):
            (output,) = llm.generate([prompt], SamplingParams(max_tokens=3, cache_salt=salt))
            assert output.num_cached_tokens == expected
            tokens.add(tuple(output.token_ids))
    assert len(tokens) == 1


@pytest.mark.parametrize("mode", ["chain", "radix"])
def test_recycled_blocks_are_forgotten(mode, tiny):
    """3 blocks: X, Y over X's blocks, X again. GeeeekExplorer/nano-vllm#163."""
    llm = with_blocks(tiny("qwen2"), 3, prefix_cache=mode, max_model_len=12)
    x, y = list(range(8)), list(range(50, 61))
    first, _, third = (llm.generate([prompt], ONE)[0] for prompt in (x, y, x))
    assert (first.num_cached_tokens, third.num_cached_tokens) == (0, 0)
    assert first.token_ids == third.token_ids


def test_a_preempted_request_finds_its_own_blocks(tiny):
    """Prompt 10, preempted after 3 tokens: 13 known, 12 found, 1 computed. GeeeekExplorer/nano-vllm#211."""
    for mode in ("chain", "radix"):
        llm = engine(tiny("qwen2"), prefix_cache=mode)
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        expected = Uncached(tiny("qwen2"), device="cpu").generate([list(range(10))], params)[0].token_ids
        stream = llm.stream([list(range(10))], params)
        tokens = [next(stream).token_id for _ in range(3)]
        (request,) = llm.engine.scheduler.running
        llm.engine.scheduler.preempt(request, Step())
        with recorded_batches(llm.engine) as batches:
            tokens += [event.token_id for event in stream]
        assert tokens == expected
        assert [(row.start, row.computed) for batch in batches for row in batch.rows] == [
            (position, 1) for position in range(12, 17)
        ]
        assert request.num_cached_tokens == 0, "of its prompt, when it started"


def test_a_preempted_request_in_the_middle_of_its_prompt(tiny):
    """Two chunks of 6 are computed, three blocks full: it goes on from there."""
    llm = engine(tiny("qwen2"), max_chunk=6)
    prompt = list(range(200, 220))
    stream = llm.stream([[5], prompt], SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(2):
        next(stream)
    request = llm.engine.scheduler.running[1]
    assert request.sequence.num_kv == 12
    llm.engine.scheduler.preempt(request, Step())
    with recorded_batches(llm.engine) as batches:
        told = [event.token_id for event in stream if event.request == 1]
    assert [(row.start, row.computed) for batch in batches for row in batch.rows if row.request == 1][:2] == [
        (12, 6),
        (18, 2),
    ]
    expected = Uncached(tiny("qwen2"), device="cpu").generate([prompt], SamplingParams(max_tokens=9, ignore_eos=True))
    assert told == expected[0].token_ids


@pytest.mark.parametrize("mode", MODES)
def test_prompt_logprobs_do_not_read_the_cache_but_fill_it(mode, tiny):
    """A full list of 12 each time, the second after a plain request. vllm-project/vllm#3251."""
    llm, prompt = engine(tiny("qwen2"), prefix_cache=mode), list(range(20, 32))
    asks = SamplingParams(max_tokens=2, prompt_logprobs=2, logprobs=2)
    found = 0 if mode == "off" else 8
    (first,) = llm.generate([prompt], asks)
    assert llm.generate([prompt], ONE)[0].num_cached_tokens == found, "it filled the cache"
    (second,) = llm.generate([prompt], asks)
    (expected,) = Uncached(tiny("qwen2"), device="cpu").generate([prompt], asks)
    for output in (first, second):
        assert output.num_cached_tokens == 0
        assert len(output.prompt_logprobs) == 12
        assert output.token_ids == expected.token_ids
        for entry, same in zip(output.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
            assert (entry.token_id, entry.rank) == (same.token_id, same.rank)
            assert entry.logprob == pytest.approx(same.logprob, abs=1e-4)


@pytest.mark.parametrize("chunk", [8, None])
@pytest.mark.parametrize("length", [1, 8, 9, 16, 17])
def test_a_last_chunk_of_one_token_poisons_nothing(length, chunk, tiny):
    """The second run finds what the first has computed, and says the same. sgl-project/sglang#30181."""
    llm = engine(tiny("qwen2"), max_chunk=chunk, block_size=8)
    prompt = [(29 * i + 5) % 490 for i in range(length)]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    expected = answers(Uncached(tiny("qwen2"), device="cpu"), [prompt], params)
    assert answers(llm, [prompt], params) == answers(llm, [prompt], params) == expected
    assert answers(llm, [[*prompt, *expected[0][0]]], params) == answers(
        Uncached(tiny("qwen2"), device="cpu"), [[*prompt, *expected[0][0]]], params
    )


def test_a_failed_step_publishes_nothing(tiny):
    """The blocks of a step that did not end well hold anything: nobody may find them."""
    llm, prompt = engine(tiny("qwen2")), list(range(300, 313))
    hook = llm.model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("rigged")))
    with pytest.raises(MemoryError, match="rigged"):
        llm.generate([prompt], ONE)
    hook.remove()
    assert computed(llm, [prompt]) == ([13], [0])
    assert all_free(llm)


@pytest.mark.parametrize("mode", ["chain", "radix"])
def test_a_subscriber_knows_what_can_be_found(mode, tiny):
    """By the events alone, through an engine's whole life under pressure."""
    llm = with_blocks(tiny("qwen2"), 26, prefix_cache=mode, max_model_len=56, max_num_seqs=4, max_num_batched_tokens=16)
    cache, subscriber = llm.engine.scheduler.cache, Subscriber()
    cache.subscribers.append(subscriber)
    for prompt in family_tree(3, 40):
        full = [tuple(prompt[first : first + BLOCK]) for first in range(0, len(prompt) - BLOCK, BLOCK)]
        known = len(subscriber.find((), full)) * BLOCK
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=4))
        assert output.num_cached_tokens == known
    assert cache.hit_tokens > 100
    assert len(subscriber.blocks) <= 26


def test_a_subscriber_that_fails_costs_no_answer(tiny, caplog):
    """It is told no more, and the others are; who is being answered does not notice."""
    prompts, params = [[5, 6, 7] * 7, [9, 9] * 8], SamplingParams(max_tokens=12, ignore_eos=True)
    llm, heard = engine(tiny("qwen2")), []
    expected = answers(llm, prompts, params)

    def broken(event: Any) -> None:
        heard.append(event)
        raise ValueError("the router is gone")

    llm, others = engine(tiny("qwen2")), []
    llm.engine.scheduler.cache.subscribers += [broken, others.append]
    assert answers(llm, prompts, params) == expected
    assert len(heard) == 1 < len(others)
    assert "the router is gone" in caplog.text


@pytest.mark.parametrize("value", ["on", "", None, True, "Chain"])
def test_an_unknown_index_is_refused(value, tiny):
    with pytest.raises(ValueError, match=f"prefix_cache is {value!r}; it must be 'chain', 'radix' or 'off'"):
        engine(tiny("qwen2"), prefix_cache=value)
