"""The table of one shape on a GPU: `python -m reference.bench gpu --all`, or `--model-shape all` for three of them.

Random bf16 weights of the real shape, made on the device. Before anything is timed, the engine's logits are compared
with Hugging Face's, in the steps that are timed: prefill whole and in chunks, prefixes from the cache, decode, one row
and many. That is the warm-up, too. Tokens are counted after every run. Results, written again after each run:

- `<stage>_gpu_<shape>`: throughput of the five workloads, as a share of the machine's floor and against the best peer,
  and times of steps; then where the time of a step goes, from runs of their own (`gpu_split.py`);
- with `--ablation` or `--batch-sizes` instead: what each part of the engine is worth (`gpu_ablation.py`).
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from reference.bench import gpu_ablation, tables
from reference.bench.gpu_bench import Bench, add_engine_options, check_device, prepared
from reference.bench.gpu_logits import LENGTHS
from reference.bench.gpu_parts import PARTS
from reference.bench.gpu_runs import Run, cut, forget, measurements, run_workload, what_counts
from reference.bench.gpu_shapes import SHAPES
from reference.bench.gpu_split import loads_of, measure_kernels, measure_split, plot_split
from reference.bench.gpu_steady import STEADY, fill_store
from reference.bench.harness import Measurement, Result
from reference.bench.peers import against_best_peer
from reference.bench.report import markdown_table
from reference.bench.roofline import H200, Machine, Shape
from reference.bench.workloads import NAMES, workloads
from stages import stage_names

EAGER = (
    "Eager steps launch every operation from Python, so a step takes as long as the host needs for its launches, "
    "however few tokens it computes: far from the floor in decode, nearer to it in prefill."
)
GRAPHS = (
    "A graph launches a whole decode step at once, fused kernels read and write activations less often, and the next "
    "step is planned and sent while this one runs: the host no longer decides. So `decode_heavy` and `mixed` take "
    "what reading weights and cache takes, `single` what a chain of small kernels over the weights takes, `prefill` "
    "what the matrix products take."
)


def measure_workloads(bench: Bench) -> Path:
    """Everything of one shape. Returns the result's file."""
    options, say, works = bench.options, bench.say, workloads()
    stage, shape_name = f"s{options.stage:02d}", options.model_shape
    name = "_without_".join([shape_name, *options.without])
    result = Result(f"{stage}_gpu_{name}", GRAPHS if options.stage >= 7 and "graphs" not in options.without else EAGER)
    capture = {"capture": options.capture} if options.stage >= 7 else {}
    start = time.perf_counter()
    llm = bench.build(options.without, **capture)
    run_workload(llm, cut(works["single"], None, 16))
    started = time.perf_counter() - start
    blocks = llm.engine.scheduler.cache.pool.num_blocks
    say(f"the engine is up, {blocks} blocks")
    agreement = bench.check(llm)
    bench.drop_model()
    note = (
        f"Hugging Face's own in bf16: {agreement.theirs:.4f}; {agreement.rows} rows, {agreement.chunks} chunks, "
        f"{agreement.reused} prompt tokens reused"
    )
    result.measurements = [
        Measurement.single("largest relative error of the logits", agreement.ours, "", note=note),
        Measurement.single("from weights in memory to the first tokens", started, "s", note=f"{blocks} blocks of 16"),
    ]
    shape = Shape.from_config(SHAPES[shape_name])
    machine = H200 if options.device == "cuda" and "H200" in torch.cuda.get_device_name() else None
    for name in options.workloads:
        work = cut(works[name], options.requests, options.tokens)
        runs: list[Run] = []
        before = list(result.measurements)
        while len(runs) < options.runs and (not runs or time.perf_counter() - bench.began < options.until):
            if name != "shared_prefix":
                forget(llm)
            runs.append(run_workload(llm, work))
            say(f"{name}: {runs[-1].seconds:.3f} s, {work.output_tokens / runs[-1].seconds:.0f} tok/s")
            found = measurements(work, runs, shape, machine)
            unit, amount = what_counts(work)
            peer = against_best_peer(shape_name, name, amount / min(run.seconds for run in runs))
            if machine and peer:
                note = f"{peer[1]}, in {unit}"
                found.append(Measurement.single(f"{name}, against the best peer", peer[0], "x", note=note))
            result.measurements = before + found
            result.save(options.out)
    if options.split:
        add_split(bench, llm, result, shape, machine)
    say("done")
    return result.save(options.out)


def add_split(bench: Bench, llm: Any, result: Result, shape: Shape, machine: Machine | None) -> None:
    """Where a step's time goes, into the same result, and a picture beside it; the profiler comes last of all."""
    options, works = bench.options, workloads()
    loads = [
        load
        for name in options.workloads
        for load in loads_of(
            cut(works[name], options.requests, options.tokens),
            options.batched_tokens,
            min(STEADY, options.tokens or STEADY),
        )
    ]
    fill_store(llm)
    parts = [measure_split(llm, load, shape, machine) for load in loads]
    result.measurements += [each for some in parts for each in some]
    result.save(options.out)
    bench.say("split")
    for load, some in zip(loads, parts, strict=True):
        gpu = next((each.median for each in some if each.name == f"{load.name}: GPU"), 0.0)
        result.measurements += measure_kernels(llm, load, gpu)
    for side, picture in plot_split(result.measurements, f"A step of {options.model_shape}").items():
        picture.save(options.out / f"{result.name}_{side.lower()}.svg")


def run_shape(options: argparse.Namespace) -> Path:
    """One shape, in this process."""
    with prepared(options, write=False) as bench:
        if options.ablation:
            return gpu_ablation.measure_ablation(bench)
        return gpu_ablation.measure_batch_sizes(bench) if options.batch_sizes else measure_workloads(bench)


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print the results; every shape of several in a process of its own."""
    options = parse(arguments)
    if options.model_shape == "all":
        given = sys.argv[2:] if arguments is None and sys.argv[1:2] == ["gpu"] else (arguments or sys.argv[1:])
        for shape in tables.SHAPES:
            ours = [shape if each == "all" else each.replace("=all", f"={shape}") for each in given]
            subprocess.run([sys.executable, "-m", "reference.bench", "gpu", *ours], check=True)
    else:
        print(markdown_table(run_shape(options)))
    if options.model_shape in ("all", *tables.SHAPES) and not (options.ablation or options.batch_sizes):
        print(tables.cells(options.stage, options.out))
        print(tables.split(stage=options.stage, folder=options.out))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m reference.bench gpu", description=__doc__)
    stages = [int(name[1:3]) for name in stage_names() if int(name[1:3]) >= 4]
    parser.add_argument("--model-shape", choices=(*SHAPES, "all"), default="qwen3-0.6b")
    parser.add_argument("--stage", type=int, choices=stages, default=7, help="7: later ones add no speed here")
    which = parser.add_mutually_exclusive_group()
    everything = "logits, all five workloads, and where a step's time goes (the default)"
    which.add_argument("--all", action="store_const", dest="workloads", const=NAMES, default=NAMES, help=everything)
    which.add_argument("--workloads", nargs="+", choices=NAMES, default=NAMES, help="only some of them")
    which.add_argument("--ablation", action="store_true", help="instead: each part of the engine off, one at a time")
    which.add_argument("--batch-sizes", type=int, nargs="+", help="instead: a decode step by the number of rows")
    parser.add_argument("--without", nargs="+", choices=PARTS, default=(), help="parts of the engine to leave out")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS), help="of the ablation")
    parser.add_argument("--capture", choices=("start", "lazy"), default="start", help="when graphs are captured")
    parser.add_argument("--no-split", dest="split", action="store_false", help="leave out where a step's time goes")
    parser.add_argument("--runs", type=int, default=2, help="of each workload; 0: only where a step's time goes")
    parser.add_argument("--until", type=float, default=float("inf"), help="no second run begins after so many seconds")
    parser.add_argument("--batched-tokens", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--requests", type=int, help="for a trial: only so many of each workload")
    parser.add_argument("--tokens", type=int, help="for a trial: prompts and answers of at most so many tokens")
    add_engine_options(parser, memory_share=0.7, longest_check=LENGTHS[-1])
    options = parser.parse_args(arguments)
    if options.stage < 7 and (options.without or options.ablation or options.batch_sizes):
        parser.error("only stage 07 has parts that can be switched off")
    if options.without and (options.ablation or options.batch_sizes):
        parser.error("--ablation and --batch-sizes choose themselves what is switched off: leave out --without")
    check_device(parser, options, trial="--device cpu --model-shape tiny --requests 4 --tokens 32")
    return options


if __name__ == "__main__":
    main()
