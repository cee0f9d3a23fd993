"""The peers' figures, and ours beside them: `python -m reference.bench peers` prints the table.

`reference/results/peers_h200.json` was measured through the peers' own Python interfaces (vLLM's and nano-vllm's
`LLM.generate`, SGLang's `Engine.generate`), a process for each engine and shape, on the kind of GPU that our figures
come from. The conditions: the workloads of `workloads.py`, bf16 weights and K/V, random weights, no speculation,
temperature 0.6 over the whole vocabulary, the end token ignored, at most 256 running, two runs after a warm-up, the
prefix cache emptied before every run but those of `shared_prefix`. Engines are compared by their best runs.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from reference.bench.report import RESULTS
from reference.bench.workloads import NAMES

FILE = "peers_h200.json"
OURS = "ours"


def peers(shape: str, workload: str, folder: Path = RESULTS) -> dict[str, float]:
    """Tokens per second of each peer's best run; empty for a shape that was not measured."""
    result = json.loads((folder / FILE).read_text(encoding="utf-8"))
    start = f"{shape}, {workload}, "
    rows = {row["name"].removeprefix(start): row for row in result["measurements"] if row["name"].startswith(start)}
    return {engine: row["high"] for engine, row in rows.items()}


def against_best_peer(shape: str, workload: str, rate: float) -> tuple[float, str] | None:
    """How many times the best peer's rate that is, and who that is with how much; None if nobody was measured."""
    rates = peers(shape, workload)
    if not rates:
        return None
    best = max(rates, key=rates.__getitem__)
    return rate / rates[best], f"{best} ({rates[best]:,.0f})"


def peers_table(ours: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown: each shape's rates, the best of a cell in bold, and ours as a share of the best peer's.

    ours: tokens per second of our best run, by shape and workload.
    """
    lines = ["| model shape | engine | " + " | ".join(NAMES) + " |", "|---|---|" + "---:|" * len(NAMES)]
    for shape, mine in ours.items():
        cells = {name: {**peers(shape, name), OURS: mine.get(name, 0.0)} for name in NAMES}
        engines = list(dict.fromkeys(engine for cell in cells.values() for engine in cell))
        for engine in engines:
            row = [_rate(cells[name], engine) for name in NAMES]
            lines.append(f"| {shape} | {engine} | {' | '.join(row)} |")
        ratios = [against_best_peer(shape, name, mine.get(name, 0.0)) for name in NAMES]
        shown = [f"{found[0]:.2f}" if found and found[0] else "" for found in ratios]
        lines.append(f"| {shape} | ours / best peer | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _rate(cell: Mapping[str, float], engine: str) -> str:
    rate = cell.get(engine, 0.0)
    if not rate:
        return ""
    return f"**{rate:,.0f}**" if rate == max(cell.values()) else f"{rate:,.0f}"


def our_rates(stage: int, folder: Path = RESULTS) -> dict[str, dict[str, float]]:
    """Tokens per second of the best runs in the results that are there, by shape and workload."""
    found: dict[str, dict[str, float]] = {}
    start = f"s{stage:02d}_gpu_"
    for path in sorted(folder.glob(f"{start}*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))["measurements"]
        rates = {row["name"].removesuffix(", best run"): row["median"] for row in rows if ", best run" in row["name"]}
        if peers(shape := path.stem.removeprefix(start), NAMES[0]):
            found[shape] = rates
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print the table of the newest stage that ran the workloads."""
    del arguments
    stages = {int(path.name[1:3]) for path in RESULTS.glob("s[0-9][0-9]_gpu_*.json")}
    rates = {stage: our_rates(stage) for stage in stages}
    print(peers_table(rates[max(stage for stage in stages if any(rates[stage].values()))]))


if __name__ == "__main__":
    main()
