"""`python -m stages.s07_cuda_graph.bench_chunks`: attention for chunks alone, by each kernel that a GPU can run.

Steps as the engine has them: packed q, k and v, older keys in pages. Beside them cuDNN, which knows no pages, where all
rows are fresh and alike. Before a kernel is timed, its answer is held against the first one's.
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from reference.bench.gpu_shapes import SHAPES
from reference.bench.harness import Measurement, Result, folder_argument
from reference.bench.roofline import Shape
from stages.s03_paged_kv.kernel_workloads import time_calls
from stages.s03_paged_kv.tile_sizes import AttentionShape, TileSizes
from stages.s07_cuda_graph.chunk_cases import ALLOWED, ChunkCase
from stages.s07_cuda_graph.chunk_tiles import HOPPER_TILES, TRITON_TILES, chunk_attention, chunk_tiles

MODELS = ("qwen3-0.6b", "qwen2.5-1.5b", "qwen2.5-7b")
RAGGED = (700, 100, 1024, 333, 512, 900, 250, 1000, 640, 410, 130, 1024) * 2
STEPS = {  # tokens of each row, and older ones before them
    "4 fresh prompts of 2,048": ((2048,) * 4, 0),
    "1 fresh prompt of 16,384": ((16_384,), 0),
    "24 fresh prompts of 100 to 1,024": (RAGGED, 0),
    "4 rows of 2,048 behind 2,048": ((2048,) * 4, 2048),
    "16 rows of 512 behind 1,024": ((512,) * 16, 1024),
    "64 rows of 64 behind 2,048": ((64,) * 64, 2048),
    "1 row of 2,048 behind 30,720": ((2048,), 30_720),
}
KERNELS = {TRITON_TILES: "chunk_kernel", HOPPER_TILES: "hopper_chunk"}


def flops(case: ChunkCase) -> float:
    """Of the products of all queries with the keys that they see, and of weights with values."""
    pairs = sum(n * (kv - n) + n * (n + 1) / 2 for n, kv in zip(case.q_lens, case.kv_lens, strict=True))
    return 4 * case.num_kv_heads * case.group * case.head_dim * pairs


def times(
    shape: Shape, q_lens: tuple[int, ...], old: int, tiles: list[TileSizes]
) -> Iterator[tuple[str, float, float]]:
    """(kernel, seconds, TFLOP/s). Raises ValueError if two kernels differ by more than rounding."""
    kv_lens = tuple(count + old for count in q_lens)
    first: Tensor | None = None
    for sizes in tiles:
        case = ChunkCase(
            q_lens, kv_lens, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim, torch.bfloat16, sizes
        )
        made, q, k, v, out = case.make("cuda")
        where = made.k_cache, made.v_cache, made.block_table, made.seq_lens, made.cu_q
        launch, attend = case.launch("cuda"), chunk_attention(sizes)
        seconds = time_calls([lambda: attend(q, k, v, *where, launch, made.scale, out)]).median  # noqa: B023
        first = out.clone() if first is None else first
        if (worst := (out.float() - first.float()).abs().max().item()) > 2 * ALLOWED[torch.bfloat16]:
            raise ValueError(f"{KERNELS[sizes]} differs by {worst:.3g} from {KERNELS[tiles[0]]}")
        yield KERNELS[sizes], seconds, flops(case) / seconds / 1e12
    if not old and len(set(q_lens)) == 1:
        rows, count, dim = len(q_lens), q_lens[0], shape.head_dim
        dense_q, dense_k, dense_v = (x[: rows * count].view(rows, count, -1, dim).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            dense = lambda: scaled_dot_product_attention(dense_q, dense_k, dense_v, is_causal=True, enable_gqa=True)  # noqa: E731
            seconds = time_calls([dense]).median
        yield "cuDNN", seconds, flops(case) / seconds / 1e12


def main() -> None:
    """Measure, print, save."""
    out = folder_argument(__doc__)
    result = Result(
        "s07_chunk_attention",
        "With a warp that loads and two warpgroups that share its tiles, the tensor cores wait less: 470 to 560 "
        "TFLOP/s on fresh prompts of 2,048, and no less where older keys come from pages.",
    )
    for name in MODELS:
        shape = Shape.from_config(SHAPES[name])
        heads = AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, 16, 2)
        best = chunk_tiles(heads, torch.device("cuda"))
        if best is None:
            sys.exit("bench_chunks needs a GPU with a copy engine: Hopper or later")
        for step, (q_lens, old) in STEPS.items():
            for kernel, seconds, rate in times(shape, q_lens, old, list(dict.fromkeys((TRITON_TILES, best)))):
                found = Measurement.single(f"{name}, {step}, {kernel}", rate, "TFLOP/s", note=f"{seconds * 1e6:.0f} us")
                result.measurements.append(found)
                print(f"{found.name:66} {rate:5.0f} TFLOP/s  {found.note}", flush=True)
    result.save(out)


if __name__ == "__main__":
    main()
