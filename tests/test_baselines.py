"""Hugging Face's three ways to serve a ragged load give the oracle's tokens, each as many as were asked for."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from reference import hf
from reference.baselines.hf_batching import continuous_batching
from reference.baselines.hf_generate import one_by_one, padded_generate

PROMPTS = [[5, 6, 7, 8, 9], [10] * 30, [3, 99]]
LENGTHS = [7, 3, 12]


@pytest.fixture(scope="module")
def model(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(tiny):
    return [hf.greedy(tiny("llama"), prompt, n) for prompt, n in zip(PROMPTS, LENGTHS, strict=True)]


@pytest.mark.parametrize("generate", [padded_generate, one_by_one])
def test_generate(model, expected, generate):
    assert generate(model, PROMPTS, LENGTHS) == expected


def test_continuous_batching_serves_load_after_load(model, expected):
    attention = model.config._attn_implementation
    with continuous_batching(model, 200) as run:
        assert run(PROMPTS, LENGTHS) == expected
        assert run(PROMPTS[::-1], LENGTHS[::-1]) == expected[::-1]
    assert model.config._attn_implementation == attention
    assert one_by_one(model, PROMPTS, LENGTHS) == expected, "the model is as it was"
