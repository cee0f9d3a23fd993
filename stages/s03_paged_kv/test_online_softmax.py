"""Attention block by block against the gathered one: scattered blocks, and NaN wherever nobody should look."""

import pytest
import torch

from stages.s03_paged_kv.attention_cases import make_case
from stages.s03_paged_kv.online_softmax import online_softmax_attention
from stages.s03_paged_kv.paged_attention import make_plan, paged_attention

BATCHES = {
    "decode": ([1] * 7, [1, 15, 16, 17, 63, 64, 65]),
    "prefill": ([15, 16, 17, 2, 64], [15, 16, 17, 2, 64]),
    "chunks": ([5, 16, 3, 31], [16, 33, 47, 32]),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("group", "block_size"), [(1, 16), (3, 32), (7, 16)])
def test_equals_paged_attention(name, group, block_size):
    q_lens, kv_lens = BATCHES[name]
    case = make_case(q_lens, kv_lens, group=group, head_dim=64, block_size=block_size)
    plan = make_plan(case.q_lens, case.kv_lens, case.block_table, case.shape)
    expected = paged_attention(*case.inputs, plan, case.scale)
    start = 0
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        q, table = case.q[start : start + q_len], case.block_table[row].tolist()
        out = online_softmax_attention(q, case.k_cache, case.v_cache, table, kv_len, case.scale)
        torch.testing.assert_close(out, expected[start : start + q_len], atol=3e-6, rtol=0)
        start += q_len


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_scores_too_large_for_exp(order):
    """Scores of 0, 500 and 1000 in blocks of their own, rising and falling: exp(1000) is infinite in any float."""
    k = torch.zeros(4, 4, 1, 16)
    for block, score in zip((1, 2, 3), (0.0, 500.0, 1000.0), strict=True):
        k[block, :, :, 0] = score
    v = torch.randn(4, 4, 1, 16)
    q = torch.zeros(1, 1, 16)
    q[..., 0] = 1.0
    out = online_softmax_attention(q, k, v, [1 + i for i in order], 12, 1.0)
    torch.testing.assert_close(out[0, 0], v[3].mean(0)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    """1,024 equal weights: sums of 16-bit numbers would stall far below."""
    q, k = torch.zeros(1, 2, 16, dtype=dtype), torch.zeros(65, 16, 1, 16, dtype=dtype)
    v = torch.ones(65, 16, 1, 16, dtype=dtype)
    out = online_softmax_attention(q, k, v, list(range(1, 65)), 1024, 0.25)
    assert out.dtype == dtype
    assert torch.equal(out, torch.ones(1, 2, 16, dtype=dtype))
