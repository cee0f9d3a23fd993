"""Proves the exercises of a stage: `python -m stages.workshop.prove 01`.

Every exercise is run in each of its variants, against a workspace of its own:
cut       only this exercise is cut: each of its checks fails, and names the exercise as the cause;
solution  every other exercise of the stage is cut: its checks pass, so they need no other exercise's code;
mutant    the target is a known-wrong variant: at least one check fails.
All run in this one process, because loading torch takes longer than the checks do.
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import stages
from stages.workshop.checks import ROOT, run
from stages.workshop.cut import cut, mutate
from stages.workshop.exercises import Exercise, Stage, find_stage
from stages.workshop.results import Recorder

PLAIN = "--assert=plain"  # no `assert` is rewritten to tell its values: only for a cut are they read


@dataclass(frozen=True)
class Proof:
    exercise: str
    variant: str
    fault: str  # what does not hold; "" when all is well


def prove(stage: Stage) -> list[Proof]:
    """All variants of all exercises of a stage."""
    _forget_modules()  # what another stage's workspace has left
    proofs = []
    for exercise in stage.exercises:
        proofs.append(Proof(exercise.id, "cut", _fault_of_cut(stage, exercise)))
        proofs.append(Proof(exercise.id, "solution", _fault_of_solution(stage, exercise)))
        for mutant in exercise.mutants:
            wrong = mutate(_source(stage, exercise.file), exercise, mutant)
            recorder = _run(exercise, stage, {exercise.file: wrong}, PLAIN, "-x", "--tb=no")
            caught = "failed" in recorder.outcomes.values()
            proofs.append(Proof(exercise.id, f"mutant: {mutant.why}", "" if caught else "no check fails"))
    return proofs


def variants(stage: Stage) -> list[tuple[str, str]]:
    """(exercise id, variant) of every proof that `prove` gives, in its order."""
    return [
        (e.id, variant)
        for e in stage.exercises
        for variant in ("cut", "solution", *(f"mutant: {m.why}" for m in e.mutants))
    ]


def _fault_of_cut(stage: Stage, exercise: Exercise) -> str:
    source = cut(_source(stage, exercise.file), exercise)
    recorder = _run(exercise, stage, {exercise.file: source})
    for check in exercise.checks:
        if not recorder.verdict([check]).failed:
            return f"{check} does not fail"
    for node, text in recorder.texts.items():
        if exercise.message not in text:
            return f"{node} fails for another reason than the cut:\n{text}"
    return ""


def _fault_of_solution(stage: Stage, exercise: Exercise) -> str:
    files = {file: _source(stage, file) for file in stage.files}
    for other in stage.exercises:
        if other.id != exercise.id:
            files[other.file] = cut(files[other.file], other)
    recorder = _run(exercise, stage, files, PLAIN)
    for check in exercise.checks:
        verdict = recorder.verdict([check])
        if not verdict.green:
            counts = f"{verdict.passed} passed, {verdict.failed} failed, {verdict.skipped} skipped"
            return f"{check}: {counts}\n{recorder.texts.get(verdict.where, '')}"
    return ""


def _run(exercise: Exercise, stage: Stage, files: dict[str, str], *options: str) -> Recorder:
    """The exercise's checks against a fresh workspace with these files."""
    with tempfile.TemporaryDirectory(prefix="prove", ignore_cleanup_errors=True) as folder:
        for file, text in files.items():
            path = Path(folder) / stage.name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        os.environ["STEPINFER_WORKSPACE"] = folder
        _forget_modules(stage.number)
        # Errors in destructors are not looked for: for these pytest collects garbage ten times.
        return run(list(exercise.checks), "--mine", "-p", "no:unraisableexception", *options)[0]


def _forget_modules(number: str = "00") -> None:
    """Unload everything of this repository but this tool, so that the next run imports it from the next workspace.

    Stages before the one of this number stay: they are the shipped ones, and import nothing of it.
    """
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        keep = name in ("stages", "__main__") or name.startswith("stages.workshop")
        keep = keep or name.startswith("stages.s") and name[8:10] < number
        path = Path(file)
        ours = path.is_relative_to(ROOT) and not path.is_relative_to(Path(sys.prefix))
        if not keep and (ours or name.startswith("stages.s")):
            del sys.modules[name]


def _source(stage: Stage, file: str) -> str:
    return (stage.folder / file).read_text(encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Prints one JSON object per proof; the exit code is 1 when one does not hold."""
    sys.dont_write_bytecode = True  # variants of one file follow each other within the clock's resolution
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the plugins of this repository are all that is needed
    with tempfile.TemporaryDirectory(prefix="prove", ignore_cleanup_errors=True) as folder:
        os.environ["STEPINFER_TINY"] = folder  # see tests/fixtures.py
        proofs = [p for name in arguments or [n[1:3] for n in stages.stage_names()] for p in prove(find_stage(name))]
    for proof in proofs:
        print(json.dumps(asdict(proof)))
    return int(any(p.fault for p in proofs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
