"""From weights on disk to the first token: `python -m reference.bench startup --model-shape qwen3-0.6b`.

Each start is a process of its own, with every graph captured before the first request: once with an empty cache of
compiled kernels, then with a full one. The weights have just been written, so reading them is reading memory.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch

from reference.bench.first_token import PHASES, start
from reference.bench.fresh import in_fresh_process, timed_start, write_checkpoint
from reference.bench.gpu_shapes import SHAPES
from reference.bench.harness import RESULTS, Measurement, Result, Timing
from reference.bench.report import markdown_table


def measure_startup(options: argparse.Namespace) -> Result:
    """One cold start, then `warm` warm ones."""
    result = Result(
        f"s07_startup_{options.model_shape}",
        "Compiling kernels is most of a cold start, and reading weights and capturing graphs of a warm one: under 20 s "
        "for the smallest shape.",
    )
    memory = {"kv_cache_mb": options.kv_cache_mb} if options.kv_cache_mb else {"memory_share": options.memory_share}
    arguments = {"max_model_len": 4096, "max_num_seqs": options.rows, "max_num_batched_tokens": 8192, **memory}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        os.environ["TRITON_CACHE_DIR"] = str(Path(scratch) / "kernels")
        folder = Path(scratch) / "model"
        in_fresh_process(write_checkpoint, options.model_shape, folder, options.device)
        starts = [timed_start(start, folder, options.device, arguments) for _ in range(1 + options.warm)]
    for name, some in {"cold": starts[:1], "warm": starts[1:]}.items():
        timings = {phase: Timing.of([each["phases"][phase] for each in some]) for phase in PHASES}
        total = Timing.of([sum(each["phases"].values()) for each in some])
        note = f"{some[0]['graphs']} graphs"
        result.measurements.append(Measurement.of_timing(f"{name} kernel cache, to the first token", total, note=note))
        for phase, timing in timings.items():
            result.measurements.append(Measurement.of_timing(f"{name} kernel cache: {phase}", timing))
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measure, save, print."""
    parser = argparse.ArgumentParser(prog="python -m reference.bench startup", description=__doc__)
    parser.add_argument("--model-shape", choices=tuple(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--warm", type=int, default=2, help="starts with a full cache of kernels")
    parser.add_argument("--rows", type=int, default=256, help="max_num_seqs: graphs are captured up to so many rows")
    parser.add_argument("--memory-share", type=float, default=0.7)
    parser.add_argument("--kv-cache-mb", type=float, help="the cache's size instead (needed on a CPU)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU is here; `--device cpu --model-shape tiny --kv-cache-mb 8 --rows 8` tries the rest")
    if options.warm < 1:
        parser.error(f"--warm must be at least 1, got {options.warm}")
    print(markdown_table(measure_startup(options).save(options.out)))


if __name__ == "__main__":
    main()
