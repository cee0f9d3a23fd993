"""`python -m stages.s07_cuda_graph.bench_few_rows`: a whole decode step of few rows, by our own kernels or by cuBLAS.

Embedding to logits in one CUDA graph, random weights of the real shapes, 512 keys a row: what decides up to how many
rows `forward_few` serves a model, and whether weights are better brought into L2 ahead.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from reference.bench.gpu_shapes import SHAPES
from reference.bench.harness import Measurement, Result, gpu_argument
from stages.s01_forward.config import ModelConfig
from stages.s01_forward.model import Model
from stages.s02_kv_cache.kv_store import KVStore
from stages.s03_paged_kv.attention_plan import AttentionShape
from stages.s03_paged_kv.context import PagedContext
from stages.s03_paged_kv.kernel_workloads import time_calls
from stages.s07_cuda_graph import few_rows
from stages.s07_cuda_graph.cublas import drop_workspace
from stages.s07_cuda_graph.fused_ops import fused_ops

ROWS = (1, 2, 4, 8, 16)
KEYS = 512  # of each row
CUDA = torch.device("cuda")


def make_model(name: str) -> Model:
    """In bf16 with the fused ops."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
        config = ModelConfig.from_dir(folder)
    model = Model(config, device=CUDA, dtype=torch.bfloat16, max_len=4096, ops=fused_ops(CUDA))
    for weight in model.parameters():
        weight.normal_(1.0 if weight.ndim == 1 else 0.0, weight.shape[-1] ** -0.5)
    return model


def make_context(model: Model, rows: int, block_size: int = 16) -> PagedContext:
    """Every row has KEYS keys, the last of which is its new token's."""
    config, blocks = model.config, KEYS // block_size
    store = KVStore(config, rows * blocks + 1, block_size, device=CUDA, dtype=torch.bfloat16)
    store.data.normal_()
    table = torch.randperm(rows * blocks, device=CUDA).int().view(rows, blocks) + 1
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, block_size, 2)
    ops = fused_ops(CUDA)
    return PagedContext(
        store, ops, table[:, -1].long() * block_size + block_size - 1, table,
        torch.full((rows,), KEYS, dtype=torch.int32, device=CUDA),
        torch.arange(rows + 1, dtype=torch.int32, device=CUDA),
        ops.make_plan([1] * rows, [KEYS] * rows, table, shape), config.head_dim**-0.5,
    )  # fmt: skip


@torch.inference_mode()
def step_times(model: Model, rows: int) -> dict[str, float]:
    """Seconds of a step, by who computes it."""
    ctx = make_context(model, rows)
    ids = torch.randint(1000, (rows,), device=CUDA)
    positions = torch.full_like(ids, KEYS - 1)
    whole = few_rows.AHEAD_BYTES
    times = {"cuBLAS": time_calls([lambda: model.logits(model(ids, positions, ctx))]).median}
    for who, few_rows.AHEAD_BYTES in (("few rows, nothing ahead", 0), ("few rows", whole)):
        times[who] = time_calls(
            [lambda: few_rows.logits_few(model, few_rows.forward_few(model, ids, positions, ctx))]
        ).median
    return times


def main() -> None:
    names = shapes_argument(__doc__)
    result = Result(
        "s07_few_rows", "A layer of few, fused launches that ask for weights early beats cuBLAS for few rows."
    )
    measure(result, step_times, names, ROWS)


def shapes_argument(description: str | None) -> list[str]:
    """Names of shapes from the command line, or of all but the tiny one."""
    names = gpu_argument(
        description, "shapes", nargs="*", type=shape_name, help=f"of {', '.join(SHAPES)} (default: all but tiny)"
    )
    return names or [name for name in SHAPES if name != "tiny"]


def shape_name(name: str) -> str:
    """For argparse, whose `choices` do not go with `nargs="*"`: Python 3.11 looks for the empty list among them."""
    if name not in SHAPES:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SHAPES)}")
    return name


def measure(
    result: Result, step_times: Callable[[Model, int], dict[str, float]], names: Sequence[str], counts: Sequence[int]
) -> None:
    """Steps of so many rows, of these shapes; told, and saved."""
    drop_workspace(CUDA)
    for name in names:
        model = make_model(name)
        for rows in counts:
            times = step_times(model, rows)
            shown = ", ".join(f"{who} {seconds * 1e3:.3f} ms" for who, seconds in times.items())
            print(f"{name}, {rows:3} rows: {shown}", flush=True)
            result.measurements += [
                Measurement.single(f"{name}, {rows} rows, {who}", seconds * 1e3, "ms") for who, seconds in times.items()
            ]
        del model
    print(f"wrote {result.save().name}")


if __name__ == "__main__":
    main()
