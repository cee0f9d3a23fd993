"""Measure, and write the result with everything that is needed to measure it again. In use:

ours, theirs = compare({"ours": run_ours, "theirs": run_theirs}).values()
result = Result("s01_forward", hypothesis="...", measurements=[Measurement.rate("ours", ours, tokens, "tok/s")])
result.save()  # reference/results/s01_forward.json
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from reference.bench.provenance import command, git_commit, machine, versions

RESULTS = Path(__file__).parents[1] / "results"


def gpu_argument(description: str | None, name: str, **settings: Any) -> Any:
    """The one positional argument of a benchmark that ends with an error if there is no CUDA GPU; --help needs none."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(name, **settings)
    value = getattr(parser.parse_args(), name)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    return value


def folder_argument(description: str | None) -> Path:
    """As `gpu_argument`: the folder for the result."""
    folder: Path = gpu_argument(
        description, "folder", nargs="?", type=Path, default=RESULTS, help="default: reference/results"
    )
    return folder


@dataclass(frozen=True)
class Timing:
    """Seconds of every repeat, in order, and their median and extremes."""

    median: float
    min: float
    max: float
    times: tuple[float, ...]

    @classmethod
    def of(cls, times: Sequence[float]) -> "Timing":
        if not times:
            raise ValueError("a timing needs at least one repeat, got 0")
        return cls(statistics.median(times), min(times), max(times), tuple(times))


def measure(fn: Callable[[], object], warmup: int = 1, repeats: int = 5) -> Timing:
    """Wall time of `fn()`: `warmup` calls do not count, then `repeats` that do. Waits for the GPU if it is used."""
    return compare({"": fn}, warmup, repeats)[""]


def compare(fns: Mapping[str, Callable[[], object]], warmup: int = 1, repeats: int = 5) -> dict[str, Timing]:
    """Like `measure` for several functions in turns (a b c, a b c, ...), so a machine that slows down slows all."""
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats must be at least 1 and warmup at least 0, got {repeats} and {warmup}")
    for _ in range(warmup):
        for fn in fns.values():
            fn()
    times: dict[str, list[float]] = {name: [] for name in fns}
    for _ in range(repeats):
        for name, fn in fns.items():
            times[name].append(_seconds(fn))
    return {name: Timing.of(values) for name, values in times.items()}


def _seconds(fn: Callable[[], object]) -> float:
    _wait_for_gpu()
    start = time.perf_counter()
    fn()
    _wait_for_gpu()
    return time.perf_counter() - start


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Measurement:
    """One line of a result: the median of its repeats, the extremes, the unit, and what it is compared with.

    Attributes:
        roofline: Share of the floor's rate that was reached, 0 to 1, where a floor was computed.
        note: Whatever the reader must know to judge the figure.
    """

    name: str
    median: float
    low: float
    high: float
    unit: str
    repeats: int = 1
    roofline: float | None = None
    note: str = ""

    @classmethod
    def of_timing(cls, name: str, timing: Timing, *, roofline: float | None = None, note: str = "") -> "Measurement":
        """Seconds per call."""
        return cls(name, timing.median, timing.min, timing.max, "s", len(timing.times), roofline, note)

    @classmethod
    def rate(
        cls, name: str, timing: Timing, amount: float, unit: str, *, roofline: float | None = None, note: str = ""
    ) -> "Measurement":
        """`amount` of work per second (say, tokens): the fastest repeat gives the high end."""
        median, low, high = amount / timing.median, amount / timing.max, amount / timing.min
        return cls(name, median, low, high, unit, len(timing.times), roofline, note)

    @classmethod
    def single(cls, name: str, value: float, unit: str, *, note: str = "") -> "Measurement":
        """A figure that has no spread: bytes, counts, the largest difference."""
        return cls(name, value, value, value, unit, note=note)


@dataclass
class Result:
    """What was expected, what was measured, and on what. Everything but the first five fields fills itself in.

    Attributes:
        name: File name of the result, without ".json".
        hypothesis: What was expected before the run, and why.
        measurements: The figures.
        wins: Where the thing measured helps.
        loses: Where it does not help, or costs.
    """

    name: str
    hypothesis: str
    measurements: list[Measurement] = field(default_factory=list)
    wins: str = ""
    loses: str = ""
    command: str = field(default_factory=command)
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
    commit: str = field(default_factory=git_commit)
    machine: dict[str, Any] = field(default_factory=machine)
    versions: dict[str, str] = field(default_factory=versions)

    def save(self, folder: Path = RESULTS) -> Path:
        """Write `<folder>/<name>.json` and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")
        return path

    @classmethod
    def load(cls, name: str, folder: Path = RESULTS) -> "Result":
        """Read back what `save` wrote."""
        content = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        content["measurements"] = [Measurement(**each) for each in content["measurements"]]
        return cls(**content)

    def __getitem__(self, measurement: str) -> Measurement:
        for each in self.measurements:
            if each.name == measurement:
                return each
        known = ", ".join(repr(each.name) for each in self.measurements)
        raise KeyError(f"result {self.name!r} has no measurement {measurement!r}; it has {known}")
