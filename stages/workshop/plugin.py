"""The pytest plugin behind `pytest stages/01` and `--mine`; the root `conftest.py` loads it.

`pytest stages/01`, `stages/1`, `stages/01::TestX` and `stages/01/test_model.py` name a stage by its number. With
`--mine` the stage takes the learner's files from the workspace, and so do earlier stages whose exercises are all green.
"""

import re
from pathlib import Path

import pytest

import stages
from stages.workshop import report
from stages.workshop.exercises import CourseError, Stage, find_stage
from stages.workshop.results import Recorder
from stages.workshop.workspace import stages_to_take, version_warning

ROOT = stages.STAGES_DIR.parent
_mine = pytest.StashKey["Mine"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("stepinfer").addoption(
        "--mine", action="store_true", help="run against your files in workspace/ instead of the shipped ones"
    )


def pytest_configure(config: pytest.Config) -> None:
    try:
        config.args[:] = [stage_path(arg, config.invocation_params.dir) for arg in config.args]
        if config.getoption("--mine"):
            config.stash[_mine] = mine = Mine(_relative(config))
            if not hasattr(config, "workerinput"):  # under pytest-xdist the first process records for all
                config.pluginmanager.register(mine, "stepinfer-mine")
                config.pluginmanager.register(mine.recorder, "stepinfer-recorder")
    except CourseError as error:
        raise pytest.UsageError(str(error)) from None


def stage_path(arg: str, cwd: Path) -> str:
    """`stages/01/...` with the folder's real name; anything else as it is."""
    path, sep, rest = arg.partition("::")
    match = re.fullmatch(r"((?:.*[\\/])?stages)[\\/]s?(\d+)([\\/].*)?", path)
    if not match or (cwd / match[1]).resolve() != stages.STAGES_DIR:
        return arg
    target = Path(f"{find_stage(match[2]).folder}{match[3] or ''}")
    if sep and target.is_dir():  # pytest takes no `folder::Class`: find the file that defines it
        name = re.split(r"::|\[", rest)[0]
        defines = re.compile(rf"^(class|def|async def) {re.escape(name)}\b", re.MULTILINE)
        found = [f for f in sorted(target.glob("test_*.py")) if defines.search(f.read_text(encoding="utf-8"))]
        if len(found) != 1:
            files = ", ".join(f.name for f in found) or "no file"
            raise CourseError(f"{name} is in {files} of {target.name}; name the file: stages/01/test_x.py::{name}")
        target = found[0]
    return f"{target}{sep}{rest}"


def _relative(config: pytest.Config) -> list[str]:
    """The arguments as pytest ids from the root, with forward slashes."""
    ids = []
    for arg in config.args:
        path, sep, rest = arg.partition("::")
        full = (config.invocation_params.dir / path).resolve()
        ids.append((full.relative_to(ROOT).as_posix() if full.is_relative_to(ROOT) else path) + sep + rest)
    return ids


class Mine:
    """A run against the learner's files: chooses them, and says and records what the run came to."""

    def __init__(self, args: list[str]) -> None:
        self.args = args
        asked = {m[1] for a in args if (m := re.match(r"stages/s(\d\d)_", a))}
        self.stages: list[Stage] = stages_to_take(sorted(asked))
        if not self.stages:
            raise CourseError(
                f"--mine: there is nothing of yours in {stages.workspace_dir()}. "
                f"First: python course.py start {min(asked, default='01')}"
            )
        stages.use_workspace(",".join(s.number for s in self.stages))
        self.asked = [s for s in self.stages if s.number in asked or not asked]
        self.recorder = Recorder()
        self.before = {s.name: report.digests(s) for s in self.stages}

    def pytest_report_header(self) -> list[str]:
        taken = [f"{s.name} ({', '.join(f for f in s.files if f in self.before[s.name])})" for s in self.stages]
        warnings = [w for s in self.stages if (w := version_warning(s))]
        return [f"yours: {', '.join(taken)}", *warnings]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for stage in self.asked:
            verdicts = report.verdicts_of(stage, self.recorder, self.args)
            if verdicts:
                terminalreporter.section(f"your stage {stage.number}")
                for line in report.lines(stage, verdicts):
                    terminalreporter.write_line(line, green=line.startswith("green"), red=line.startswith("red"))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        cut_short = session.shouldstop or session.shouldfail or session.config.getoption("collectonly", False)
        for stage in self.asked:
            verdicts = report.verdicts_of(stage, self.recorder, self.args)
            if verdicts and not cut_short:
                report.record(stage, verdicts, self.before[stage.name])
