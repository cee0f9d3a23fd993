"""RMSNorm, rotary embedding, attention and router, each against values worked out by hand and Hugging Face's own."""

import math

import pytest
import torch
import torch.nn.functional as F

from stages.s01_forward.layers import add_rms_norm, apply_rope, attention, norm_rope, rms_norm, silu_mul
from stages.s01_forward.moe import route


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class TestRmsNorm:
    def test_by_hand(self):
        """Mean square of 1, 2, 3, 4 is 7.5; its root 2.7386 divides them all, then the weight multiplies."""
        x, weight = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([1.0, 1.0, 1.0, 0.5])
        expected = torch.tensor([[0.36515, 0.73030, 1.09545, 0.73030]])
        torch.testing.assert_close(rms_norm(x, weight, 0.0), expected, atol=1e-5, rtol=0)

    def test_eps_counts_beside_small_rows(self):
        x = torch.full((1, 4), 1e-3)  # mean square 1e-6
        torch.testing.assert_close(rms_norm(x, torch.ones(4), 3e-6), torch.full((1, 4), 0.5))
        assert torch.equal(rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6), torch.zeros(2, 4))

    def test_every_row_by_itself(self):
        """Rows of a sequence, and heads of a token: only the last dimension is averaged."""
        x, weight = random(3, 5, 8), random(8, seed=1)
        normed = rms_norm(x, weight, 1e-5)
        for t in range(3):
            for head in range(5):
                torch.testing.assert_close(normed[t, head], rms_norm(x[t, head], weight, 1e-5))

    def test_bf16_is_cast_back_before_the_weight(self):
        """1.0954 -> 1.09375, times 1.703125 -> 1.859375. Multiplied first it would be 1.8671875."""
        x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.bfloat16)
        weight = torch.full((4,), 1.7, dtype=torch.bfloat16)
        normed = rms_norm(x, weight, 0.0)
        assert normed.dtype == torch.bfloat16
        assert normed[0, 2].item() == 1.859375

    def test_fp16_squares_do_not_overflow(self):
        x = torch.full((1, 4), 1000.0, dtype=torch.float16)
        normed = rms_norm(x, torch.ones(4, dtype=torch.float16), 1e-6)
        words = f"1000 squared is too large for fp16: take the mean of the squares in fp32; got {normed.tolist()}"
        assert torch.equal(normed, torch.ones(1, 4, dtype=torch.float16)), words

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_bits_of_hugging_face(self, dtype):
        from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

        theirs = Qwen2RMSNorm(64, eps=1e-5).to(dtype)
        theirs.weight.data = random(64, seed=1).to(dtype)
        x = (3 * random(7, 64)).to(dtype)
        assert torch.equal(rms_norm(x, theirs.weight.data, 1e-5), theirs(x))


class TestAddRmsNorm:
    def test_gives_the_norm_of_the_sum_and_the_sum(self):
        x, residual, weight = random(3, 8), random(3, 8, seed=1), random(8, seed=2)
        normed, total = add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, x + residual)
        reference = total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        torch.testing.assert_close(normed, reference)
        assert torch.equal(residual, random(3, 8, seed=1)), "the stream that came in is not written to"


class TestRope:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])  # [T=1, N=1, D=4]

    @staticmethod
    def angles(positions: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        rates = 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
        angles = positions[:, None] * rates  # [T, D/2]
        return angles.cos(), angles.sin()

    def test_halves_are_paired(self):
        """Not neighbours: jzhang38/TinyLlama#24."""
        rotated = apply_rope(self.x, *self.angles(torch.tensor([1.0]), 4))
        expected = torch.tensor([[[-1.9841, 1.9599, 2.4624, 4.0198]]])
        torch.testing.assert_close(rotated, expected, atol=5e-5, rtol=0)

    def test_position_0_changes_nothing(self):
        assert torch.equal(apply_rope(self.x, *self.angles(torch.tensor([0.0]), 4)), self.x)

    def test_each_token_turns_by_its_own_angle_in_all_heads(self):
        x, positions = random(5, 3, 8), torch.tensor([0.0, 7.0, 7.0, 2.0, 100.0])
        cos, sin = self.angles(positions, 8)
        rotated = apply_rope(x, cos, sin)
        assert rotated.shape == x.shape
        for t in range(5):
            for head in range(3):
                alone = apply_rope(x[t : t + 1, head : head + 1], cos[t : t + 1], sin[t : t + 1])
                torch.testing.assert_close(rotated[t, head], alone[0, 0])

    def test_only_the_distance_counts(self):
        """<q at p, k at s> depends on p - s alone, and a rotation keeps lengths."""
        q, k = random(1, 1, 8), random(1, 1, 8, seed=1)

        def product(p: float, s: float) -> float:
            turned = [apply_rope(x, *self.angles(torch.tensor([at]), 8)) for x, at in ((q, p), (k, s))]
            torch.testing.assert_close(turned[0].norm(), q.norm())
            return (turned[0] * turned[1]).sum().item()

        assert product(9.0, 4.0) == pytest.approx(product(25.0, 20.0), abs=1e-4)
        assert product(9.0, 4.0) != pytest.approx(product(4.0, 9.0), abs=1e-2)

    def test_bf16_is_rotated_in_fp32(self):
        x, (cos, sin) = random(4, 2, 8).bfloat16(), self.angles(torch.arange(300.0, 304.0), 8)
        rotated = apply_rope(x, cos, sin)
        assert rotated.dtype == torch.bfloat16
        a, b = x.float()[..., :4], x.float()[..., 4:]
        c, s = cos[:, None], sin[:, None]
        assert torch.equal(rotated, torch.cat((a * c - b * s, b * c + a * s), -1).bfloat16())

    def test_same_as_hugging_face(self):
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        q, k, (cos, sin) = random(6, 3, 16), random(6, 2, 16, seed=1), self.angles(torch.arange(6.0), 16)
        full = [torch.cat((table, table), -1)[None] for table in (cos, sin)]  # [1, T, D]
        theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *full)
        for mine, other in zip((q, k), theirs, strict=True):
            torch.testing.assert_close(apply_rope(mine, cos, sin), other[0].transpose(0, 1))


class TestNormRope:
    def test_norm_comes_first(self):
        """Norm, then rotation by 1 rad and 0.01 rad; the other order gives [-0.7245, 1.4313, 0.8991, 1.4678]."""
        x, q_weight, k_weight = TestRope.x, torch.tensor([1.0, 2.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, 2.0])
        q, k = norm_rope(x, x, q_weight, k_weight, *TestRope.angles(torch.tensor([1.0]), 4), 0.0)
        torch.testing.assert_close(q, torch.tensor([[[-0.7245, 1.4459, 0.8991, 1.4751]]]), atol=1e-4, rtol=0)
        torch.testing.assert_close(k, torch.tensor([[[-0.7245, 0.7010, 0.8991, 2.9283]]]), atol=1e-4, rtol=0)

    def test_bf16_is_rounded_after_the_norm_and_after_the_rotation(self):
        q, k = random(4, 6, 8).bfloat16(), random(4, 2, 8, seed=1).bfloat16()
        weights = [1 + 0.3 * random(8, seed=n).bfloat16() for n in (2, 3)]
        angles = TestRope.angles(torch.tensor([0.0, 9.0, 9.0, 300.0]), 8)
        out = norm_rope(q, k, *weights, *angles, 1e-5)
        for mine, x, weight in zip(out, (q, k), weights, strict=True):
            assert mine.dtype == torch.bfloat16
            assert torch.equal(mine, apply_rope(rms_norm(x, weight, 1e-5), *angles))

    def test_without_weights_it_only_rotates(self):
        q, k, angles = random(3, 4, 8), random(3, 1, 8, seed=1), TestRope.angles(torch.arange(3.0), 8)
        for mine, x in zip(norm_rope(q, k, None, None, *angles, 1e-5), (q, k), strict=True):
            assert torch.equal(mine, apply_rope(x, *angles))


class TestAttention:
    def test_by_hand(self):
        """Two tokens, one head: the first sees itself alone; the second weighs both by softmax(0, ln 3)."""
        q = torch.tensor([[[5.0]], [[1.0]]])  # [T=2, Hq=1, D=1]
        k = torch.tensor([[[0.0]], [[math.log(3)]]])
        v = torch.tensor([[[10.0]], [[20.0]]])
        expected = torch.tensor([[[10.0]], [[0.25 * 10 + 0.75 * 20]]])
        torch.testing.assert_close(attention(q, k, v, 1.0), expected)

    @pytest.mark.parametrize("scale", [0.25, 1.0])
    def test_scale_multiplies_the_scores(self, scale):
        q, k, v = torch.ones(1, 1, 1), torch.tensor([[[0.0]], [[1.0]]]), torch.tensor([[[0.0]], [[1.0]]])
        assert attention(q, k, v, scale).item() == pytest.approx(1 / (1 + math.exp(-scale)), abs=1e-6)

    @pytest.mark.parametrize(("T", "S"), [(1, 1), (5, 5), (1, 6), (3, 7), (6, 7)])
    @pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (7, 1)])
    def test_last_tokens_of_longer_sequences(self, T, S, heads, kv_heads):
        """The T queries are the last of S tokens, and query head h reads KV head h // group."""
        q, k, v = random(T, heads, 8), random(S, kv_heads, 8, seed=1), random(S, kv_heads, 8, seed=2)
        out = attention(q, k, v, 8**-0.5)
        assert out.shape == (T, heads, 8)
        for t in range(T):
            sees = S - T + t + 1
            for h in range(heads):
                kv = h // (heads // kv_heads)
                weights = (k[:sees, kv] @ q[t, h] * 8**-0.5).softmax(0)
                torch.testing.assert_close(out[t, h], weights @ v[:sees, kv], atol=1e-5, rtol=1e-5)

    def test_the_future_has_no_influence(self):
        q, k, v = random(4, 2, 8), random(4, 1, 8, seed=1), random(4, 1, 8, seed=2)
        before = attention(q, k, v, 0.3)
        k[3], v[3] = 1e4, 1e4
        after = attention(q, k, v, 0.3)
        assert torch.equal(before[:3], after[:3])
        assert not torch.equal(before[3], after[3])

    def test_large_scores_stay_finite(self):
        q, k, v = 1e4 * random(3, 1, 8), 1e4 * random(3, 1, 8, seed=1), random(3, 1, 8, seed=2)
        out = attention(q, k, v, 1.0)
        assert torch.isfinite(out).all()
        torch.testing.assert_close(out[0], v[0])

    def test_bf16_sums_a_thousand_small_weights(self):
        """Softmax in bf16 would round the weights 1/1001 ... differently; the average of ones must stay one."""
        q, k = torch.zeros(1, 1, 8, dtype=torch.bfloat16), torch.zeros(1001, 1, 8, dtype=torch.bfloat16)
        out = attention(q, k, torch.ones_like(k), 1.0)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), torch.ones(1, 1, 8), atol=4e-3, rtol=0)


class TestSiluMul:
    def test_the_gate_comes_first(self):
        packed = torch.tensor([[1.0, -2.0, 3.0, 5.0]])  # gate 1, -2; up 3, 5
        expected = torch.tensor([[3 * 1 / (1 + math.exp(-1)), 5 * -2 / (1 + math.exp(2))]])
        torch.testing.assert_close(silu_mul(packed), expected)

    def test_any_shape_in_front(self):
        packed = random(3, 2, 8)
        torch.testing.assert_close(silu_mul(packed), F.silu(packed[..., :4]) * packed[..., 4:])


class TestRouter:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [-1.0, 0.0, 1.0, 2.0]])

    @pytest.mark.parametrize(
        ("normalise", "expected"),
        [(False, [0.643914, 0.236883]), (True, [0.731059, 0.268941])],
        ids=["raw", "summed to 1"],
    )
    def test_softmax_over_all_experts_comes_first(self, normalise, expected):
        """Only with `norm_topk_prob` do the chosen weights sum to one. lablup/mlxcel#391."""
        weights, experts = route(self.logits, 2, normalise)
        torch.testing.assert_close(weights, torch.tensor([expected] * 2), atol=1e-6, rtol=0)
        assert experts.tolist() == [[0, 1], [3, 2]]

    @pytest.mark.parametrize("normalise", [False, True])
    def test_all_experts_chosen(self, normalise):
        weights, experts = route(self.logits, 4, normalise)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2))
        torch.testing.assert_close(weights, self.logits.softmax(-1).gather(-1, experts))

    def test_bf16_logits_are_weighed_in_fp32(self):
        logits = random(16, 8).bfloat16()
        weights, experts = route(logits, 3, False)
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights, logits.float().softmax(-1).gather(-1, experts))

    def test_one_expert_keeps_its_probability(self):
        weights, experts = route(self.logits, 1, False)
        assert experts.tolist() == [[0], [3]]
        torch.testing.assert_close(weights, torch.full((2, 1), 0.643914), atol=1e-6, rtol=0)
