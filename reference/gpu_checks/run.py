"""Every check that needs a CUDA GPU, shared out over processes; exit status 1 if anything failed.

The checks are in sections; `--only 07-engine` runs one of them, and replaces what the report says of that one. The
report is `reference/results/gpu_checks.json`.
"""

import argparse
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from reference.bench.harness import RESULTS, Measurement, Result
from reference.bench.provenance import git_commit
from reference.bench.report import markdown_table
from reference.checkpoints import FAMILIES
from reference.gpu_checks import attention, fast_engine, guessing
from reference.gpu_checks.check import Check, within

Task = tuple[Callable[..., list[Check]], Sequence[Any]]
TITLES = {
    "03-attention": "the attention kernel over the whole grid",
    "03-engine": "what is around it, and stage 03's engine",
    "07-norm": "norms, rotary embedding and SwiGLU, and the forward pass for many rows",
    "07-sampling": "the sampler, and 50,000 draws of each setting",
    "07-few-rows": "products with few rows",
    "07-chunks": "attention for chunks of prompts, and of rows that begin alike",
    "07-engine": "graphs, overlap, padding, delays",
    "08-engine": "guesses that stand and fall, in graphs of their own",
    "two-gpus": "engines on a GPU that is not the current one",
}
NAME = "gpu_checks"


PARTS = 8  # into which the cases of a kind of kernel are divided: most of their time is compilation


def norm_cases(part: int) -> list[Check]:
    """Norms, rotary embedding, SwiGLU against torch in the same dtype: every `PARTS`-th case."""
    from stages.s07_cuda_graph.fused_ops import fused_ops
    from stages.s07_cuda_graph.norm_cases import ALLOWED, large_cases, small_cases

    ops, checks = fused_ops(torch.device("cuda")), []
    for case in [*small_cases(), *large_cases()][part::PARTS]:
        found, allowed = case.compare(getattr(ops, case.op), torch.device("cuda")), ALLOWED[case.dtype]
        group, note = str(case.dtype).removeprefix("torch."), f"{100 * found.share:.2g} % of the elements differ"
        checks.append(Check(str(case), found.within_limits(case.dtype), found.error, allowed, group, note))
    return checks


def few_row_cases(part: int) -> list[Check]:
    """Few-row products and forward passes against float64 or the model: every `PARTS`-th case."""
    from stages.s07_cuda_graph.few_cases import small_cases
    from stages.s07_cuda_graph.few_model_cases import large_cases, model_cases, run_case

    cases = [*small_cases(), *model_cases(), *large_cases()][part::PARTS]
    return [within(*run_case(case), group=str(case.dtype).removeprefix("torch.")) for case in cases]


def many_row_cases() -> list[Check]:
    """The forward pass for many rows against the model's, and the norm that adds parts up against float64."""
    from stages.s07_cuda_graph.many_cases import large_cases, run_case, small_cases

    cases = [*small_cases(), *large_cases()]
    return [within(*run_case(case), group=str(case.dtype).removeprefix("torch.")) for case in cases]


def chunk_cases(compiled: str) -> list[Check]:
    """Attention for chunks against exact attention: the cases that take the same compiled kernel."""
    from stages.s07_cuda_graph.chunk_gpu_cases import large_cases

    return exact([case for case in large_cases() if case.compiled == compiled])


def chunk_repeats() -> list[Check]:
    """The kernel whose warps meet at barriers gives the same bits 200 times, whatever runs beside what."""
    from stages.s07_cuda_graph.chunk_gpu_cases import LAUNCHES, racing_cases

    found = [(case, case.differing(LAUNCHES)) for case in racing_cases()]
    return [Check(f"{LAUNCHES} times: {case}", not n, note=f"{n} of them differ" if n else "") for case, n in found]


def common_cases(part: int) -> list[Check]:
    """Attention that reads common keys once against exact attention: every `PARTS`-th case."""
    from stages.s07_cuda_graph.common_cases import large_cases, small_cases

    return exact([*small_cases(), *large_cases()][part::PARTS])


def exact(cases: Sequence[Any]) -> list[Check]:
    """Cases of stage 07's attention: each says how far it is from exact attention."""
    from stages.s07_cuda_graph.chunk_cases import ALLOWED

    return [
        within(str(case), case.run("cuda"), ALLOWED[case.dtype], group=str(case.dtype).removeprefix("torch."))
        for case in cases
    ]


def sampling_cases() -> list[Check]:
    """The sampler's: each yields what is wrong, or nothing."""
    from stages.s07_cuda_graph.sampling_gpu import sampling_gpu_cases

    return [Check(name, not wrong, note=wrong) for name, wrong in sampling_gpu_cases("cuda")]


def tasks(section: str, options: argparse.Namespace) -> list[Task]:
    """A section in pieces that can run side by side."""
    if section == "03-attention":
        return [(attention.attention_checks, (each,)) for each in attention.grid(options.dtypes, options.every)]
    if section == "03-engine":
        return [(attention.engine_checks, ())]
    if section == "07-engine":
        return fast_engine.parts("cuda")
    if section == "08-engine":
        return guessing.parts("cuda", FAMILIES)
    if section == "two-gpus":
        from reference.gpu_checks import two_gpus  # stage 09 comes with it, and what a server needs

        return two_gpus.parts()
    if section == "07-chunks":
        from stages.s07_cuda_graph.chunk_gpu_cases import large_cases

        kinds = dict.fromkeys(case.compiled for case in large_cases())
        return [
            *((chunk_cases, (kind,)) for kind in kinds),
            (chunk_repeats, ()),
            *((common_cases, (part,)) for part in range(PARTS)),
        ]
    if section == "07-sampling":
        return [(sampling_cases, ())]
    if section == "07-norm":
        return [(many_row_cases, ()), *((norm_cases, (part,)) for part in range(PARTS))]
    return [(few_row_cases, (part,)) for part in range(PARTS)]


def guarded(function: Callable[..., list[Check]], arguments: Sequence[Any]) -> list[Check]:
    """An error is a check that failed, and the others go on."""
    torch.set_num_threads(1)
    try:
        return function(*arguments)
    except Exception:
        name = f"{function.__name__}({', '.join(map(str, arguments))})"
        return [Check(name, False, note=traceback.format_exc(limit=-3).strip().replace("\n", " | "))]


def run(sections: Sequence[str], options: argparse.Namespace) -> Iterator[tuple[str, list[Check]]]:
    """Each section's checks when its last piece is done. All of them share the processes, the long pieces first."""
    context = multiprocessing.get_context("spawn")  # a forked process cannot use the GPU
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        pieces = {pool.submit(guarded, *task): name for name in reversed(sections) for task in tasks(name, options)}
        checks: dict[str, list[Check]] = {name: [] for name in sections}
        left = Counter(pieces.values())
        for piece in as_completed(pieces):
            section = pieces[piece]
            for check in piece.result():
                checks[section].append(check)
                if not check.passed:
                    print(f"FAILED {section}: {check}", flush=True)
            left[section] -= 1
            if not left[section]:
                yield section, sorted(checks[section], key=lambda check: check.name)


def measurements(section: str, checks: Sequence[Check], seconds: float) -> list[Measurement]:
    """How many checks of a section, which failed, and the worst figure of each group."""
    failed = [check.name for check in checks if not check.passed]
    when = f"done after {seconds:.0f} s, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {git_commit()}"
    found = [
        Measurement.single(f"{section}: checks", len(checks), "", note=f"{TITLES[section]}; {when}"),
        Measurement.single(f"{section}: failed", len(failed), "", note=", ".join(failed)),
    ]
    for group in dict.fromkeys(check.group for check in checks if check.group):
        mine = [check for check in checks if check.group == group]
        found.append(Measurement.single(f"{section}: largest error, {group}", max(c.error for c in mine), ""))
        share = max(c.error / c.allowed if c.allowed else c.error for c in mine)
        found.append(Measurement.single(f"{section}: share of what is allowed, {group}", share, ""))
    return found


def merged(new: dict[str, list[Measurement]], folder: Path) -> Result:
    """A report with the new sections, and the others as the last report has them."""
    result = Result(NAME, hypothesis=(
        "The attention kernel is as exact as torch's own attention, whatever the shape, the lengths and the layout; "
        "every other kernel is as exact as torch's operations; and no graph, padding, batch or delay changes a token."
    ))  # fmt: skip
    old: list[Measurement] = []
    if (folder / f"{NAME}.json").is_file():
        old = Result.load(NAME, folder).measurements
    for section in TITLES:
        result.measurements += new.get(section) or [m for m in old if m.name.startswith(f"{section}: ")]
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run the sections, write the report, say what failed."""
    parser = argparse.ArgumentParser(prog="python -m reference.gpu_checks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(TITLES), default=tuple(TITLES), help="sections")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the report")
    grid = parser.add_argument_group("03-attention")
    grid.add_argument("--dtypes", nargs="+", choices=attention.DTYPES, default=attention.DTYPES)
    grid.add_argument("--every", type=int, default=1, help="every n-th setting of the grid")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (they compile)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "gpu_checks needs a CUDA GPU; in Triton's interpreter the kernels run on a CPU: pytest stages/03 stages/07"
        )
        return 2
    sections = [name for name in TITLES if name in options.only]
    if "two-gpus" in sections and torch.cuda.device_count() < 2:
        print("two-gpus needs two CUDA GPUs: left out, the report keeps what it says of it")
        sections.remove("two-gpus")
    if not sections:
        return 2
    began, failed, path = time.perf_counter(), False, Path()
    done: dict[str, list[Measurement]] = {}
    for section, checks in run(sections, options):
        seconds = time.perf_counter() - began
        print(f"{section}: {len(checks)} checks, done after {seconds:.0f} s", flush=True)
        failed |= not all(check.passed for check in checks)
        done[section] = measurements(section, checks, seconds)
        path = merged(done, options.out).save(options.out)
    print(markdown_table(path))
    return 1 if failed else 0
