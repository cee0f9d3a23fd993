"""Read later: which tensors a model folder holds, and in which file each lies."""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stages.s01_forward.config_json import read_json

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded as it stands; the message names the tensor or file."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place, shape and dtype, known without reading it."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        """The tensor itself, memory-mapped."""
        with safe_open(str(self.file), framework="pt") as tensors:
            return tensors.get_tensor(self.name)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder by name: those that the index names, in the files it names; else model.safetensors.

    A stray .safetensors file beside them is never read; a warning names it, since real folders ship such files.
    Raises CheckpointError for missing or broken files, missing tensors and dtypes that are not plain floats.
    """
    files = files_of_tensors(folder)
    strays = sorted({path.name for path in folder.glob("*.safetensors")} - {path.name for path in files})
    if strays:
        warnings.warn(f"{folder}: not part of the model and not read: {', '.join(strays)}", stacklevel=2)
    return {name: tensor for file, names in files.items() for name, tensor in read_header(file, names).items()}


def files_of_tensors(folder: Path) -> dict[Path, list[str] | None]:
    """Which tensors to take from which file; None: all of them."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        files: dict[Path, list[str] | None] = {}
        by_file = defaultdict(list)
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map that says which tensor is in which file")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(f"{index.name} puts {name} in {file!r}, not in a safetensors file of this folder")
            by_file[folder / file].append(name)
        if missing := [path.name for path in by_file if not path.exists()]:
            raise CheckpointError(f"{folder} lacks {', '.join(missing)}, which {index.name} names")
        files.update(by_file)
        return files
    if single.exists():
        return {single: None}
    found = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pth", ".gguf"))
    raise CheckpointError(
        f"{folder} has neither model.safetensors nor {index.name}; it holds {', '.join(found) or 'no weights at all'}"
    )


def read_header(file: Path, names: list[str] | None) -> dict[str, StoredTensor]:
    """Names, shapes and dtypes of one file's tensors; only of `names` if given."""
    try:
        with safe_open(str(file), framework="pt") as tensors:
            held = set(tensors.keys())
            if absent := [name for name in names or () if name not in held]:
                raise CheckpointError(f"{file.name} lacks {absent[0]}, which the index says is there")
            header = {}
            for name in names or sorted(held):
                part = tensors.get_slice(name)
                dtype = part.get_dtype()
                if dtype not in DTYPES:
                    raise CheckpointError(f"{name} in {file.name} is {dtype}; supported are {', '.join(DTYPES)}")
                header[name] = StoredTensor(name, file, tuple(part.get_shape()), DTYPES[dtype])
            return header
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from None
