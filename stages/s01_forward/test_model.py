"""The forward pass against Hugging Face: logits of every position, the state after every layer, every variant."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from reference import hf
from reference.checkpoints import MODEL_VOCAB_SIZE, TINY, tiny_names
from stages.s01_forward import layers
from stages.s01_forward.config import ModelConfig
from stages.s01_forward.context import NoCache
from stages.s01_forward.llm import LLM, hidden_states
from stages.s01_forward.loader import load_model
from stages.s01_forward.model import Attention, Model
from stages.s01_forward.moe import SparseMLP
from stages.s01_forward.ops import TORCH_OPS
from stages.s01_forward.rope import RopeConfig, rope_table
from stages.s01_forward.sampling_params import SamplingParams
from tests.scripted import edited

TOLERANCE = 1e-4
NAN = float("nan")
every_checkpoint = pytest.mark.parametrize("name", [name for name, made in TINY.items() if made.dtype == "float32"])


def some_ids(count: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(MODEL_VOCAB_SIZE) for _ in range(count)]


def logits_of(model: Model, ids: list[int]) -> Tensor:
    return model.logits(hidden_states(model, ids)).float()


@every_checkpoint
def test_logits_of_every_position(name, tiny):
    """`pytest -s` prints the largest difference of each checkpoint."""
    folder = tiny(name)
    model = load_model(folder)
    worst = 0.0
    for ids in (some_ids(1), some_ids(2, 1), some_ids(100, 2), [5] * 40, some_ids(255, 3)):
        mine, theirs = logits_of(model, ids), hf.logits(folder, ids)
        assert mine.shape == (len(ids), MODEL_VOCAB_SIZE)
        worst = max(worst, (mine - theirs).abs().max().item())
    print(f"\n{name}: largest logit difference to Hugging Face {worst:.1e}")
    assert worst <= TOLERANCE


@every_checkpoint
def test_state_after_every_layer(name, tiny):
    """The residual stream; a mistake is found in the layer that makes it."""
    folder, ids = tiny(name), some_ids(60)
    model = load_model(folder)
    states: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _m, _i, out: states.append(out[0] + out[1])) for layer in model.layers]
    hidden_states(model, ids)
    for hook in hooks:
        hook.remove()
    theirs = hf.hidden_states(folder, ids)
    assert len(states) == len(theirs) == TINY[name].layers
    for layer, (mine, other) in enumerate(zip(states, theirs, strict=True)):
        assert (mine - other).abs().max().item() <= TOLERANCE, f"layer {layer} of {name}"


def test_bf16_stays_near_hugging_face(tiny):
    """Rounding differs, since angles are never in bf16 here: the same scale of error as bf16 itself, and no more."""
    folder, ids = tiny("llama-bf16"), some_ids(60)
    model = load_model(folder)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    exact = hf.logits(folder, ids, torch.float32)
    mine = (logits_of(model, ids) - exact).abs()
    theirs = (hf.logits(folder, ids, torch.bfloat16) - exact).abs()
    assert mine.mean() <= 1.2 * theirs.mean()
    assert mine.max() <= 2.0 * theirs.max()


def test_positions_are_explicit(tiny):
    """A shift of all positions changes nothing; an order of tokens told by positions alone is kept."""
    model, ids = load_model(tiny("qwen3")), torch.tensor(some_ids(20))
    at = torch.arange(20)
    with torch.inference_mode():
        first = model(ids, at, NoCache())
        torch.testing.assert_close(model(ids, at + 100, NoCache()), first, atol=1e-4, rtol=0)
        assert (model(ids, at * 2, NoCache()) - first).abs().max() > 1e-2


def test_logits_only_of_the_rows_that_are_asked_for(tiny):
    model = load_model(tiny("qwen2"))
    hidden = hidden_states(model, some_ids(9))
    assert hidden.shape == (9, TINY["qwen2"].hidden)
    torch.testing.assert_close(model.logits(hidden[[3, 8]]), model.logits(hidden)[[3, 8]])


def test_heads_are_normed_before_they_are_rotated():
    """Qwen3's order; with norm weights of one nobody could tell. vllm-project/vllm-metal#660."""
    config = ModelConfig(
        architecture="", vocab_size=1, hidden_size=4, intermediate_size=1, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=4, rms_norm_eps=0.0, max_position=2, rope=RopeConfig(), qkv_bias=False, o_bias=False, mlp_bias=False,
        qk_norm=True, tie_word_embeddings=True, moe=None, dtype=None, eos_token_ids=frozenset(),
    )  # fmt: skip
    layer = Attention(config, 0, TORCH_OPS).to_empty(device="cpu")
    layer.qkv_proj.weight.copy_(torch.eye(4).repeat(3, 1))
    layer.o_proj.weight.copy_(torch.eye(4))
    layer.q_norm.weight.copy_(torch.tensor([1.0, 2.0, 1.0, 1.0]))
    layer.k_norm.weight.copy_(torch.tensor([1.0, 1.0, 1.0, 2.0]))
    seen: list[Tensor] = []

    class Spy:
        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen.extend((q, k, v))
            return v

    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    cos, sin = rope_table(config.rope, 4, 2, "cpu")
    out = layer(x, cos[1:], sin[1:], Spy())
    q, k, v = (tensor.flatten() for tensor in seen)
    torch.testing.assert_close(q, torch.tensor([-0.7245, 1.4459, 0.8991, 1.4751]), atol=1e-4, rtol=0)
    assert (k - q).abs().max() > 0.1, "keys have a norm of their own"
    assert torch.equal(v, x[0]), "values are neither normed nor rotated"
    assert torch.equal(out, x)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_moe"])
def test_operations_may_write_over_the_inputs_that_ops_names(name, tiny):
    """Kernels of later stages do: the residual stream, and q and k where they lie beside v."""

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return layers.rms_norm(residual.add_(x), weight, eps), residual

    def norm_rope(q: Tensor, k: Tensor, *rest) -> tuple[Tensor, Tensor]:
        for old, new in zip((q, k), layers.norm_rope(q, k, *rest), strict=True):
            old.copy_(new)
        return q, k

    ops = replace(TORCH_OPS, add_rms_norm=add_rms_norm, norm_rope=norm_rope)
    ids = some_ids(30)
    assert torch.equal(logits_of(load_model(tiny(name), ops=ops), ids), logits_of(load_model(tiny(name)), ids))


def test_scale_is_that_of_the_head(tiny):
    """head_dim 16 beside a hidden size of 48 and 4 heads: 1 / sqrt(16). NVIDIA/TensorRT-LLM#5912."""
    q = torch.zeros(2, 1, 16)
    q[1, 0, 0] = 1.0
    k, v = torch.zeros(2, 1, 16), torch.zeros(2, 1, 16)
    k[1, 0, 0], v[1, 0, 0] = 4.0, 1.0
    out = NoCache().attend(0, q, k, v)
    assert out[1, 0, 0].item() == pytest.approx(torch.tensor([0.0, 1.0]).softmax(0)[1].item(), abs=1e-6)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe-raw"])
def test_experts_one_token_at_a_time(name, tiny):
    """The grouped product against a loop over tokens and experts, and each sparse layer where the config puts it."""
    model = load_model(tiny(name))
    moe = model.config.moe
    assert [isinstance(layer.mlp, SparseMLP) for layer in model.layers] == [
        moe.is_sparse(i) for i in range(len(model.layers))
    ]
    mlp = next(layer.mlp for layer in model.layers if isinstance(layer.mlp, SparseMLP))
    x = torch.randn(17, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros_like(x)
    for t in range(17):
        probs = (mlp.gate.weight @ x[t]).softmax(-1)
        best = probs.topk(moe.top_k)
        share = best.values / best.values.sum() if moe.norm_topk_prob else best.values
        for weight, expert in zip(share, best.indices.tolist(), strict=True):
            gate, up = (mlp.experts.gate_up_proj[expert] @ x[t]).chunk(2)
            expected[t] += weight * (mlp.experts.down_proj[expert] @ (gate / (1 + (-gate).exp()) * up))
    torch.testing.assert_close(mlp(x), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(mlp(x[:1]), expected[:1], atol=1e-5, rtol=1e-4)


def test_experts_that_nobody_chose(tiny):
    """All tokens to the same two of eight experts: the others have no rows."""
    mlp = load_model(tiny("qwen3_moe")).layers[0].mlp
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).expand(9, 64)
    torch.testing.assert_close(mlp(x), mlp(x[:1]).expand(9, 64))


def test_tied_head_is_the_embedding_itself(tiny):
    model = load_model(tiny("qwen3"))
    assert model.lm_head.weight is model.embed_tokens.weight
    untied = load_model(tiny("qwen2"))
    assert untied.lm_head.weight is not untied.embed_tokens.weight


def test_every_variant_is_compared():
    assert set(tiny_names()) == {*TINY}
    assert {made.family for made in TINY.values()} == {"qwen2", "qwen3", "qwen3_moe", "llama"}


def test_core_can_be_read_in_one_sitting():
    folder = Path(__file__).parent
    lines = sum(
        len((folder / f"{name}.py").read_text(encoding="utf-8").splitlines())
        for name in ("config", "layers", "model", "llm")
    )
    assert lines < 300


def test_both_spellings_of_the_rotary_base_give_the_same_logits(tiny):
    """A base other than the default reaches the angles, under its old key and its new one. sgl-project/sglang#14745."""
    source, ids = tiny("qwen3"), some_ids(40, 4)

    def with_rope(name: str, **keys) -> Path:
        return edited(source, source.parent / name, json_files={"config.json": {"rope_parameters": ..., **keys}})

    old = with_rope("old-theta", rope_theta=1e6)
    new = with_rope("new-theta", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    first, second, default = (logits_of(load_model(f), ids) for f in (old, new, with_rope("no-theta")))
    assert torch.equal(first, second)
    assert (first - hf.logits(new, ids)).abs().max() <= TOLERANCE
    assert (first - default).abs().max() > 0.1


def test_a_prompt_whose_logits_are_nan_is_an_error_not_a_score(tiny):
    llm = LLM(tiny("qwen2"), device="cpu")
    llm.model.embed_tokens.weight[7] = NAN
    for max_tokens in (0, 3):
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=1, ignore_eos=True)
        bad, good = llm.generate([[5, 7], [5, 6]], params)
        assert (bad.finish_reason, bad.prompt_logprobs, bad.token_ids) == ("error", None, [])
        assert "not finite" in bad.outputs[0].error
        assert (good.finish_reason, len(good.prompt_logprobs), len(good.token_ids)) == ("length", 2, max_tokens)
