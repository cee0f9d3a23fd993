"""How large the cache may be: arithmetic on what is free, in use, and needed for the largest step."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stages.s01_forward.sampling_params import SamplingParams
from stages.s04_continuous_batching import memory
from stages.s04_continuous_batching.llm import LLM
from stages.s04_continuous_batching.memory import kv_budget_mb

MB = 2**20


def budget(model, **keys) -> float:
    return kv_budget_mb(model, **{"kv_cache_mb": None, "memory_share": 0.9, "num_tokens": 32, "num_rows": 4, **keys})


@pytest.fixture
def card(monkeypatch):
    """A GPU of 1000 MB, of which 300 MB are in use; the largest step takes 44 MB. As numbers only."""
    monkeypatch.setattr(memory, "largest_step_bytes", lambda model, num_tokens, num_rows: 44 * MB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700 * MB, 1000 * MB))
    return SimpleNamespace(cos=SimpleNamespace(device=torch.device("cuda")))


def test_a_gpu_gives_its_share_minus_weights_largest_step_and_margin(card):
    assert budget(card) == 900 - 300 - 44 - 256
    assert budget(card, memory_share=1) == 1000 - 300 - 44 - 256


@pytest.mark.parametrize("share", [0.6, 0.3, 0.1])
def test_a_gpu_with_nothing_left_is_an_error_with_the_numbers(share, card):
    """Exactly nothing, less than the weights take, and still less."""
    with pytest.raises(ValueError, match=rf"memory_share {share} of 1000 MB.*300 MB are in use.*takes 44 MB"):
        budget(card, memory_share=share)


def test_the_largest_step_is_measured_by_running_it(monkeypatch, tiny):
    """As many tokens as a step may have (no more than the model takes), logits of as many rows as may sample."""
    llm = LLM(tiny("qwen2"), device="cpu")
    asked, taken = [], iter((1000, 1000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(taken))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5000)
    llm.model.register_forward_pre_hook(lambda _, inputs: asked.append(inputs[0].shape))
    logits = llm.model.logits
    llm.model.logits = lambda hidden: (asked.append(hidden.shape), logits(hidden))[1]
    assert memory.largest_step_bytes(llm.model, 32, 4) == 4000
    assert memory.largest_step_bytes(llm.model, 10_000, 64) == 4000
    hidden = llm.config.hidden_size
    assert asked == [(32,), (4, hidden), (256,), (64, hidden)]


@pytest.mark.parametrize(("free", "expected"), [(1000, 500), (8192, 4096), (100_000, 4096)])
def test_a_cpu_gives_half_of_what_is_free_and_no_more_than_4_gib(free, expected, monkeypatch, tiny):
    monkeypatch.setattr(memory, "free_host_bytes", lambda: free * MB)
    assert budget(LLM(tiny("qwen2"), device="cpu", kv_cache_mb=1).model) == expected


def test_free_memory_of_the_host_is_a_number_everywhere(monkeypatch):
    """Files that were read stay in memory until it is needed; where the system does not say, 4 GiB are assumed."""
    assert memory.free_host_bytes() > MB
    told = "MemTotal: 24600000 kB\nMemFree: 3000 kB\nMemAvailable:    5000 kB\nBuffers: 7 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: told)
    assert memory.free_host_bytes() == 5000 * 1024
    for silent in ("", "MemAvailable:", "MemAvailable: much"):
        monkeypatch.setattr(Path, "read_text", lambda path, encoding, silent=silent: silent)
        assert memory.free_host_bytes() == 4 * 2**30
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: path.joinpath("there is no such file").read_bytes())
    assert memory.free_host_bytes() == 4 * 2**30


def test_what_the_caller_says_counts(card):
    assert budget(card, kv_cache_mb=3.5) == 3.5
    with pytest.raises(ValueError, match=r"kv_cache_mb is 0.*above 0"):
        budget(card, kv_cache_mb=0)


@pytest.mark.parametrize("share", [0, -0.5, 1.01, float("nan"), "all"])
def test_a_share_is_a_share(share, card):
    with pytest.raises((ValueError, TypeError), match="memory_share is"):
        budget(card, memory_share=share)


def test_little_memory_shortens_the_model_and_says_so(monkeypatch, tiny):
    """0.15 MB of 768 bytes per token, in blocks of 16: 12 blocks, one of them the dummy."""
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 0.3 * MB)
    with pytest.warns(UserWarning, match="max_model_len is 176 tokens, not 256"):
        llm = LLM(tiny("qwen2"), device="cpu")
    assert llm.engine.scheduler.cache.pool.num_blocks == 12
    (output,) = llm.generate([[5] * 170], SamplingParams(max_tokens=None, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (6, "length")
    with pytest.raises(ValueError, match=r"0\.15, which holds 176 tokens.*256"):
        LLM(tiny("qwen2"), device="cpu", max_model_len=256)
