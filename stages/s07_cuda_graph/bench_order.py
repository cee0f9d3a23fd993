"""`python -m stages.s07_cuda_graph.bench_order`: attention over rows of uneven length, as they stand or longest first.

The rows are those of the workload `mixed` after so many decode steps, the splits those of a captured graph.
"""

import torch

from reference.bench.gpu_shapes import SHAPES
from reference.bench.harness import Measurement, Result, folder_argument
from reference.bench.roofline import Shape
from reference.bench.workloads import workloads
from stages.s03_paged_kv.attention_plan import KernelPlan
from stages.s03_paged_kv.kernel_workloads import Workload, make_workload, plan_calls, time_calls
from stages.s03_paged_kv.tile_sizes import AttentionShape
from stages.s07_cuda_graph.padded_plan import short_launch
from stages.s07_cuda_graph.step_inputs import longest_first

LONGEST = 4096
STEPS = (0, 150, 500, 800)
MODELS = ("qwen3-0.6b", "qwen2.5-1.5b", "qwen2.5-7b")


def seconds(work: Workload, sort: bool) -> float:
    """Of one layer's attention."""
    rows, shape = len(work.kv_lens), work.shape
    tiles = torch.from_numpy(longest_first(dict(enumerate(work.kv_lens)), rows)).cuda() if sort else None
    plan = KernelPlan(shape, rows, (short_launch(rows, 1, tiles, shape, LONGEST),))
    return time_calls(plan_calls(work, plan), 7).median


def main() -> None:
    """Measure, print, save."""
    out = folder_argument(__doc__)
    result = Result(
        "s07_order",
        "A grid's programs start in order as processors become free. With the longest rows first, those that are still "
        "at work when nobody waits any more are short ones, and all processors end at about the same time.",
    )
    mixed = workloads()["mixed"]
    for name in MODELS:
        sizes = Shape.from_config(SHAPES[name])
        shape = AttentionShape(sizes.heads, sizes.kv_heads, sizes.head_dim, 16, 2)
        for step in STEPS:
            pairs = zip(mixed.prompts, mixed.output_lens, strict=True)
            lens = [len(prompt) + step + 1 for prompt, count in pairs if count > step]
            work = make_workload(shape, [1] * len(lens), lens)
            before, after = (seconds(work, sort) for sort in (False, True))
            what = f"{name}, {len(lens)} rows of {min(lens)} to {max(lens)} keys"
            for order, each in (("as they stand", before), ("longest first", after)):
                note = f"{work.kv_bytes / each / 1e9:,.0f} GB/s"
                result.measurements.append(Measurement.single(f"{what}, {order}", each * 1e6, "us", note=note))
                print(f"{result.measurements[-1].name:60} {each * 1e6:7.1f} us  {note}", flush=True)
    result.save(out)


if __name__ == "__main__":
    main()
