"""`python -m stages.s07_cuda_graph.tune_few_rows`: the sweep behind the tables in `skinny_linear.py`.

For every projection of the benchmark's models and 1 to 16 rows: each candidate tile against cuBLAS and the kernels that
stand around it otherwise (add + norm in front, SwiGLU behind). All inside CUDA graphs, over as many different weights
as exceed the L2 cache several times. Prints the times, the two tables, and what a layer costs either way.
"""

import functools
import json
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from reference.bench.gpu_shapes import SHAPES
from reference.bench.harness import Measurement, Result
from stages.s03_paged_kv.kernel_workloads import time_calls
from stages.s07_cuda_graph.bench_few_rows import shapes_argument
from stages.s07_cuda_graph.skinny_linear import Tile, pick_tile, skinny_linear

ROWS = (1, 2, 4, 8, 16)
KINDS = {1: (1,), 8: (2, 4, 8), 16: (16,)}  # a kernel, and the numbers of rows that it serves
ROTATED_BYTES = 256 << 20  # of weights in one graph: 4 times an H200's L2 cache
ONE_ROW = [Tile(4, 1024, 2), Tile(8, 1024, 2), Tile(8, 1024, 4), Tile(4, 512, 2), Tile(8, 512, 2), Tile(16, 512, 4)]
FEW_ROWS = [Tile(8, 1024, 8), Tile(16, 1024, 8), Tile(16, 512, 8), Tile(16, 512, 4), Tile(32, 512, 8), Tile(32, 256, 4)]
Times = dict[int, tuple[float, dict[Tile, float]]]  # by rows: seconds of cuBLAS, and of each tile


@dataclass(frozen=True)
class Projection:
    """A weight [n, k], and what a layer does around it."""

    name: str
    n: int
    k: int
    norm: bool = False
    bias: bool = False
    add: bool = False
    glu: bool = False

    def skinny(self, rows: int, weights: list[torch.Tensor], tile: Tile | None) -> list[Callable[[], object]]:
        """One call per weight."""
        x, vector = torch.randn(rows, self.k, device="cuda").to(torch.bfloat16), weights[0].new_ones
        residual = torch.zeros(rows, self.n, device="cuda", dtype=torch.bfloat16) if self.add else None
        call = functools.partial(
            skinny_linear, x, bias=vector(self.n) if self.bias else None, residual=residual, glu=self.glu, tile=tile,
            norm_weight=vector(self.k) if self.norm else None, eps=1e-6,
        )  # fmt: skip
        return [functools.partial(call, weight) for weight in weights]

    def cublas(self, rows: int, weights: list[torch.Tensor]) -> list[Callable[[], object]]:
        """The same as a layer of the model runs it."""
        from stages.s07_cuda_graph.fused_ops import fused_ops

        ops = fused_ops(torch.device("cuda"))
        x, residual = torch.randn(2, rows, self.k, device="cuda").to(torch.bfloat16)
        gain, bias = weights[0].new_ones(self.k), weights[0].new_ones(self.n) if self.bias else None

        def call(weight: torch.Tensor) -> object:
            y = F.linear(ops.add_rms_norm(x, residual, gain, 1e-6)[0] if self.norm else x, weight, bias)
            return ops.silu_mul(y) if self.glu else y

        return [functools.partial(call, weight) for weight in weights]


def projections(name: str) -> list[Projection]:
    """Of one layer of a model, and its head."""
    raw = SHAPES[name]
    hidden, inner, heads, kv_heads = (
        raw[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    dim = raw.get("head_dim", hidden // heads)
    return [
        Projection("qkv", (heads + 2 * kv_heads) * dim, hidden, norm=True, bias=raw["model_type"] == "qwen2"),
        Projection("o", hidden, heads * dim, add=True),
        Projection("gate_up", 2 * inner, hidden, norm=True, glu=True),
        Projection("down", hidden, inner, add=True),
        Projection("head", raw["vocab_size"], hidden),
    ]


def candidates(kind: int, projection: Projection) -> list[Tile]:
    """What is tried: what is picked now comes first."""
    tiles = [pick_tile(kind, projection.n, projection.k), *(ONE_ROW if kind == 1 else FEW_ROWS)]
    return [tile for tile in dict.fromkeys(tiles) if tile.block_k < 2 * projection.k]


def compile_one(projection: Projection, kind: int, tile: Tile) -> str | None:
    """One call, so that the compiled kernel is in Triton's cache; returns what went wrong."""
    try:
        weight = torch.empty(projection.n, projection.k, device="cuda", dtype=torch.bfloat16)
        projection.skinny(kind, [weight], tile)[0]()
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, say: this candidate is out
        return repr(error)[:200]
    return None


def sweep(projection: Projection, usable: dict[int, list[Tile]]) -> Times:
    """For each number of rows: seconds of cuBLAS and what stands around it, and of each tile."""
    copies = min(64, max(3, ROTATED_BYTES // (2 * projection.n * projection.k)))
    weights = [
        torch.empty(projection.n, projection.k, device="cuda", dtype=torch.bfloat16).normal_(0, projection.k**-0.5)
        for _ in range(copies)
    ]
    found = {}
    for kind, counts in KINDS.items():
        for rows in counts:
            skinny = {tile: time_calls(projection.skinny(rows, weights, tile), 7).median for tile in usable[kind]}
            found[rows] = time_calls(projection.cublas(rows, weights), 7).median, skinny
    return found


def main() -> None:
    names = shapes_argument(__doc__)
    todo = [
        (projection, kind, tile)
        for projection in dict.fromkeys(projection for name in names for projection in projections(name))
        for kind in KINDS
        for tile in candidates(kind, projection)
    ]
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        errors = list(pool.map(compile_one, *zip(*todo, strict=True), chunksize=4))
    usable = {job for job, error in zip(todo, errors, strict=True) if not error}
    print(f"{len(usable)} of {len(todo)} candidates compile; {set(errors) - {None} or 'no errors'}", flush=True)
    result = Result(
        "s07_few_rows_tuning", "For few rows our own kernels beat cuBLAS; the more rows, the less they gain."
    )
    tiles: dict[tuple[int, int, int], Tile] = {}
    pays_to = {}
    for name in names:
        layer = dict.fromkeys(ROWS, (0.0, 0.0))
        for projection in projections(name):
            mine = {kind: [tile for p, k, tile in todo if (p, k) == (projection, kind) and (p, k, tile) in usable]
                    for kind in KINDS}  # fmt: skip
            times = sweep(projection, mine)
            wins: list[int] = []
            for rows, (cublas, skinny) in times.items():
                kind = next(kind for kind, counts in KINDS.items() if rows in counts)
                best = best_tile(times, KINDS[kind])
                tiles[kind, projection.n, projection.k] = best
                result.measurements += report(f"{name} {projection.name}", projection, rows, cublas, skinny, best)
                if projection.name != "head":
                    layer[rows] = layer[rows][0] + cublas, layer[rows][1] + skinny[best]
                if skinny[best] <= cublas and len(wins) == ROWS.index(rows):  # nowhere below did it lose
                    wins.append(rows)
            pays_to[projection.n, projection.k] = max(wins, default=0)
        for rows, pair in layer.items():
            print(f"{name} layer, {rows} rows: cuBLAS {pair[0] * 1e6:.2f} us, skinny_linear {pair[1] * 1e6:.2f} us")
            for who, seconds in zip(("cuBLAS", "skinny_linear"), pair, strict=True):
                result.measurements.append(Measurement.single(f"{name} layer, {rows} rows, {who}", seconds * 1e6, "us"))
    for key, tile in tiles.items():
        print(f"    {key}: Tile({tile.block_n}, {tile.block_k}, {tile.num_warps}),")
    print("PAYS_TO =", pays_to)
    print(json.dumps([[*key, tile.block_n, tile.block_k, tile.num_warps] for key, tile in tiles.items()]))
    print(f"wrote {result.save().name}")


def best_tile(times: Times, counts: tuple[int, ...]) -> Tile:
    """The tile with the least time for these numbers of rows together, each counted in units of cuBLAS'."""
    return min(times[counts[0]][1], key=lambda tile: sum(times[rows][1][tile] / times[rows][0] for rows in counts))


def report(
    title: str, projection: Projection, rows: int, cublas: float, skinny: dict[Tile, float], best: Tile
) -> list[Measurement]:
    """Prints one line, and returns what is kept of it."""
    title = f"{title} [{projection.n}, {projection.k}], {rows} rows"
    rate = 2 * projection.n * projection.k / skinny[best] * 1e-9
    every = ", ".join(f"{t.block_n}x{t.block_k}/{t.num_warps} {s * 1e6:.2f}" for t, s in skinny.items())
    print(f"{title:48} cuBLAS {cublas * 1e6:7.2f} us, best {skinny[best] * 1e6:7.2f} us, {rate:5.0f} GB/s | {every}",
          flush=True)  # fmt: skip
    return [
        Measurement.single(f"{title}, cuBLAS", cublas * 1e6, "us"),
        Measurement.single(f"{title}, skinny_linear", skinny[best] * 1e6, "us", note=str(best)),
    ]


if __name__ == "__main__":
    main()
