"""The cache's books and its memory: what a token costs, what a budget holds, who has which page."""

import dataclasses

import pytest
import torch

from reference.checkpoints import TINY, tiny_names
from stages.s01_forward.config import ModelConfig
from stages.s02_kv_cache.contiguous_cache import ContiguousCache
from stages.s02_kv_cache.kv_store import KVStore, kv_bytes_per_token, tokens_that_fit
from stages.s02_kv_cache.llm import LLM
from stages.s02_kv_cache.sequence import Sequence


@pytest.fixture
def config(tiny) -> ModelConfig:
    """3 layers, 2 KV heads, head_dim 16: 192 elements per token."""
    return ModelConfig.from_dir(tiny("qwen2"))


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_bytes_per_token_by_hand(config):
    """head_dim 8 beside a hidden size of 48 and 14 heads of which 2 hold K/V. NVIDIA/TensorRT-LLM#5912."""
    assert kv_bytes_per_token(config, torch.float32) == 2 * 3 * 2 * 16 * 4 == 768
    assert kv_bytes_per_token(config, torch.bfloat16) == 384
    other = dataclasses.replace(
        config, num_layers=28, hidden_size=1024, num_heads=16, num_kv_heads=8, head_dim=128
    )  # Qwen3-0.6B
    assert kv_bytes_per_token(other, torch.bfloat16) == 114_688


@pytest.mark.parametrize("name", tiny_names())
def test_bytes_per_token_are_what_the_store_takes(name, tiny):
    config = ModelConfig.from_dir(tiny(name))
    for dtype in (torch.float32, torch.float16):
        store = KVStore(config, 3, 5, device="cpu", dtype=dtype)
        assert store.data.nbytes == 15 * kv_bytes_per_token(config, dtype)
        keys, values = store.layer(config.num_layers - 1)
        assert keys.shape == values.shape == (3, 5, TINY[name].kv_heads, config.head_dim)


def test_store_is_written_through_its_views(config):
    store = KVStore(config, 4, 2, device="cpu", dtype=torch.float32)
    store.data.zero_()
    keys, values = store.layer(1)
    keys[2], values[2] = 1.0, 2.0
    store.copy_blocks([(2, 0), (0, 3)])
    assert store.data[1, :, :, 0, 0, 0].tolist() == [[1, 0, 1, 1], [2, 0, 2, 2]]
    assert not store.data[[0, 2]].any()


@pytest.mark.parametrize(("block_size", "spare"), [(1, 0), (16, 1), (7, 2), (256, 1), (1000, 1)])
def test_too_small_budget_says_what_fits(config, block_size, spare):
    """What the error proposes is enough, and just enough."""

    def fit(megabytes: float, length: int) -> int:
        return tokens_that_fit(
            megabytes, config, torch.float32, length, block_size=block_size, spare_blocks=spare
        )  # 768 bytes each

    with pytest.raises(
        ValueError, match=r"kv_cache_mb is 0\.5, which holds \d+ tokens of 768 bytes.*grow to 9000 tokens"
    ) as error:
        fit(0.5, 9000)
    needed, *rest = (
        int(word.strip(","))
        for word in str(error.value).split("raise kv_cache_mb to ")[1].split()
        if word.strip(",").isdigit()
    )
    assert fit(needed, 9000) >= 9000
    with pytest.raises(ValueError, match="kv_cache_mb"):
        fit(needed - 1, 9000)
    if rest:
        assert fit(0.5, rest[0]) == rest[0]
        assert f"holds {rest[0]} tokens" in str(error.value)
        with pytest.raises(ValueError, match="kv_cache_mb"):
            fit(0.5, rest[0] + 1)
    else:
        assert fit(0.5, 0) == 0


def test_exact_budget_is_enough(config):
    assert tokens_that_fit(768 * 100 / 2**20, config, torch.float32, 100) == 100
    with pytest.raises(ValueError, match="holds 99 tokens of 768 bytes.*lower max_model_len to 99"):
        tokens_that_fit((768 * 100 - 1) / 2**20, config, torch.float32, 100)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_mb": 0.1}, r"kv_cache_mb is 0\.1, which holds 136 tokens.*256.*raise kv_cache_mb to 1,.*to 136"),
        ({"kv_cache_mb": 1e-6}, r"holds 0 tokens.*raise kv_cache_mb to 1$"),
        ({"kv_cache_mb": 0}, "kv_cache_mb.*0"),
        ({"kv_cache_mb": -1}, "kv_cache_mb.*-1"),
        ({"kv_cache_mb": float("nan")}, "kv_cache_mb.*nan"),
        ({"kv_cache_mb": float("inf")}, "kv_cache_mb.*inf"),
        ({"kv_cache_mb": "2048"}, "kv_cache_mb.*'2048'"),
        ({"max_num_seqs": 0}, "max_num_seqs.*0.*1"),
        ({"max_num_seqs": 2.0}, "max_num_seqs.*2.0"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, words, tiny):
    with pytest.raises((ValueError, TypeError), match=words):
        LLM(tiny("qwen2"), device="cpu", **options)


def test_memory_is_that_of_the_pages_and_within_the_budget(tiny):
    small = LLM(tiny("qwen2"), device="cpu", kv_cache_mb=0.2, max_model_len=100)  # 273 tokens: 2 pages of 100
    assert small.cache.num_pages == 2
    assert small.store.data.nbytes == 2 * 100 * 768 <= 0.2 * 2**20
    roomy = LLM(tiny("qwen2"), device="cpu", max_num_seqs=3, max_model_len=100)
    assert roomy.cache.num_pages == 3, "no more is taken than so many sequences can use"
    assert roomy.store.data.nbytes == 3 * 100 * 768


# ---- pages -----------------------------------------------------------------------------------------------------------


def test_a_page_is_taken_once_and_given_back_once():
    cache = ContiguousCache(2, 10)
    first, second, third = (Sequence([1, 2, 3]) for _ in range(3))
    assert [cache.match(first), cache.reserve(first, 3), cache.reserve(first, 10), cache.reserve(second, 3)] == [
        0,
        [],
        [],
        [],
    ]
    assert len({*first.block_table, *second.block_table}) == 2
    assert cache.reserve(third, 3) is None
    assert (third.block_table, cache.free_pages) == ([], [])
    cache.commit(first, 3)
    assert (first.num_kv, first.num_new) == (3, 0)
    cache.release(first)
    cache.release(first)
    assert (first.num_kv, first.block_table, len(cache.free_pages)) == (0, [], 1)
    assert cache.reserve(third, 3) == []


def test_no_sequence_outgrows_its_page():
    cache, sequence = ContiguousCache(2, 10), Sequence([1])
    with pytest.raises(ValueError, match="11 tokens.*page of 10"):
        cache.reserve(sequence, 11)
    assert (sequence.block_table, len(cache.free_pages)) == ([], 2)
