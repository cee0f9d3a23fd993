"""The frequencies of every RoPE type: worked examples, the shapes of real models, and Hugging Face's own functions."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.s01_forward.families import UnsupportedModel
from stages.s01_forward.rope import INV_FREQ, RopeConfig, read_rope, rope_table


def inv_freq(table: dict[str, Any], head_dim: int, **raw: Any) -> torch.Tensor:
    config = read_rope({"max_position_embeddings": 4096, "rope_parameters": table, **raw})
    return INV_FREQ[config.type](config, head_dim)


LLAMA3_SMALL = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_base_under_either_name():
    """A key that moved must not leave the default in charge. sgl-project/sglang#14745."""
    old = read_rope({"rope_theta": 1_000_000, "max_position_embeddings": 4096})
    new = read_rope(
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000}, "max_position_embeddings": 4096}
    )
    assert old == new
    assert INV_FREQ["default"](old, 16)[1].item() == pytest.approx(0.177828, abs=1e-6)
    assert read_rope({"max_position_embeddings": 1}).theta == 10_000.0


def test_the_table_beats_the_top_level():
    raw = {
        "rope_theta": 5e5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
        "max_position_embeddings": 9,
    }
    assert read_rope(raw).theta == 7.0
    raw = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "max_position_embeddings": 9}
    assert (read_rope(raw).theta, read_rope(raw).type, read_rope(raw).factor) == (5e5, "linear", 2.0)
    assert read_rope({**raw, "rope_scaling": None}).type == "default"


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_llama3_by_hand(key):
    """Parsed and used, under both spellings. lablup/mlxcel#1355."""
    table = {k: v for k, v in LLAMA3_SMALL.items() if k != "rope_type"} | {key: "llama3"}
    expected = torch.tensor([1.0, 0.0130423, 0.00125, 0.000125])
    torch.testing.assert_close(inv_freq(table, 8), expected, atol=0, rtol=1e-5)
    old = {k: v for k, v in table.items() if k != "rope_theta"}
    torch.testing.assert_close(inv_freq({}, 8, rope_scaling=old, rope_theta=10_000.0), expected, atol=0, rtol=1e-5)


def test_llama3_of_a_real_model():
    """Llama 3.2: indices 0-14 are kept, 15-17 blended, 18-31 divided by 32. lablup/mlxcel#1355."""
    table = {**LLAMA3_SMALL, "rope_theta": 500_000.0, "factor": 32.0, "original_max_position_embeddings": 8192}
    ratio = inv_freq({"rope_type": "default", "rope_theta": 500_000.0}, 64) / inv_freq(table, 64)
    torch.testing.assert_close(ratio[:15], torch.ones(15))
    torch.testing.assert_close(ratio[18:], torch.full((14,), 32.0))
    assert ((ratio[15:18] > 1) & (ratio[15:18] < 32)).all()
    assert inv_freq(table, 64)[16].item() == pytest.approx(4.29557e-4, rel=1e-5)


def test_linear_divides_every_rate():
    plain = inv_freq({"rope_type": "default"}, 16)
    torch.testing.assert_close(inv_freq({"rope_type": "linear", "factor": 4.0}, 16), plain / 4)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["linear", "llama3", "yarn"]),
    head_dim=st.sampled_from([8, 16, 64, 80, 128]),
    theta=st.sampled_from([1e4, 5e5, 1e6, 1e7]),
    factor=st.floats(1.0, 64.0),
    original=st.sampled_from([64, 4096, 8192, 32768]),
    extra=st.fixed_dictionaries(
        {},
        optional={
            "beta_fast": st.floats(8, 64),
            "beta_slow": st.floats(0.5, 4),
            "truncate": st.booleans(),
            "attention_factor": st.floats(0.5, 2.0),
            "mscale": st.floats(0.5, 1.5),
            "mscale_all_dim": st.floats(0.5, 1.5),
        },
    ),
)
def test_rates_of_hugging_face(kind, head_dim, theta, factor, original, extra):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.utils import logging

    table: dict[str, Any] = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "llama3":
        table |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind != "linear":
        table["original_max_position_embeddings"] = original
    if kind == "yarn":
        table |= extra
    logging.set_verbosity_error()  # it finds the drawn lengths odd
    theirs = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, max_position_embeddings=131_072,
        rope_parameters=dict(table),
    )  # fmt: skip
    expected, attention_factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
    config = read_rope({"rope_parameters": table, "max_position_embeddings": 131_072})
    torch.testing.assert_close(INV_FREQ[kind](config, head_dim), expected, atol=0, rtol=1e-5)
    assert config.attention_factor == pytest.approx(attention_factor, rel=1e-6)


def test_yarn_stretches_the_model():
    table = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = read_rope({"rope_parameters": table, "max_position_embeddings": 64})
    assert config.extended_length == 256
    del table["original_max_position_embeddings"]
    assert read_rope({"rope_parameters": table, "max_position_embeddings": 64}) == config
    assert config.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert read_rope({"rope_parameters": LLAMA3_SMALL, "max_position_embeddings": 512}).extended_length == 0


def test_tables_hold_every_position_in_fp32():
    cos, sin = rope_table(RopeConfig(), 16, 300, "cpu")
    assert cos.shape == sin.shape == (300, 8)
    assert cos.dtype == torch.float32
    angles = torch.arange(300.0)[:, None] * 10_000.0 ** (-torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(cos, angles.cos(), atol=1e-4, rtol=0)
    torch.testing.assert_close(sin, angles.sin(), atol=1e-4, rtol=0)
    scaled, _ = rope_table(RopeConfig(attention_factor=2.0), 16, 3, "cpu")
    torch.testing.assert_close(scaled, 2 * cos[:3])


@pytest.mark.parametrize(
    ("raw", "error", "words"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedModel, "'dynamic'.*, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "longrope"}}, UnsupportedModel, "'longrope'"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModel, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, UnsupportedModel, "partial_rotary_factor"),
        ({"rope_theta": 1}, ValueError, r"rope_theta is 1\.0"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, ValueError, r"factor is 0\.5"),
        ({"rope_scaling": {"type": "yarn"}}, KeyError, "factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, KeyError, "low_freq_factor"),
    ],
    ids=str,
)  # fmt: skip
def test_refused(raw, error, words):
    """What is not known is refused, not ignored. lablup/mlxcel#1355."""
    with pytest.raises(error, match=words):
        read_rope({"max_position_embeddings": 64, **raw})


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, UnsupportedModel, "full_attention"),
        ({"rope_scaling": {"factor": 4.0}}, ValueError, "factor of 4.0 needs a rope_type"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 4.0}},
            ValueError,
            "'linear'.*'default'",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e6}},
            ValueError,
            "disagree",
        ),
        ({"rope_theta": "1e4"}, ValueError, "rope_theta is '1e4'; it must be a number"),
        ({"rope_theta": True}, ValueError, "rope_theta is True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "8"}}, ValueError, "factor is '8'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8, "beta_fast": [1]}}, ValueError, r"beta_fast is \[1\]"),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, KeyError, "factor"),
        ({"original_max_position_embeddings": "8k"}, ValueError, "original_max_position_embeddings is '8k'"),
        ({"rope_theta": 0}, ValueError, "rope_theta is 0.0"),
        ({"rope_theta": float("nan")}, ValueError, "rope_theta is nan; it must be a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, ValueError, "factor is nan"),
    ],
    ids=str,
)
def test_settings_that_would_be_ignored_are_refused(keys, error, words):
    """A value that the file states is used or refused, never replaced by a default. lablup/mlxcel#1355."""
    with pytest.raises(error, match=words):
        read_rope({"max_position_embeddings": 64, **keys})
