"""`python -m stages.s03_paged_kv.bench_kernel`: decode bandwidth and prefill rate of the attention kernel on a GPU.

Every time is the median over replays of a CUDA graph that runs the kernel once per layer over different layers, whose
keys together exceed the L2 cache several times: what an engine's step sees, launch gaps included.
"""

import sys
import time

import torch

from reference.bench.harness import RESULTS, Measurement, Result, Timing
from reference.bench.plots import lines
from reference.picture import GREY, Picture
from stages.s03_paged_kv.kernel_workloads import (
    contiguous_calls,
    copy_bandwidth,
    kernel_calls,
    make_workload,
    time_calls,
    time_host,
)
from stages.s03_paged_kv.tile_sizes import AttentionShape

SHAPES = {
    "8 kv heads, group 2, D 128": AttentionShape(16, 8, 128, 16, 2),
    "4 kv heads, group 7, D 128": AttentionShape(28, 4, 128, 16, 2),
    "8 kv heads, group 4, D 64": AttentionShape(32, 8, 64, 16, 2),
}
MAIN_SHAPE = "8 kv heads, group 2, D 128"
ROWS = (1, 4, 16, 64, 256)
CONTEXTS = (256, 1024, 4096, 16384)
PREFILLS = ((16, 512), (4, 2048), (1, 8192))  # prompts x tokens


def measure_decode(copy: float) -> list[Measurement]:
    found = []
    for name, shape in SHAPES.items():
        for rows in ROWS:
            for context in CONTEXTS:
                work = make_workload(shape, [1] * rows, [context] * rows)
                timing, size = time_calls(kernel_calls(work)), work.kv_bytes * 1e-9
                share = work.kv_bytes / timing.median / copy
                found.append(Measurement.rate(
                    f"decode, {name}: {rows} x {context}", timing, size, "GB/s", roofline=share,
                    note=f"{timing.median * 1e6:.1f} us",
                ))  # fmt: skip
                print(f"{found[-1].name:55} {found[-1].median:7.0f} GB/s {share:6.1%}  {found[-1].note}", flush=True)
                del work
    return found


def measure_prefill() -> list[Measurement]:
    found = []
    for name, shape in SHAPES.items():
        for rows, length in PREFILLS:
            work = make_workload(shape, [length] * rows, [length] * rows)
            calls = {"ours": kernel_calls(work)[:4]}
            calls |= {backend: contiguous_calls(work, backend)[:4] for backend in ("flash", "cudnn")}
            for who, each in calls.items():
                timing = time_calls(each)
                found.append(
                    Measurement.rate(
                        f"prefill, {name}: {rows} x {length}, {who}", timing, work.flops * 1e-12, "TFLOP/s"
                    )
                )
                print(f"{found[-1].name:55} {found[-1].median:7.0f} TFLOP/s", flush=True)
    return found


def measure_odd_batches(copy: float) -> list[Measurement]:
    """What the grids leave out: ragged lengths, decodes next to a chunk of a prompt, host time, cuDNN's first calls."""
    shape = SHAPES[MAIN_SHAPE]
    lengths = (torch.randint(1, 2048, (64,), generator=torch.Generator().manual_seed(0))).tolist()
    work = make_workload(shape, [1] * 64, lengths)
    timing = time_calls(kernel_calls(work))
    found = [Measurement.rate(
        "decode, 64 rows of 1 to 2,047 keys", timing, work.kv_bytes * 1e-9, "GB/s",
        roofline=work.kv_bytes / timing.median / copy,
    )]  # fmt: skip
    found.append(Measurement.of_timing("host time of a call, decode", time_host(kernel_calls(work)[0])))
    work = make_workload(shape, [1] * 16, [1024] * 16)
    found.append(Measurement.of_timing("host time of a call, decode with splits", time_host(kernel_calls(work)[0])))
    found.append(Measurement.of_timing("16 decodes at 1,024", time_calls(kernel_calls(work))))
    work = make_workload(shape, [512], [2048])
    found.append(Measurement.of_timing("a chunk of 512 ending at 2,048", time_calls(kernel_calls(work))))
    work = make_workload(shape, [1] * 16 + [512], [1024] * 16 + [2048])
    found.append(Measurement.of_timing("both in one batch", time_calls(kernel_calls(work))))
    firsts = []
    for length in (1000, 1111, 1222, 1333, 1444):
        call = contiguous_calls(make_workload(shape, [length], [length]), "cudnn")[0]
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        firsts.append(time.perf_counter() - start)
    found.append(Measurement.of_timing("cudnn, first call at a new prompt length", Timing.of(firsts)))
    for each in found:
        print(f"{each.name:55} {each.median:10.4g} {each.unit}", flush=True)
    return found


def decode_plot(result: Result) -> Picture:
    """GB/s by keys per row, one line per number of rows, under the rate of a plain copy on the same GPU."""
    series = {f"{n} row{'s' * (n > 1)}": [result[f"decode, {MAIN_SHAPE}: {n} x {c}"] for c in CONTEXTS] for n in ROWS}
    gpu = " and ".join(result.machine["gpu"])
    plot = lines(series, CONTEXTS, "keys per row", f"Decode attention, {MAIN_SHAPE}, {gpu}", log=True)
    ax = plot.axes[0]
    ax.axhline(result["copy"].median, color=GREY, linestyle="--", label="a copy")
    ax.legend(labelcolor=GREY, framealpha=0)
    return plot


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("bench_kernel needs a CUDA GPU")
    copy = copy_bandwidth()
    print(f"copy: {copy * 1e-9:.0f} GB/s", flush=True)
    hypothesis = (
        "Decode reads every key and value once and does little else, so it should run at the speed of a copy; the "
        "fewer bytes a batch holds, the more the fixed cost of launching, filling and draining the GPU counts."
    )
    result = Result("s03_kernel", hypothesis)
    result.measurements = [Measurement.single("copy", copy * 1e-9, "GB/s", note="device to device, 4 GiB")]
    result.measurements += measure_decode(copy) + measure_prefill() + measure_odd_batches(copy)
    result.wins = "Decode of many rows or long contexts runs at nearly the speed of a copy, through the block table."
    result.loses = (
        "Few and short rows: a few microseconds of fixed cost against few bytes. Long prompts: cuDNN on contiguous "
        "keys is faster once it has a plan, but it makes one for each new prompt length, and that takes far longer."
    )
    print(f"wrote {result.save().name}")
    decode_plot(result).save(RESULTS / "s03_kernel_decode.svg")


if __name__ == "__main__":
    main()
