"""Runs checks against the learner's files, in this process, with pytest's own output kept aside."""

import contextlib
import io
import subprocess
import sys

import pytest

import stages
from stages.workshop.exercises import Exercise, Stage
from stages.workshop.results import Recorder, Verdict

ROOT = stages.STAGES_DIR.parent


def run(ids: list[str], *options: str) -> tuple[Recorder, str]:
    """Run these pytest ids. Returns what they came to, and what pytest printed."""
    recorder, printed = Recorder(), io.StringIO()
    args = [*ids, f"--rootdir={ROOT}", "-p", "no:cacheprovider", "-q", "--tb=short", *options]
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = pytest.main(args, plugins=[recorder])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not recorder.outcomes:
        raise RuntimeError(f"pytest could not run {ids} (exit code {code}):\n{printed.getvalue()}")
    return recorder, printed.getvalue()


def check_exercises(exercises: list[Exercise]) -> tuple[dict[str, Verdict], str]:
    """Exercise id -> verdict, and pytest's output, for the learner's files."""
    ids = list(dict.fromkeys(check for exercise in exercises for check in exercise.checks))
    recorder, printed = run(ids, "--mine")
    return {e.id: recorder.verdict(e.checks) for e in exercises}, printed


def check_whole_stage(stage: Stage) -> int:
    """All checks of the stage against the learner's files, in a process of their own. Returns pytest's exit code."""
    return subprocess.call([sys.executable, "-m", "pytest", str(stage.folder), "--mine", "-q"], cwd=ROOT)
