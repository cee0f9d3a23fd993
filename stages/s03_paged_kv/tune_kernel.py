"""`python -m stages.s03_paged_kv.tune_kernel`: the sweep behind the table of tile sizes in `tile_sizes.py`.

Compiles every candidate first, in parallel, then times each on a few batches and prints the best beside the sizes
that `pick_tiles` takes now.
"""

import itertools
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import torch

from reference.bench.harness import Measurement, Result
from stages.s03_paged_kv.bench_kernel import PREFILLS, SHAPES
from stages.s03_paged_kv.kernel_workloads import kernel_calls, make_workload, time_calls
from stages.s03_paged_kv.tile_sizes import AttentionShape, TileSizes

DECODE = [
    TileSizes(16, block_n, warps, stages, False)
    for block_n, warps, stages in itertools.product((32, 64, 128, 256), (2, 4, 8), (2, 3, 4))
    if 1024 <= 32 * block_n * 4 // warps <= 4096  # keys per warp that neither starve it nor spill its registers
]
PROMPT = [
    TileSizes(block_m, block_n, warps, stages, True)
    for block_m, block_n, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))
    if block_m // warps >= 16
]
DECODES = (  # rows, keys of each, splits
    (256, 1024, (1,)),
    (64, 1024, (1, 2)),
    (16, 1024, (2, 4, 8)),
    (1, 16384, (32, 64)),
    (4, 1024, (8,)),
    (16, 256, (1, 2)),
)
Variant = tuple[AttentionShape, TileSizes, str]  # the last: "decode", "split" or "prompt"


def compile_one(variant: Variant) -> str | None:
    """Runs one small call, so that the compiled kernel is in Triton's cache; returns what went wrong."""
    shape, sizes, kind = variant
    length = 512 if kind == "prompt" else 1
    try:
        work = make_workload(shape, [length] * 2, [512] * 2)
        kernel_calls(work, sizes, 128 if kind == "split" else 512)[0]()
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, say: this candidate is out
        return repr(error)[:200]
    return None


def sweep(name: str, q_lens: list[int], context: int, candidates: list[tuple[Variant, int]]) -> list[Measurement]:
    """Times every candidate (with its keys per split) on one batch; returns the picked sizes and the best five."""
    work = make_workload(candidates[0][0][0], q_lens, [context] * len(q_lens))
    found = [Measurement.of_timing(f"{name}, picked", time_calls(kernel_calls(work), 7))]
    times = [(time_calls(kernel_calls(work, sizes, keys), 7), sizes, keys) for (_, sizes, _), keys in candidates]
    times.sort(key=lambda each: each[0].median)
    for rank, (timing, sizes, keys) in enumerate(times[:5], start=1):
        tile = f"{sizes.block_m} x {sizes.block_n}, {sizes.num_warps} warps, {sizes.num_stages} stages"
        note = f"{tile}, {keys} keys a split"
        found.append(Measurement.of_timing(f"{name}, candidate {rank}", timing, note=note))
    for each in found:
        print(f"{each.name:60} {each.median * 1e6:8.1f} us  {each.note}", flush=True)
    return found


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("tune_kernel needs a CUDA GPU")
    names = sys.argv[1:] or list(SHAPES)
    kinds = {"decode": DECODE, "split": DECODE, "prompt": PROMPT}
    variants = [(SHAPES[name], sizes, kind) for name in names for kind, each in kinds.items() for sizes in each]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        errors = dict(zip(variants, pool.map(compile_one, variants, chunksize=2), strict=True))
    usable = {variant for variant, error in errors.items() if not error}
    print(f"{len(usable)} of {len(variants)} candidates compile", flush=True)
    result = Result("s03_kernel_tuning", "Few programs want larger tiles of keys, many want more programs in flight.")
    for name in names:
        shape = SHAPES[name]
        for rows, context, splits in DECODES:
            tried = [((shape, s, "split" if n > 1 else "decode"), -(-context // n)) for s in DECODE for n in splits]
            tried = [each for each in tried if each[0] in usable]
            result.measurements += sweep(f"{name}: {rows} x {context}", [1] * rows, context, tried)
        for rows, length in PREFILLS:
            tried = [((shape, s, "prompt"), length) for s in PROMPT if (shape, s, "prompt") in usable]
            result.measurements += sweep(f"{name}: {rows} prompts of {length}", [length] * rows, length, tried)
    print(f"wrote {result.save().name}")


if __name__ == "__main__":
    main()
