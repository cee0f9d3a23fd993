"""The demo model as an unquantised GGUF file, for engines that read nothing else: the same weights, value for value."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from reference.demo import PACKAGE, installed_gguf

Stored = Literal["f32", "bf16"]


def write_demo_gguf(target: Path, stored: Stored = "f32") -> Path:
    """Write the demo model to `target` and return it. RuntimeError if the package of the demo model is not there."""
    source = installed_gguf()
    if source is None:
        raise RuntimeError(f"the Python package {PACKAGE} is not installed, and the demo model's GGUF file is in it")
    return unquantised(source, target, stored)


def unquantised(source: Path, target: Path, stored: Stored) -> Path:
    """Write `target` with the weights of the GGUF file `source`, metadata and tokenizer copied, and return it.

    Every weight is rounded to bfloat16, as in the folder of `demo_model()`; `stored` says in what it is kept. Norms are
    kept in fp32, which llama.cpp asks for.
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType

    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    file_type = LlamaFileType.ALL_F32 if stored == "f32" else LlamaFileType.MOSTLY_BF16
    for name, field in reader.fields.items():
        if name == "general.file_type":
            writer.add_file_type(file_type)
        elif not name.startswith("GGUF.") and name != "general.architecture":  # those the writer says itself
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        values = _bf16_values(tensor)
        if stored == "f32" or values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
            writer.add_tensor(tensor.name, bits, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _bf16_values(tensor: Any) -> np.ndarray:
    """A tensor's values in fp32, rounded to bfloat16: to the nearest, a tie to the even one."""
    from gguf import dequantize

    bits = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & 0xFFFF0000).astype(np.uint32).view(np.float32)
