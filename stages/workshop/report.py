"""What a run against the learner's files came to, as plain lines: for `pytest --mine` and for `course check`."""

from stages.workshop.exercises import Exercise, Stage
from stages.workshop.results import Recorder, Verdict
from stages.workshop.workspace import Progress, digest, mine, shown

FIRST_RED = (
    "Red is what a fresh start looks like: the functions above have no body yet. "
    "Write them in the file that is named, run the checks again, and they turn green one by one."
)


def lines(stage: Stage, verdicts: dict[str, Verdict]) -> list[str]:
    """One or more lines per exercise of the stage that has a verdict."""
    out: list[str] = []
    unwritten = 0
    for exercise in stage.exercises:
        verdict = verdicts.get(exercise.id)
        if verdict is None:
            continue
        where = f"function {exercise.function} in {shown(mine(stage, exercise.file))}"
        if verdict.green:
            out.append(f"green  {exercise.id} {exercise.title}: all {verdict.passed} checks pass")
        elif exercise.message in verdict.reason:
            unwritten += 1
            out.append(f"red    {exercise.id} {exercise.title}: not written yet: {where}")
        else:
            out.append(f"red    {exercise.id} {exercise.title}: {_why(verdict)}: {where}")
            out += [f"         {line}" for line in verdict.reason.splitlines()]
            out += [f"         in {verdict.where}"] if verdict.where else []
    if unwritten and unwritten == len(verdicts):
        out.append(FIRST_RED)
    return out


def _why(verdict: Verdict) -> str:
    if verdict.failed:
        return f"{verdict.failed} of {verdict.passed + verdict.failed} checks fail"
    return f"{verdict.skipped} checks were skipped" if verdict.skipped else "no check ran"


def record(stage: Stage, verdicts: dict[str, Verdict], before: dict[str, str]) -> None:
    """Keep which exercises are green; `before` holds the digests of the learner's files when the run began."""
    progress = Progress.load()
    for exercise in stage.exercises:
        verdict = verdicts.get(exercise.id)
        if verdict and verdict.green:
            progress.green[exercise.id] = before[exercise.file]
        elif verdict:
            progress.green.pop(exercise.id, None)
    progress.save()


def digests(stage: Stage) -> dict[str, str]:
    """File -> digest of the learner's text."""
    present = [f for f in stage.files if mine(stage, f).exists()]
    return {f: digest(mine(stage, f).read_text(encoding="utf-8")) for f in present}


def verdicts_of(stage: Stage, recorder: Recorder, args: list[str]) -> dict[str, Verdict]:
    """Exercise id -> verdict, for the exercises whose checks were all part of the run."""
    whole: list[Exercise] = [e for e in stage.exercises if recorder.complete(e, args)]
    return {e.id: recorder.verdict(e.checks) for e in whole}
