"""Turns pytest's reports into what a learner wants to know: per exercise green or red, and why, in words."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from stages.workshop.exercises import Exercise


@dataclass(frozen=True)
class Verdict:
    passed: int
    failed: int
    skipped: int
    reason: str  # of the first failure, at most a few lines; "" when nothing failed
    where: str  # the check that failed first

    @property
    def green(self) -> bool:
        return self.passed > 0 and not self.failed and not self.skipped


@dataclass(eq=False)  # pytest compares plugins: two that hold the same are two all the same
class Recorder:
    """A pytest plugin that keeps what each check came to."""

    outcomes: dict[str, str] = field(default_factory=dict)  # node id -> "passed", "failed", "skipped"
    texts: dict[str, str] = field(default_factory=dict)  # of failures: the whole text
    reasons: dict[str, str] = field(default_factory=dict)  # of failures: the assertion
    left_out: list[str] = field(default_factory=list)  # deselected by -k, -m, --deselect

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._add(report.nodeid, report.outcome, report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._add(report.nodeid, report.outcome, report)

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        self.left_out += [item.nodeid for item in items]

    def _add(self, nodeid: str, outcome: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        if self.outcomes.get(nodeid) == "failed":  # the first failure counts, not what its teardown says
            return
        self.outcomes[nodeid] = outcome
        if outcome == "failed":
            self.texts[nodeid] = report.longreprtext
            self.reasons[nodeid] = _reason(report)

    def verdict(self, checks: Iterable[str]) -> Verdict:
        """What the checks with these pytest ids came to. A file that cannot be imported counts as one failure."""
        mine = [n for n in self.outcomes if any(_within(n, c) or _within(c, n) for c in checks)]
        failed = [n for n in mine if self.outcomes[n] == "failed"]
        count = [self.outcomes[n] for n in mine].count
        first = failed[0] if failed else ""
        return Verdict(count("passed"), count("failed"), count("skipped"), self.reasons.get(first, ""), first)

    def complete(self, exercise: Exercise, args: Iterable[str]) -> bool:
        """Whether the run that was asked for by `args` held all checks of the exercise."""
        asked = all(any(_within(check, arg) for arg in args) for check in exercise.checks)
        return asked and not any(_within(n, c) for n in self.left_out for c in exercise.checks)


def _within(node: str, parent: str) -> bool:
    """Whether the pytest id `node` is `parent` or lies in it."""
    return node == parent or parent in ("", ".") or node.startswith((f"{parent}::", f"{parent}[", f"{parent}/"))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        lines = [line for line in crash.message.splitlines() if line.strip() and "Use -v to get" not in line]
        return "\n".join(lines[:4])
    lines = [line.removeprefix("E").strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return "\n".join(lines[-4:]) or report.longreprtext[-400:]
