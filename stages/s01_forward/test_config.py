"""`config.json` as model folders spell it: every family, every spelling, every default, and what is refused."""

import json
from typing import Any

import pytest
import torch

from reference.checkpoints import TINY, tiny_names
from stages.s01_forward.config import ModelConfig
from stages.s01_forward.families import FAMILIES, MoeConfig, UnsupportedModel
from stages.s01_forward.loader import load_model

BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


@pytest.fixture
def read(tmp_path):
    """`read("Qwen2", key=value, ...)`: the config of a file with these keys; a key with the value `...` is left out."""

    def read_config(family: str = "Llama", generation: dict[str, Any] | None = None, **keys: Any) -> ModelConfig:
        raw = {"architectures": [f"{family}ForCausalLM"], **BASE, **(MOE if "Moe" in family else {}), **keys}
        raw = {k: v for k, v in raw.items() if v is not ...}
        (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
        return ModelConfig.from_dir(tmp_path)

    return read_config


@pytest.mark.parametrize("name", tiny_names())
def test_files_that_hugging_face_writes(name, tiny):
    made, config = TINY[name], ModelConfig.from_dir(tiny(name))
    shapes = (config.hidden_size, config.num_heads, config.num_kv_heads, config.num_layers)
    assert shapes == (made.hidden, made.heads, made.kv_heads, made.layers)
    assert config.head_dim == (made.head_dim or made.hidden // made.heads)
    assert config.tie_word_embeddings == made.tied
    assert config.qk_norm == made.family.startswith("qwen3")
    assert config.qkv_bias == (made.family == "qwen2" or "attention_bias" in made.extra)
    assert config.o_bias == ("attention_bias" in made.extra)
    assert config.dtype == getattr(torch, made.dtype)
    assert config.eos_token_ids == {0, 2}
    assert config.rope.type == made.extra.get("rope_parameters", {}).get("rope_type", "default")
    assert (config.moe is not None) == (made.family == "qwen3_moe")


def test_max_len_is_that_of_the_stretched_model(read):
    assert read().max_len == 256
    table = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert read("Qwen2", rope_parameters=table).max_len == 1024
    assert read("Qwen2", rope_parameters=table, max_position_embeddings=1024).max_len == 1024


@pytest.mark.parametrize(("family", "expected"), [("Llama", 8), ("Qwen2", 8), ("Qwen3", 128), ("Qwen3Moe", 8)], ids=str)
def test_head_dim(family, expected, read):
    """The file's own, or what Hugging Face takes where it has none. NVIDIA/TensorRT-LLM#5912."""
    assert read(family, head_dim=16).head_dim == 16
    assert read(family).head_dim == expected


def test_head_dim_shapes_the_weights(tiny):
    """q 64, k and v 32 rows from a hidden size of 48, not hidden // heads. NVIDIA/TensorRT-LLM#5912."""
    model = load_model(tiny("qwen3-untied-g1"))
    layer = model.layers[0].self_attn
    assert layer.qkv_proj.weight.shape == (3 * 64, 48)
    assert layer.o_proj.weight.shape == (48, 64)
    assert layer.q_norm.weight.shape == layer.k_norm.weight.shape == (16,)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Qwen3Moe"])
def test_kv_heads_must_be_stated_by_qwen(family, read):
    """Hugging Face would take a constant that is seldom meant: asked for instead."""
    with pytest.raises(ValueError, match="num_key_value_heads"):
        read(family, num_key_value_heads=...)
    assert read(family, num_key_value_heads=None).num_kv_heads == 4


def test_kv_heads_of_llama_default_to_the_query_heads(read):
    assert read("Llama", num_key_value_heads=...).num_kv_heads == 4


def test_defaults(read):
    config = read("Qwen3")
    assert config.rms_norm_eps == 1e-6
    assert (config.tie_word_embeddings, config.qkv_bias, config.mlp_bias) == (False, False, False)
    assert config.dtype is None
    assert config.eos_token_ids == frozenset()


def test_biases(read):
    qwen = read("Qwen2", attention_bias=False)
    assert (qwen.qkv_bias, qwen.o_bias) == (True, False), "fixed in the architecture, whatever the file says"
    llama = read("Llama", attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    assert not read("Qwen3", mlp_bias=True).mlp_bias


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16"])
def test_dtype_under_either_name(key, name, read):
    """sgl-project/sglang#37064."""
    assert read(**{key: name}).dtype == torch.bfloat16
    assert read(**{key: "auto"}).dtype is None


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, {2}),
        ([2, 3], None, {2, 3}),
        (2, {"eos_token_id": [5, 9]}, {2, 5, 9}),
        (None, {"eos_token_id": 9}, {9}),
        (..., {"eos_token_id": None}, set()),
        (2, {}, {2}),
    ],
    ids=str,
)
def test_end_tokens_are_a_set_over_both_files(config, generation, expected, read):
    """Blaizzy/mlx-vlm#309."""
    assert read(eos_token_id=config, generation=generation).eos_token_ids == expected


def test_moe_keys(read):
    assert read("Qwen3Moe").moe == MoeConfig(8, 2, 40, norm_topk_prob=False, sparse_step=1, dense_layers=frozenset())
    config = read(
        "Qwen3Moe",
        num_experts=...,
        num_local_experts=4,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    )
    assert config.moe == MoeConfig(4, 2, 40, norm_topk_prob=True, sparse_step=2, dense_layers=frozenset({3}))
    assert [config.moe.is_sparse(i) for i in range(6)] == [False, True, False, False, False, True]


@pytest.mark.parametrize(
    "keys",
    [
        {"sliding_window": 4, "use_sliding_window": False, "max_window_layers": 0},
        {"sliding_window": 4},
        {"sliding_window": None, "use_sliding_window": True},
        {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2},
        {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["full_attention"] * 2},
    ],
    ids=str,
)
def test_a_window_that_is_off_means_nothing(keys, read):
    """Presence of the key is not use of it. huggingface/transformers#38002."""
    assert read("Qwen2", **keys) == read("Qwen2")


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("Qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}),
        ("Qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}),
        ("Qwen3", {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["full", "sliding_attention"]}),
        ("Qwen3Moe", {"sliding_window": 4, "use_sliding_window": True}),
    ],
    ids=str,
)
def test_a_window_that_is_on_is_refused(family, keys, read):
    """huggingface/transformers#38002."""
    with pytest.raises(UnsupportedModel, match=r"[12] layers use a sliding window of 4 tokens"):
        read(family, **keys)


def test_the_model_does_not_window_when_the_switch_is_off(tiny, tmp_path):
    """The keys of a window change nothing while the switch is off. huggingface/transformers#38002."""
    from tests.scripted import edited

    keys = {"sliding_window": 4, "use_sliding_window": False, "max_window_layers": 0, "layer_types": ...}
    folder = edited(tiny("qwen2"), tmp_path / "switched-off", json_files={"config.json": keys})
    assert ModelConfig.from_dir(folder) == ModelConfig.from_dir(tiny("qwen2"))


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("Mistral", {}, f"'MistralForCausalLM' is not supported; supported are {', '.join(FAMILIES)}"),
        ("Llama", {"architectures": ...}, "architecture None is not supported"),
        ("Llama", {"architectures": []}, r"architecture \[\] is not supported"),
        ("Llama", {"hidden_act": "gelu"}, "'gelu'"),
        ("Llama", {"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
        ("Llama", {"quantization_config": "awq"}, r"quantised \(awq\)"),
        ("Llama", {"dtype": 16}, "dtype 16 is not supported"),
        ("Llama", {"quantization_config": {"bits": 4}}, r"quantised \(unknown\)"),
        ("Llama", {"dtype": "float8_e4m3fn"}, "'float8_e4m3fn'.*bfloat16, float16, float32"),
        ("Llama", {"dtype": "int8"}, "'int8'"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, "'dynamic'"),
    ],
    ids=str,
)
def test_unsupported(family, keys, words, read):
    with pytest.raises(UnsupportedModel, match=words):
        read(family, **keys)


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("Llama", {"hidden_size": ...}, "lacks 'hidden_size', which LlamaForCausalLM needs"),
        ("Llama", {"num_attention_heads": ...}, "lacks 'num_attention_heads'"),
        ("Llama", {"max_position_embeddings": ...}, "lacks 'max_position_embeddings'"),
        ("Llama", {"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ("Qwen3Moe", {"num_experts": ...}, "lacks 'num_experts'"),
        ("Qwen3Moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; there are 8"),
        ("Qwen3Moe", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ("Qwen3Moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("Qwen3Moe", {"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
        ("Llama", {"rope_parameters": 7}, "rotary settings are 7"),
        ("Llama", {"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ("Llama", {"num_attention_heads": 0}, "num_attention_heads is 0"),
        ("Llama", {"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ("Llama", {"hidden_size": 32.0}, r"hidden_size is 32\.0"),
        ("Llama", {"hidden_size": 33}, "hidden_size is 33.*4"),
        ("Llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ("Llama", {"vocab_size": -1}, "vocab_size is -1"),
        ("Llama", {"vocab_size": True}, "vocab_size is True"),
        ("Llama", {"max_position_embeddings": 0}, "max_position"),
        ("Llama", {"head_dim": 15}, "head_dim is 15"),
        ("Llama", {"head_dim": "16"}, "head_dim is '16'"),
    ],
    ids=str,
)
def test_contradictions(family, keys, words, read):
    with pytest.raises(ValueError, match=words):
        read(family, **keys)


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "config.json is not valid JSON"), ("[]", "holds a list"), (b"\xff\xfe{}", "config.json is not valid JSON")],
    ids=str,
)
def test_broken_file(content, words, tmp_path):
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_dir(tmp_path)


def test_no_model_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"not a model folder: it has no config\.json"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("eps", [float("nan"), -1.0, None, "1e-6", 1.0, True])
def test_norm_epsilons_that_cannot_be(eps, read):
    with pytest.raises(ValueError, match="rms_norm_eps is"):
        read("Qwen2", rms_norm_eps=eps)


@pytest.mark.parametrize("eos", ["9", [[9]], 9.0, True, [5, "9"]])
def test_eos_ids_that_are_no_ids(eos, read):
    with pytest.raises(ValueError, match="eos_token_id is"):
        read("Qwen2", eos_token_id=eos)
