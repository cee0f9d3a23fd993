"""Models of real shapes with random weights, for benchmarks where nothing can be downloaded.

Speed does not depend on what the weights are, as long as they are not all alike. They are large enough that attention
and every norm matter to the logits, so that these can be held against Hugging Face's before anything is timed.
"""

import json
from pathlib import Path
from typing import Any

import torch

from reference.quiet import quiet_bars


def _qwen(family: str, hidden: int, intermediate: int, heads: int, kv_heads: int, **other: Any) -> dict[str, Any]:
    architecture = f"{family.capitalize()}ForCausalLM"
    return {
        "architectures": [architecture], "model_type": family, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": 28, "vocab_size": 151_936,
        "tie_word_embeddings": True, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768,
        "hidden_act": "silu", "dtype": "bfloat16", "eos_token_id": 151_645, "bos_token_id": 151_643, **other,
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen(
        "qwen3", 1024, 3072, 16, 8, head_dim=128, attention_bias=False,
        max_position_embeddings=40_960,
    ),
    "qwen2.5-1.5b": _qwen("qwen2", 1536, 8960, 12, 2),
    "qwen2.5-7b": _qwen("qwen2", 3584, 18_944, 28, 4, vocab_size=152_064, tie_word_embeddings=False),
    # For trials on a CPU: the workloads' token ids fit, and it is small.
    "tiny": _qwen(
        "qwen3", 64, 96, 4, 2, head_dim=32, num_hidden_layers=2, vocab_size=10_240,
        eos_token_id=1, bos_token_id=2,
    ),
}  # fmt: skip
CPU_SHAPES: dict[str, dict[str, Any]] = {  # for benchmarks on a CPU that cannot have the weights
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30, "vocab_size": 49_152,
        "tie_word_embeddings": True, "rope_theta": 1e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
        "hidden_act": "silu", "dtype": "bfloat16", "eos_token_id": 2, "bos_token_id": 1,
    },
}  # fmt: skip


def random_model(shape: str, folder: Path, device: str, seed: int = 0) -> Any:
    """Write the shape's `config.json` into `folder`, and return Hugging Face's bf16 model of it, on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps((SHAPES | CPU_SHAPES)[shape]), encoding="utf-8")
    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.1, generator=generator)
            else:
                weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
    return model


def random_checkpoint(shape: str, folder: Path, device: str, seed: int = 0) -> Any:
    """The same, and the weights are written, too: a checkpoint that can be loaded."""
    model = random_model(shape, folder, device, seed)
    with quiet_bars():
        model.save_pretrained(folder)
    return model
