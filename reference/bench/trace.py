"""A few steady decode steps as the profiler saw them, and a picture: `python -m reference.bench trace`.

The same answers twice: launched one operation at a time, and with all of stage 07. The result `s07_trace_<shape>` has
what was counted, `s07_trace_<shape>_events.json` the recorded calls and kernels of the window that is drawn.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.patches import Patch

from reference.bench import kernel_kinds
from reference.bench.fresh import in_fresh_process, write_checkpoint
from reference.bench.gpu_shapes import SHAPES
from reference.bench.harness import RESULTS, Measurement, Result
from reference.bench.kernel_kinds import OTHER, kind_of, union
from reference.bench.report import markdown_table
from reference.picture import GREY, Picture, colour

STEPS, WARM = 6, 100  # recorded, and before that
WINDOW = 1500.0  # microseconds that are drawn
VARIANTS: dict[str, dict[str, Any]] = {
    "launched one by one": {"graphs": False, "fused": False, "few_rows": False, "overlap": False},
    "one graph": {},
}
KINDS: dict[str, dict[str, tuple[str, ...]]] = {  # by words in their names
    "host": {"launch": ("LaunchKernel",), "launch of a graph": ("GraphLaunch",), "wait": ("Synchronize",)},
    "GPU": kernel_kinds.KINDS,
}


class Event(NamedTuple):
    """A call of the host or an operation of the GPU, in microseconds."""

    start: float
    length: float
    name: str


Events = dict[str, list[Event]]  # "host" and "GPU", by their start


def record(step: Callable[[], Any], steps: int = STEPS) -> Events:
    """What the host called and the GPU did in so many steps; the clock begins with the first of it."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if torch.cuda.is_available() else activity.CPU]) as profile:
        for _ in range(steps):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        profile.export_chrome_trace(str(Path(scratch) / "trace.json"))
        return parse((Path(scratch) / "trace.json").read_text(encoding="utf-8"))


def parse(trace: str) -> Events:
    """A trace in Chrome's format."""
    kinds = {"cuda_runtime": "host", "cuda_driver": "host", "kernel": "GPU", "gpu_memcpy": "GPU", "gpu_memset": "GPU"}
    events: Events = {"host": [], "GPU": []}
    for each in json.loads(trace)["traceEvents"]:
        if kind := kinds.get(each.get("cat", "")):
            events[kind].append(Event(each["ts"], each["dur"], each["name"]))
    began = min((event.start for some in events.values() for event in some), default=0.0)
    return {
        kind: sorted(Event(round(start - began, 3), length, name) for start, length, name in some)
        for kind, some in events.items()
    }


def trace_steps(folder: Path, switches: dict[str, Any], device: str, rows: int) -> Events:
    """Steady steps of one engine."""
    from stages.s01_forward.sampling_params import SamplingParams
    from stages.s07_cuda_graph.llm import LLM

    llm: Any = LLM(folder, device=device, dtype="bfloat16", max_model_len=1024, kv_cache_mb=1024, **switches)
    params = SamplingParams(temperature=0.6, max_tokens=WARM + 4 * STEPS, ignore_eos=True)
    tokens = llm.stream([[row, 5, 6, 7] for row in range(rows)], params)

    def step() -> None:
        for _ in range(rows):
            next(tokens)

    for _ in range(WARM):
        step()
    events = record(step)
    tokens.close()
    return events


def counted(name: str, events: Events) -> list[Measurement]:
    """Per step: calls, operations, and how long the GPU was busy."""
    host, gpu = events["host"], events["GPU"]
    busy = union([(event.start, event.start + event.length) for event in gpu])
    span = max((event.start + event.length for event in gpu), default=0.0)
    note = "with the profiler on, which makes each call longer"
    return [
        Measurement.single(f"{name}: calls of the host", len(host) / STEPS, "per step"),
        Measurement.single(f"{name}: operations on the GPU", len(gpu) / STEPS, "per step"),
        Measurement.single(f"{name}: step", span / STEPS / 1000, "ms", note=note),
        Measurement.single(f"{name}: GPU busy", busy / STEPS / 1000, "ms per step"),
    ]


def window(events: Events) -> Events:
    """The middle of what was recorded, on a clock that begins there."""
    end = max((event.start + event.length for some in events.values() for event in some), default=0.0)
    began = max(0.0, (end - WINDOW) / 2)
    return {
        kind: [Event(round(e.start - began, 3), e.length, e.name[:60]) for e in some if 0 <= e.start - began < WINDOW]
        for kind, some in events.items()
    }


def draw(variants: dict[str, Events], title: str) -> Picture:
    """Two time lines for each variant, the host's above the GPU's, all on one scale."""
    picture = Picture(width=9.0, height=1.9 + 1.5 * len(variants))
    grid = picture.axes_grid(len(variants), 1, sharex=True)[:, 0]
    colours = {OTHER: GREY} | {kind: colour(index) for index, kind in enumerate([*KINDS["GPU"], *KINDS["host"]])}
    for ax, (name, events) in zip(grid, variants.items(), strict=True):
        for line, row in enumerate(KINDS):
            spans = [(event.start, event.length) for event in events[row]]
            shown = [colours[kind_of(event.name, KINDS[row])] for event in events[row]]
            ax.broken_barh(spans, (line - 0.36, 0.72), facecolors=shown, linewidth=0)
        ax.set_yticks((0, 1), ("host", "GPU"))
        ax.set_ylim(1.5, -0.5)
        ax.set_xlim(0, WINDOW)
        ax.set_title(name, fontsize=10, color=GREY)
    grid[-1].set_xlabel("µs")
    picture.suptitle(title, color=GREY)
    patches = [Patch(color=shade, label=kind) for kind, shade in colours.items()]
    picture.legend(handles=patches, loc="outside lower center", ncols=4, labelcolor=GREY, framealpha=0)
    return picture


def measure_trace(options: argparse.Namespace) -> Path:
    """Record, count, draw. Returns the result's file."""
    shape, out = options.model_shape, options.out
    result = Result(
        f"s07_trace_{shape}",
        "Launched one by one, the GPU's line is mostly gaps and the host's is full; as one graph it is the other way "
        "round.",
    )
    drawn: dict[str, Events] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch) / "model"
        in_fresh_process(write_checkpoint, shape, folder, options.device)
        for name, switches in VARIANTS.items():
            events = trace_steps(folder, switches, options.device, options.rows)
            result.measurements += counted(name, events)
            drawn[name] = window(events)
    title = f"Decode steps of {shape}, {options.rows} row{'s' * (options.rows > 1)}: {WINDOW / 1000} ms"
    draw(drawn, title).save(out / f"{result.name}.svg")
    (out / f"{result.name}_events.json").write_text(json.dumps(drawn) + "\n", encoding="utf-8", newline="\n")
    return result.save(out)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record and print."""
    parser = argparse.ArgumentParser(prog="python -m reference.bench trace", description=__doc__)
    parser.add_argument("--model-shape", choices=tuple(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU is here; `--device cpu --model-shape tiny` tries the rest, and records nothing")
    print(markdown_table(measure_trace(options)))


if __name__ == "__main__":
    main()
