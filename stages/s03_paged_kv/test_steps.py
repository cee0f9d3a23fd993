"""One step: the logits of a full recomputation wherever the blocks lie, and only the new tokens' slots are written."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stages.s01_forward.inputs import answer_seed
from stages.s01_forward.llm import hidden_states
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.recorder import recorded_steps
from stages.s03_paged_kv.context import slot_mapping
from stages.s03_paged_kv.llm import LLM
from tests.fixtures import each_family

PROMPTS = [[7], [10, 11, 12, 13, 14, 15], list(range(100, 119)), list(range(200, 208))]
CAPS = [8, 4, 6, 5]
PARAMS = [SamplingParams(max_tokens=n, temperature=1.5, seed=n, ignore_eos=True) for n in CAPS]
NAN = float("nan")


def engine(folder: Any, **options: Any) -> LLM:
    return LLM(folder, device="cpu", **{"dtype": "float32", "block_size": 4, "kv_cache_mb": 2, **options})


def before_each_step(llm: LLM, act: Callable[[], None]) -> None:
    """`act` runs when the step has its blocks and the model has not begun."""
    llm.model.register_forward_pre_hook(lambda *_: act())


@each_family
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_each_step_equals_full_recomputation(family, block_size, tiny):
    """Ragged rows that end at different steps; after the prefill each computes one token per step."""
    llm = engine(tiny(family), block_size=block_size)
    with recorded_steps(llm.model) as steps:
        outputs = llm.generate(PROMPTS, PARAMS)
    assert [len(step.input_ids) for step in steps] == [sum(map(len, PROMPTS)), 4, 4, 4, 3, 2, 1, 1]
    for count, step in enumerate(steps):
        running = [output for output in outputs if len(output.token_ids) > count]
        assert len(step.logits) == len(running)
        for row, output in enumerate(running):
            ids = output.prompt_token_ids + output.token_ids[:count]
            expected = llm.model.logits(hidden_states(llm.model, ids)[-1:])[0]
            assert (step.logits[row] - expected).abs().max().item() <= 1e-4, f"row {row} of step {count}"
            if count:
                assert step.positions[row] == len(ids) - 1


@each_family
def test_where_blocks_lie_changes_no_bit(family, tiny):
    llm = engine(tiny(family))
    runs = []
    for seed in (None, 1, 2):
        if seed is not None:
            free = llm.cache.pool.free
            for block in random.Random(seed).sample(list(free), len(free)):
                free.move_to_end(block)
        with recorded_steps(llm.model) as steps:
            llm.generate([*PROMPTS, [5] * 9], [*PARAMS, SamplingParams(max_tokens=4, temperature=1.0, seed=1, n=3)])
        runs.append([step.logits for step in steps])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("poison", [NAN, float("inf"), 1e30])
def test_what_nobody_owns_reaches_nobody(poison, tiny):
    """Before each step: block 0, all free blocks, and every slot that no token has been written to."""
    llm = engine(tiny("qwen2"))
    params = [*PARAMS, SamplingParams(max_tokens=7, temperature=1.0, seed=1, n=3, ignore_eos=True)]
    llm.store.data.zero_()
    with recorded_steps(llm.model) as clean:
        llm.generate([*PROMPTS, [5] * 6], params)
    llm.store.data.fill_(poison)

    def spoil() -> None:
        llm.store.data[:, :, [0, *llm.cache.pool.free]] = poison

    before_each_step(llm, spoil)
    with recorded_steps(llm.model) as poisoned:
        llm.generate([*PROMPTS, [5] * 6], params)
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(clean, poisoned, strict=True))
    assert len(clean) == 8


def test_a_step_writes_the_slots_of_its_tokens_and_nothing_else(tiny):
    """Every slot but those stays as it was, the last one of the last block too. vllm-project/vllm#43810."""
    llm = engine(tiny("qwen2"))
    step, spy = llm.step, []

    def watched(sequences: Any) -> torch.Tensor:
        for sequence in sequences:  # copies come first, so that only the tokens' own writes are left to see
            llm.store.copy_blocks(llm.cache.reserve(sequence, sequence.num_tokens))
        slots = slot_mapping(sequences, 4)
        before = llm.store.data.clone()
        logits = step(sequences)
        changed = (llm.store.data != before).flatten(4).any(-1).any(0).any(0).flatten()  # [slots]
        spy.append((sorted(slots), changed.nonzero().flatten().tolist()))
        return logits

    llm.store.data.fill_(-1.0)
    llm.step = watched
    llm.generate([*PROMPTS, [5] * 6], [*PARAMS, SamplingParams(max_tokens=7, seed=1, temperature=1.0, n=3)])
    assert len(spy) == 8
    assert all(slots == changed and min(slots) >= 4 for slots, changed in spy)


# ---- answers that share ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "copies"), [(6, 2), (8, 0), (3, 2), (1, 2)])
def test_answers_to_one_prompt_share_its_blocks(length, copies, tiny):
    """The prompt is computed once, its half-full block copied for all but one; each answer is as if alone."""
    llm = engine(tiny("qwen2"))
    made, copy_blocks = [], llm.store.copy_blocks
    llm.store.copy_blocks = lambda pairs: (made.extend(pairs), copy_blocks(pairs))
    params = SamplingParams(max_tokens=5, temperature=1.5, seed=3, n=3, ignore_eos=True)
    with recorded_steps(llm.model) as steps:
        (output,) = llm.generate([list(range(10, 10 + length))], params)
    assert [len(step.input_ids) for step in steps] == [length, 3, 3, 3, 3]
    assert len(made) == copies
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    for answer in output.outputs:
        alone = SamplingParams(max_tokens=5, temperature=1.5, seed=answer_seed(3, answer.index), ignore_eos=True)
        assert llm.generate([output.prompt_token_ids], alone)[0].token_ids == answer.token_ids


def test_pool_of_eight_blocks_carries_three_answers(tiny):
    """Prompt of 6, n = 3, 5 tokens each, blocks of 4: 1 shared block and 3 x 2. vllm-project/vllm#3347."""
    llm = engine(tiny("qwen2"), kv_cache_mb=9 * 4 * 768 / 2**20, max_model_len=32)
    assert llm.cache.pool.num_free == 8
    peak, shared = [], []

    def note() -> None:
        peak.append(8 - llm.cache.pool.num_free)
        shared.append(sorted(llm.cache.pool.ref_counts)[-1])

    before_each_step(llm, note)
    with recorded_steps(llm.model) as steps:
        llm.generate([[5, 6, 7, 8, 9, 10]], SamplingParams(max_tokens=5, n=3, ignore_eos=True))
    assert len(steps) == 5
    assert (max(peak), shared) == (7, [1, 3, 3, 3, 3])
    llm.cache.pool.check()
    assert sorted(llm.cache.pool.free) == list(range(1, 9))


def test_answers_that_end_at_different_steps(tiny):
    """Stop tokens end the three answers in another order than they began; blocks return one by one."""
    llm = engine(tiny("qwen2"))
    free = SamplingParams(max_tokens=8, temperature=3.0, seed=5, n=3, ignore_eos=True)
    second, first, third = (answer.token_ids for answer in llm.generate([[9] * 6], free)[0].outputs)
    stops = [first[2], second[5]]
    assert not set(stops) & {*first[:2], *second[:5], *third}, "the seed is chosen so that the answers end as wanted"
    params = SamplingParams(max_tokens=8, temperature=3.0, seed=5, n=3, ignore_eos=True, stop_token_ids=stops)
    ended = []
    for event in llm.stream([[9] * 6], params):
        llm.cache.pool.check()
        if event.finish_reason:
            ended.append(event.index)
    assert ended == [1, 0, 2]
    (output,) = llm.generate([[9] * 6], params)
    assert [answer.token_ids for answer in output.outputs] == [second[:6], first[:3], third]
    assert llm.cache.pool.num_free == llm.cache.pool.num_blocks - 1
