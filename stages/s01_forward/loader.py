"""Read later: from a folder of safetensors files to a `Model`, every tensor used once and every weight filled.

Files are memory-mapped, so the only memory a load takes is the model's own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import safe_open
from torch import Tensor

from stages.s01_forward.checkpoint import CheckpointError, StoredTensor, stored_tensors
from stages.s01_forward.config import ModelConfig
from stages.s01_forward.config_json import parse_dtype
from stages.s01_forward.model import Model
from stages.s01_forward.ops import TORCH_OPS, Ops

IGNORED = re.compile(r"rotary_emb\.inv_freq$")  # tables that old checkpoints stored; they are computed anew


def load_model(
    folder: str | Path,
    config: ModelConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    max_len: int | None = None,
    ops: Ops = TORCH_OPS,
    progress: bool = False,
) -> Model:
    """The model of a folder, weights cast to `dtype` ("auto": as `config.json` says, else as they are stored).

    Raises CheckpointError before any memory is taken or weight read when a tensor is missing, left over or misshapen.
    """
    folder = Path(folder)
    config = config or ModelConfig.from_dir(folder)
    stored = {name: tensor for name, tensor in stored_tensors(folder).items() if not IGNORED.search(name)}
    config = replace(config, tie_word_embeddings=config.tie_word_embeddings and not has_own_head(stored))
    if config.tie_word_embeddings:
        stored.pop("lm_head.weight", None)
    check_complete(folder, config, dict(checkpoint_slots(Model(config, device="meta", max_len=1))), stored)
    model = Model(config, device=device, dtype=pick_dtype(dtype, config, stored), max_len=max_len, ops=ops)
    slots = dict(checkpoint_slots(model))

    by_file: dict[Path, list[str]] = defaultdict(list)
    for name in slots:
        by_file[stored[name].file].append(name)
    bar = Progress(console=Console(stderr=True), transient=True, disable=not progress)  # stdout is for answers
    with bar, ThreadPoolExecutor(max_workers=8) as pool:
        task = bar.add_task("Loading weights", total=len(slots))

        def load(file: Path, names: list[str]) -> None:
            # Threads do not inherit the caller's inference mode, and weights made in it may be written only in it.
            with torch.inference_mode(), safe_open(str(file), framework="pt") as tensors:
                for name in names:
                    slots[name].copy_(tensors.get_tensor(name))
                    bar.advance(task)

        list(pool.map(load, by_file, by_file.values()))  # `list` raises what a thread raised
    return model


def checkpoint_slots(model: Model) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's name of every weight, with the part of our (packed) parameter that it fills."""
    config = model.config
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for name, weight in model.named_parameters():  # a tied head appears once, as the embedding
        name = name if name.startswith("lm_head") else f"model.{name}"
        if "qkv_proj" in name:
            for part, rows in zip("qkv", weight.split((q, kv, kv)), strict=True):
                yield name.replace("qkv_proj", f"{part}_proj"), rows
        elif ".experts." in name:  # [E, ...]: stored expert by expert
            prefix, packed = name.rsplit(".", 1)
            for expert, slab in enumerate(weight):
                yield from split_gate_up(f"{prefix}.{expert}.{packed}.weight", slab)
        else:
            yield from split_gate_up(name, weight)


def split_gate_up(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """gate and up are stored apart and packed side by side here; other weights are stored as they are."""
    if "gate_up_proj" not in name:
        yield name, weight
    else:
        for part, rows in zip(("gate", "up"), weight.chunk(2), strict=True):
            yield name.replace("gate_up_proj", f"{part}_proj"), rows


def has_own_head(stored: dict[str, StoredTensor]) -> bool:
    """Is an output matrix stored that differs from the embedding? Then it counts, whatever the config says of tying.

    Hugging Face (transformers 5) decides the same way.
    """
    head, embedding = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
    return head is not None and embedding is not None and not torch.equal(head.read(), embedding.read())


def pick_dtype(wanted: torch.dtype | str, config: ModelConfig, stored: dict[str, StoredTensor]) -> torch.dtype:
    """The dtype to compute in: what the caller says, else `config.json`, else the stored embedding."""
    if isinstance(wanted, torch.dtype):
        return wanted
    if wanted != "auto":
        return parse_dtype(wanted)
    if config.dtype is not None:
        return config.dtype
    embedding = stored.get("model.embed_tokens.weight")
    return embedding.dtype if embedding else torch.float32


def check_complete(
    folder: Path, config: ModelConfig, slots: dict[str, Tensor], stored: dict[str, StoredTensor]
) -> None:
    """Every slot has its tensor, of its shape, and no tensor is left over."""
    missing = [name for name in slots if name not in stored]
    if missing == ["lm_head.weight"]:
        raise CheckpointError(
            f"{folder} has no lm_head.weight, and config.json says tie_word_embeddings: {config.tie_word_embeddings}"
        )
    if missing:
        raise CheckpointError(f"{folder} lacks {some(missing)}")
    if extra := [name for name in stored if name not in slots]:
        where = stored[extra[0]].file.name
        raise CheckpointError(f"{folder} holds {some(extra)} (in {where}), unknown to {config.architecture}")
    for name, slot in slots.items():
        if stored[name].shape != tuple(slot.shape):
            raise CheckpointError(
                f"{name} in {stored[name].file.name} has shape {list(stored[name].shape)}; "
                f"config.json makes it {list(slot.shape)}"
            )


def some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")
