"""One step: which tokens are computed, at which positions, and that the logits are those of a full recomputation."""

import pytest
import torch

from stages.s01_forward.layers import attention
from stages.s01_forward.llm import hidden_states
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache import context
from stages.s02_kv_cache.batch import Batch
from stages.s02_kv_cache.context import CachedContext
from stages.s02_kv_cache.kv_store import KVStore
from stages.s02_kv_cache.llm import LLM
from stages.s02_kv_cache.recorder import recorded_steps
from stages.s02_kv_cache.sequence import Sequence
from tests.fixtures import each_family

PROMPTS = [[7], [10, 11, 12, 13, 14, 15], list(range(100, 119))]
CAPS = [8, 4, 6]


def params(temperature: float = 1.5) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=n, temperature=temperature, seed=n, ignore_eos=True) for n in CAPS]


# ---- what is fed -----------------------------------------------------------------------------------------------------


def test_batch_of_prefills_and_decodes():
    """Row 0 is new, row 1 decodes, row 2 has two tokens to catch up with."""
    rows = [Sequence([5, 6, 7]), Sequence([20, 21, 22, 23], num_kv=3), Sequence([30, 31, 32], num_kv=1)]
    batch = Batch.of(rows, torch.device("cpu"))
    assert batch.input_ids.tolist() == [5, 6, 7, 23, 31, 32]
    assert batch.positions.tolist() == [0, 1, 2, 3, 1, 2]
    assert batch.input_ids.dtype == batch.positions.dtype == torch.int64
    assert batch.cu_q == [0, 3, 4, 6]
    assert batch.seq_lens == [3, 4, 3]
    assert batch.last_tokens == [2, 3, 5]


def test_batch_follows_a_growing_sequence():
    """A prompt of 6, then one token at a time: positions 0..5, then 6, 7, 8. skyzh/tiny-llm#46."""
    sequence, fed = Sequence([1, 2, 3, 4, 5, 6]), []
    for token in (50, 51, 52, 53):
        batch = Batch.of([sequence], torch.device("cpu"))
        fed.append((batch.input_ids.tolist(), batch.positions.tolist()))
        sequence.num_kv = sequence.num_tokens
        sequence.token_ids.append(token)
    assert fed == [([1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5]), ([50], [6]), ([51], [7]), ([52], [8])]


@each_family
def test_positions_fed_and_logits_of_a_short_answer(family, tiny):
    """Prompt of 6, 5 greedy tokens; logits equal the uncached ones to 1e-5 of the largest. skyzh/tiny-llm#46."""
    llm, prompt = LLM(tiny(family), device="cpu", dtype="float32"), [10, 11, 12, 13, 14, 15]
    with recorded_steps(llm.model) as steps:
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=5, ignore_eos=True))
    assert [step.positions for step in steps] == [[0, 1, 2, 3, 4, 5], [6], [7], [8], [9]]
    assert [step.input_ids for step in steps] == [prompt, *([token] for token in output.token_ids[:4])]
    for count, step in enumerate(steps):
        expected = llm.model.logits(hidden_states(llm.model, prompt + output.token_ids[:count])[-1:])
        assert (step.logits - expected).abs().max() <= 1e-5 * expected.abs().max(), f"step {count}"


@each_family
def test_each_step_equals_full_recomputation(family, tiny):
    """Three ragged rows that end at different steps; after the prefill each computes one token per step."""
    llm = LLM(tiny(family), device="cpu", dtype="float32")
    with recorded_steps(llm.model) as steps:
        outputs = llm.generate(PROMPTS, params())
    assert [len(output.token_ids) for output in outputs] == CAPS
    assert [len(step.input_ids) for step in steps] == [sum(map(len, PROMPTS)), 3, 3, 3, 2, 2, 1, 1]
    for count, step in enumerate(steps):
        running = [output for output in outputs if len(output.token_ids) > count]
        assert len(step.logits) == len(running)
        for row, output in enumerate(running):
            ids = output.prompt_token_ids + output.token_ids[:count]
            expected = llm.model.logits(hidden_states(llm.model, ids)[-1:])[0]
            assert (step.logits[row] - expected).abs().max().item() <= 1e-4, f"row {row} of step {count}"


# ---- where it is written ---------------------------------------------------------------------------------------------


def test_context_writes_then_attends(tiny, monkeypatch):
    """Row 0 prefills page 2, row 1 decodes at position 4 of page 0; all else holds NaN, and stays as it is."""
    from stages.s01_forward.config import ModelConfig

    monkeypatch.setattr(context, "cached_attention", attention)  # stage 01's: this check is about the pages
    config = ModelConfig.from_dir(tiny("qwen2"))  # 6 heads, 2 KV heads, head_dim 16
    store = KVStore(config, 3, 8, device="cpu", dtype=torch.float32)
    store.data.fill_(float("nan"))
    rng = torch.Generator().manual_seed(0)
    old = torch.randn(2, 4, 2, 16, generator=rng)
    store.data[1, :, 0, :4] = old
    before = store.data.clone()
    q, (k, v) = torch.randn(4, 6, 16, generator=rng), torch.randn(2, 4, 2, 16, generator=rng)
    zeros = torch.zeros(4, dtype=torch.int64)
    ctx = CachedContext(store, Batch(zeros, zeros, cu_q=[0, 3, 4], seq_lens=[3, 5]), pages=[2, 0])
    out = ctx.attend(1, q, k, v)
    before[1, :, 2, :3] = torch.stack((k[:3], v[:3]))
    before[1, :, 0, 4] = torch.stack((k[3], v[3]))
    torch.testing.assert_close(store.data, before, atol=0, rtol=0, equal_nan=True)
    decoded = attention(q[3:], torch.cat((old[0], k[3:])), torch.cat((old[1], v[3:])), 0.25)
    torch.testing.assert_close(out, torch.cat((attention(q[:3], k[:3], v[:3], 0.25), decoded)))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_what_a_page_held_before_changes_nothing(poison, tiny):
    llm = LLM(tiny("qwen2"), device="cpu", max_num_seqs=2)
    llm.store.data.zero_()
    with recorded_steps(llm.model) as clean:
        llm.generate(PROMPTS, params())
    llm.store.data.fill_(poison)
    with recorded_steps(llm.model) as poisoned:
        llm.generate(PROMPTS, params())
    assert len(clean) == len(poisoned)
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(clean, poisoned, strict=True))
