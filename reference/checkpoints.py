"""Tiny random checkpoints, saved by Hugging Face itself: small enough for every test, odd enough to catch mistakes.

Each model has shapes that no accident makes right: the hidden size differs from heads x head_dim, biases are not
zero, norm weights are not one, and the vocabulary has rows that the tokenizer does not know. The weights are large
enough that greedy tokens vary and their logits are no near ties. `TINY` says what each variant exercises.
"""

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reference.demo import demo_model
from reference.folders import build_folder, cache_dir
from reference.quiet import quiet_bars
from reference.tiny_tokenizer import tiny_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["FAMILIES", "TINY", "TinyModel", "build_tiny", "cache_dir", "demo_model", "tiny_names"]

MODEL_VOCAB_SIZE = 512  # padded: ids 500..511 have weights, and logits, but no token
MAX_POSITION_EMBEDDINGS = 256
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # with head_dim 16: one pair kept, two blended, five divided by 8
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class TinyModel:
    """One tiny checkpoint: its family, its shapes and how it is stored.

    Attributes:
        family: Name as in `model_type`: "qwen2", "qwen3", "qwen3_moe" or "llama".
        exercises: What this variant can catch that the others cannot.
        hidden, heads, kv_heads, head_dim: Shapes; `head_dim=None` leaves the key out of the config where HF allows it.
        extra: Further keys of the config.
        max_shard_size: The default stores one `model.safetensors`; a size such as "60KB" stores shards and an index.
        dtype: How the weights are stored: "float32" or "bfloat16".
    """

    family: str
    exercises: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int | None
    layers: int = 3
    tied: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    max_shard_size: str = "1GB"
    dtype: str = "float32"


MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

TINY: dict[str, TinyModel] = {
    # The four representatives: one per family, used by everything that is parametrised over families.
    "qwen2": TinyModel("qwen2", "QKV bias, explicit head_dim, group of 3", 64, 6, 2, 16),
    "qwen3": TinyModel(
        "qwen3", "q/k norm, tied head, group of 7, shards", 48, 14, 2, 8, tied=True, max_shard_size="60KB"
    ),
    "qwen3_moe": TinyModel(
        "qwen3_moe",
        "8 experts, top 2, renormalised; layer 1 dense (mlp_only_layers)",
        64,
        6,
        2,
        16,
        extra={**MOE, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "llama": TinyModel(
        "llama",
        "llama3 RoPE scaling, group of 1 (no GQA), shards",
        48,
        4,
        4,
        16,
        extra={"rope_parameters": LLAMA3_ROPE},
        max_shard_size="60KB",
    ),
    # Variants: what differs within a family.
    "qwen2-tied-g7": TinyModel("qwen2", "head_dim derived from hidden / heads, tied head", 56, 7, 1, None, tied=True),
    "qwen3-untied-g1": TinyModel(
        "qwen3", "untied head without GQA, attention bias", 48, 4, 4, 16, extra={"attention_bias": True}
    ),
    "qwen3-yarn": TinyModel("qwen3", "YaRN RoPE scaling", 64, 6, 2, 16, extra={"rope_parameters": YARN_ROPE}),
    "qwen3_moe-raw": TinyModel(
        "qwen3_moe",
        "router weights not renormalised, every second layer sparse, tied, shards",
        48,
        7,
        1,
        16,
        layers=4,
        tied=True,
        extra={**MOE, "norm_topk_prob": False, "decoder_sparse_step": 2},
        max_shard_size="100KB",
    ),
    "llama-tied-g7": TinyModel("llama", "tied head, group of 7, plain RoPE (as SmolLM2)", 84, 7, 1, 16, tied=True),
    "llama-bias-linear": TinyModel(
        "llama",
        "bias on q, k, v and o; linear RoPE scaling",
        48,
        6,
        2,
        16,
        extra={
            "attention_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
        },
    ),
    "llama-bf16": TinyModel(
        "llama", "weights stored in bfloat16", 48, 6, 2, 16, extra={"rope_parameters": LLAMA3_ROPE}, dtype="bfloat16"
    ),
}
FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama")  # each is also the name of its representative in TINY


def tiny_names() -> tuple[str, ...]:
    """Names that `build_tiny` takes, the four representatives first."""
    return tuple(TINY)


def build_tiny(name: str, folder: str | Path, seed: int = 0) -> Path:
    """Write the checkpoint `name` (a key of `TINY`) into `folder` and return the folder: weights, configs, tokenizer.

    The same name and seed give the same bytes of weights. An existing folder is returned as it is.

    Raises:
        ValueError: `name` is not in `TINY`.
    """
    if name not in TINY:
        raise ValueError(f"no tiny checkpoint is called {name!r}; there are {', '.join(TINY)}")
    return build_folder(Path(folder), lambda target: _save(name, TINY[name], target, seed))


def _save(name: str, tiny: TinyModel, folder: Path, seed: int) -> None:
    import torch
    from transformers import GenerationConfig

    tokenizer = tiny_tokenizer()
    model = _model(tiny)
    _randomise(model, torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed))
    model.to(getattr(torch, tiny.dtype))
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id
    )
    with quiet_bars():
        model.save_pretrained(folder, max_shard_size=tiny.max_shard_size)
    tokenizer.save_pretrained(folder)


def _model(tiny: TinyModel) -> "PreTrainedModel":
    import transformers

    classes = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "llama": "Llama"}
    prefix = classes[tiny.family]
    tokenizer = tiny_tokenizer()
    keys: dict[str, Any] = {
        "vocab_size": MODEL_VOCAB_SIZE,
        "hidden_size": tiny.hidden,
        "intermediate_size": 2 * tiny.hidden - 8,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "tie_word_embeddings": tiny.tied,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **({} if tiny.head_dim is None else {"head_dim": tiny.head_dim}),
        **tiny.extra,
    }
    config = getattr(transformers, f"{prefix}Config")(**keys)
    return getattr(transformers, f"{prefix}ForCausalLM")(config)


def _randomise(model: "PreTrainedModel", generator: "torch.Generator") -> None:
    """Give every parameter a value that matters: gains near 1.5 per matrix, norms in [0.5, 1.5], biases near 0.3."""
    import torch

    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("norm.weight"):
                p.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("bias"):
                p.normal_(0.0, 0.3, generator=generator)
            elif "embed_tokens" in name or "lm_head" in name:
                p.normal_(0.0, 3.0 / p.shape[-1] ** 0.5, generator=generator)
            else:
                p.normal_(0.0, 1.5 / p.shape[-1] ** 0.5, generator=generator)
