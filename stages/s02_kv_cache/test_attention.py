"""Attention over cached keys against stage 01's, which spells the formula out."""

import pytest
import torch

from stages.s01_forward.layers import attention
from stages.s02_kv_cache.attention import cached_attention, causal_mask

LENGTHS = [(1, 1), (1, 2), (1, 33), (2, 2), (17, 17), (2, 3), (5, 33), (16, 17), (32, 33)]


def qkv(T: int, S: int, group: int, kv_heads: int = 2, D: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1000 * T + S)
    q = torch.randn(T, kv_heads * group, D, generator=rng)
    k, v = torch.randn(2, S, kv_heads, D, generator=rng)
    return q, k, v


@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize(("T", "S"), LENGTHS)
def test_equals_stage_01(T, S, group):
    """The newest T of S tokens: T = S is a prefill, T = 1 a decode, and all between must be right too."""
    q, k, v = qkv(T, S, group)
    torch.testing.assert_close(cached_attention(q, k, v, 0.3), attention(q, k, v, 0.3), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("T", "S"), LENGTHS)
def test_is_the_end_of_the_whole(T, S):
    """T new tokens over a cache give the last T rows of all S tokens at once."""
    q, k, v = qkv(S, S, group=3)
    whole = attention(q, k, v, 0.25)
    torch.testing.assert_close(cached_attention(q[S - T :], k, v, 0.25), whole[S - T :], atol=1e-5, rtol=0)


@pytest.mark.parametrize("T", [1, 4, 9])
def test_takes_slices_of_larger_tensors(T):
    """q, k and v as a packed projection and a page hold them: tokens are not side by side in memory."""
    packed, page = torch.randn(T, 10, 16), torch.randn(2, 20, 2, 16)
    q, k, v = packed[:, :6], page[0, :9], page[1, :9]
    torch.testing.assert_close(cached_attention(q, k, v, 0.25), attention(q, k, v, 0.25), atol=1e-5, rtol=0)


def test_causal_mask_is_aligned_at_the_end():
    assert causal_mask(2, 5, torch.device("cpu")).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert causal_mask(1, 3, torch.device("cpu")).all()
