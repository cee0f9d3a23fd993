"""From a result file to Markdown, for the site: `python -m reference.bench.report NAME` prints what the pages show.

Only the standard library is used, so that the site can be built where torch is not installed.
"""

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def markdown_table(path: str | Path) -> str:
    """Table of the measurements in the result file `path`, and below it hypothesis, verdict, machine and command."""
    result = json.loads(Path(path).read_text(encoding="utf-8"))
    rows = result["measurements"]
    columns = ["measured", "median", "lowest to highest"]
    shares, notes = any(row["roofline"] is not None for row in rows), any(row["note"] for row in rows)
    columns += ["of the roofline"] * shares + ["note"] * notes
    lines = [_row(columns), _row(["---", "---:", "---:"] + ["---:"] * shares + ["---"] * notes)]
    for row in rows:
        cells = [row["name"], quantity(row["median"], row["unit"]), _spread(row)]
        if shares:
            cells.append("" if row["roofline"] is None else f"{100 * row['roofline']:.3g} %")
        lines.append(_row(cells + [row["note"]] * notes))
    return "\n".join([*lines, "", *_paragraphs(result)]) + "\n"


def _paragraphs(result: dict[str, Any]) -> list[str]:
    named = {"Hypothesis": "hypothesis", "Where it wins": "wins", "Where it loses": "loses"}
    said = [f"**{title}:** {result[key]}\n" for title, key in named.items() if result[key]]
    return [*said, f"{_setting(result)}. Made by `{result['command']}`."]


def _setting(result: dict[str, Any]) -> str:
    machine, on = result["machine"], [*result["machine"].get("gpu", ())]
    if "cpu" in machine:  # what is known of the machine of other engines' figures is its GPU
        threads = f"{machine['threads']} thread" + "s" * (machine["threads"] != 1)
        on += [f"{machine['cpu']} ({threads})", machine["os"]]
    with_ = [f"{package} {version}" for package, version in result["versions"].items()]
    at = f" at commit {result['commit']}" if result["commit"] else ""
    return f"Measured {result['date']}{at} on {', '.join(on)}, with {', '.join(with_)}"


def _spread(row: dict[str, Any]) -> str:
    if row["repeats"] == 1:
        return ""
    return f"{quantity(row['low'], row['unit'])} to {quantity(row['high'], row['unit'])} ({row['repeats']} runs)"


def quantity(value: float, unit: str) -> str:
    """Three digits and the unit, with seconds and bytes scaled: quantity(0.0042, "s") == "4.2 ms"."""
    if unit == "s" and 0 < value < 1:
        factor, unit = (1e3, "ms") if value >= 1e-3 else (1e6, "µs")
        value *= factor
    elif unit == "B":
        power = min(len(BINARY) - 1, max(0, (int(abs(value)).bit_length() - 1) // 10))
        value, unit = value / 1024**power, BINARY[power]
    return f"{_digits(value)} {unit}".rstrip()


def _digits(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main(arguments: list[str] | None = None) -> None:
    """Print the result that the command line names."""
    given = sys.argv[1:] if arguments is None else arguments
    names = ", ".join(sorted(path.stem for path in RESULTS.glob("*.json"))) or "none yet"
    usage = f"usage: python -m reference.bench.report NAME\nresults: {names}"
    if given in (["-h"], ["--help"]):
        print(usage)
        return
    if len(given) != 1:
        sys.exit(usage)
    path = RESULTS / f"{given[0]}.json"
    if not path.is_file():
        sys.exit(f"there is no result {path.name} in reference/results")
    print(markdown_table(path))


if __name__ == "__main__":
    main()
