"""Tables that several results make together, for the site and the terminal: `python -m reference.bench tables NAME`.

Only the standard library is used, so that the site can be built where torch is not installed.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reference.bench.peers import against_best_peer
from reference.bench.report import RESULTS
from reference.bench.workloads import NAMES

SHAPES = ("qwen3-0.6b", "qwen2.5-1.5b", "qwen2.5-7b")
STEPS = ("decode step", "step with prompts")
FLOORED = ("products", "attention", "sampling")
TARGETS = {  # tokens per second that were set before the campaign, in the order of NAMES
    "qwen3-0.6b": (27_000, 42_000, 1600, 395_000, 64 * 32 / 0.150),
    "qwen2.5-1.5b": (38_000, 65_000, 950, 205_000, 64 * 32 / 0.140),
    "qwen2.5-7b": (13_700, 27_000, 268, 48_000, 64 * 32 / 0.240),
}
Rows = Mapping[str, Mapping[str, Any]]  # measurements of a result by their names


def rows_of(name: str, folder: Path = RESULTS) -> Rows:
    """The measurements of a result; none if there is no such file."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return {}
    return {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["measurements"]}


def table(head: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Markdown; the first `left` columns are text, the others figures."""
    marks = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, marks, *lines))


def cells(stage: int = 7, folder: Path = RESULTS) -> str:
    """The best runs: tokens per second, how many times the best peer's, share of the floor, target, what was before."""
    lines, before = [], rows_of("speed_before", RESULTS)
    for shape in SHAPES:
        rows = rows_of(f"s{stage:02d}_gpu_{shape}", folder)
        best = {name: rows[f"{name}, best run"] for name in NAMES if f"{name}, best run" in rows}
        if best:
            lines.append([shape, *(_rate(shape, name, best) for name in NAMES)])
            shares = [each.get("roofline") for each in (best.get(name, {}) for name in NAMES)]
            lines.append(["… of the floor", *("" if share is None else f"{share:.0%}" for share in shares)])
            reached = [best.get(name, {}).get("median", 0.0) >= goal for name, goal in _targets(shape)]
            goals = [f"{goal:,.0f}" for _, goal in _targets(shape)]
            lines.append(["… target", *(f"**{g}**" if hit else g for g, hit in zip(goals, reached, strict=True))])
            lines.append(["… before", *(f"{before[f'{shape}, {name}']['median']:,.0f}" for name in NAMES)])
    return table(["", "mixed", "decode_heavy", "single", "prefill (input)", "shared_prefix"], lines)


def _targets(shape: str) -> list[tuple[str, float]]:
    return list(zip(NAMES, TARGETS[shape], strict=True))


def _rate(shape: str, workload: str, best: Rows) -> str:
    if workload not in best:
        return ""
    rate = best[workload]["median"]
    peer = against_best_peer(shape, workload, rate)
    assert peer is not None, f"no peer was measured on {shape}, {workload}"
    return f"{rate:,.0f} · **{peer[0]:.2f}**" if peer[0] >= 1 else f"{rate:,.0f} · {peer[0]:.2f}"


def split(*shapes: str, stage: int = 7, folder: Path = RESULTS) -> str:
    """Milliseconds of a step by what takes them; in brackets what the floor takes of that."""
    head = [
        "", "step", "ms", "products", "attention", "sampling", "small", "other", "gaps", "GPU idle", "host works",
        "floor", "share",
    ]  # fmt: skip
    return table(head, [[*names, *_parts(took)] for names, took in _steps(shapes, stage, folder)], left=2)


def left(*shapes: str, stage: int = 7, folder: Path = RESULTS) -> str:
    """Per cent of a step that are above the floor, by what takes them; the most of each step in bold."""
    lines = []
    for names, took in _steps(shapes, stage, folder):
        over = [took[part] - took[f"floor, {part}"] for part in FLOORED]
        over += [took["small"] + took["other"], took["gaps"] + took["idle"]]
        percent = [100 * each / took[""] for each in over]
        shown = [f"**{each:.0f}**" if each == max(percent) else f"{each:.0f}" for each in percent]
        lines.append([*names, f"{100 * (1 - took['floor'] / took['']):.0f}", *shown])
    head = ["", "step", "above the floor, %", "products", "attention", "sampling", "small, other", "nothing runs"]
    return table(head, lines, left=2)


def _steps(shapes: Sequence[str], stage: int, folder: Path) -> list[tuple[list[str], dict[str, float]]]:
    """Shape and name of each step that was taken apart, and its milliseconds by part; "": all of it."""
    found = []
    for shape in shapes or SHAPES:
        rows = rows_of(f"s{stage:02d}_gpu_{shape}", folder)
        for step in (f"{name}, {kind}" for name in NAMES for kind in STEPS):
            if f"{step}: GPU busy" in rows:
                mine = {name: row["median"] for name, row in rows.items() if name.startswith(step)}
                found.append(([shape, step], {name[len(step) :].removeprefix(": "): ms for name, ms in mine.items()}))
    return found


def _parts(took: Mapping[str, float]) -> list[str]:
    works = sum(took[f"host, {part}"] for part in ("schedule", "launch", "update", "outside"))
    floored = [f"{took[part]:.3g} ({took[f'floor, {part}']:.3g})" for part in FLOORED]
    others = [f"{took[part]:.3g}" for part in ("small", "other", "gaps", "idle")]
    share = took["floor"] / took[""]
    return [f"{took['']:.3g}", *floored, *others, f"{works:.2g}", f"{took['floor']:.3g}", f"{share:.0%}"]


def ablation(shape: str = SHAPES[0], folder: Path = RESULTS) -> str:
    """How many times as long each workload takes without a part; in bold where it is a tenth or more."""
    rows = rows_of(f"speed_ablation_{shape}", folder)
    names = [name for name in NAMES if f"{name}, everything" in rows]
    variants = list(dict.fromkeys(name.partition(", ")[2] for name in rows))

    def slower(workload: str, variant: str) -> str:
        if variant == "everything":
            return f"{rows[f'{workload}, everything']['high']:,.0f}"
        times = rows[f"{workload}, everything"]["high"] / rows[f"{workload}, {variant}"]["high"]
        return f"**{times:.2f}**" if times >= 1.1 else f"{times:.2f}"

    lines = [
        [f"{variant} (tok/s)" if variant == "everything" else variant, *(slower(name, variant) for name in names)]
        for variant in variants
    ]
    return table(["", *names], lines)


def lines(folder: Path = RESULTS) -> str:
    """Lines of code by stage, the engine's beside the server's."""
    rows = rows_of("speed_lines", folder)
    found = [[*name.split(", "), f"{row['median']:,.0f}", row["note"]] for name, row in rows.items()]
    return table(["", "stage", "lines of code", "in"], found, left=2)


TABLES: dict[str, Callable[..., str]] = {
    "cells": cells,
    "split": split,
    "left": left,
    "ablation": ablation,
    "lines": lines,
}


def main(arguments: list[str] | None = None) -> None:
    """Print one of them."""
    parser = argparse.ArgumentParser(prog="python -m reference.bench tables", description=__doc__)
    parser.add_argument("name", choices=TABLES)
    parser.add_argument("shapes", nargs="*", help="of the split and the ablation: only these shapes")
    options = parser.parse_args(arguments)
    print(TABLES[options.name](*options.shapes))


if __name__ == "__main__":
    main()
