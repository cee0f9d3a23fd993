"""Checkpoints made to order from a tiny one: other weights, other keys in its JSON files, or a script to follow."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from reference.folders import build_folder

Weights = dict[str, Tensor]


def edited(
    source: Path,
    folder: Path,
    edit: Callable[[Weights], object] = lambda weights: None,
    json_files: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """Copy the checkpoint `source` to `folder`, as one file, with changed weights and changed keys of its JSON files.

    `edit` changes the dictionary of weights in place. `json_files` maps a file to the keys that replace its own; a key
    with the value `...` is removed.
    """

    def build(target: Path) -> None:
        weights: Weights = {}
        for file in sorted(source.iterdir()):
            if file.suffix == ".safetensors":
                weights |= load_file(file)
            elif not file.name.endswith(".index.json"):
                (target / file.name).write_bytes(file.read_bytes())
        edit(weights)
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        for name, keys in (json_files or {}).items():
            content = json.loads((target / name).read_text(encoding="utf-8")) | dict(keys)
            kept = {key: value for key, value in content.items() if value is not ...}
            (target / name).write_text(json.dumps(kept), encoding="utf-8")

    return build_folder(folder, build)


def scripted(
    source: Path,
    folder: Path,
    scripts: Iterable[Sequence[int]],
    json_files: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """A model that says what a test wants: after each token of a script it gives the next one, with near certainty.

    Attention and MLP add nothing, so the next token depends on the last one alone. A prompt that ends with a script's
    first token gives its second, and so on. `source` is an untied checkpoint.

    Raises:
        ValueError: a token occurs twice over all scripts, so that what follows it would not be certain.
    """
    scripts = [list(script) for script in scripts]
    used = [token for script in scripts for token in script]
    if len(set(used)) < len(used):
        raise ValueError(f"each token may occur once over all scripts: {scripts}")

    def edit(weights: Weights) -> None:
        for name, weight in weights.items():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        weights["model.norm.weight"].fill_(1.0)
        embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"].zero_()
        embedding.normal_(generator=torch.Generator().manual_seed(1))
        embedding /= embedding.norm(dim=-1, keepdim=True)  # rows nearly at right angles to each other
        for script in scripts:
            for token, following in zip(script, script[1:], strict=False):
                head[following] = 4.0 * embedding[token]

    return edited(source, folder, edit, json_files)
