"""Reads the exercises of a stage from its `exercises.toml`.

    lesson = "docs/stages/01-forward.md"            # may be left out: derived from the folder's name, as here

    [[exercise]]
    id = "01.1"                                     # number of the stage, a dot, a number
    title = "RMSNorm"
    minutes = 15
    lesson = "docs/stages/01-forward.md"            # may be left out: the stage's
    target = "stages.s01_forward.layers.rms_norm"   # a function, or a method: ...model.Attention.forward
    hints = ["a nudge", "more", "nearly the answer"]
    checks = ["test_layers.py::TestRmsNorm"]        # pytest ids, relative to the stage's folder
    mutants = [
      { why = "eps is forgotten", replace = " + eps", with = "" },
    ]

A mutant is a known-wrong variant of the target: `replace` occurs exactly once in the target's source and becomes
`with`. The checks of one exercise need the code of no other. What must hold for each is proved by `prove.py`.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stages


class CourseError(Exception):
    """Something the learner or the author can put right; the text says what."""


@dataclass(frozen=True)
class Mutant:
    why: str
    old: str
    new: str


@dataclass(frozen=True)
class Exercise:
    id: str
    title: str
    minutes: int
    file: str  # in the stage's folder: "layers.py"
    function: str  # "rms_norm", "Attention.forward"
    hints: tuple[str, ...]
    checks: tuple[str, ...]  # pytest ids from the root: "stages/s01_forward/test_layers.py::TestRmsNorm"
    mutants: tuple[Mutant, ...]
    lesson: str

    @property
    def message(self) -> str:
        """What the cut function raises."""
        return f"{self.id} {self.title}: see {self.lesson}"


@dataclass(frozen=True)
class Stage:
    name: str  # "s01_forward"
    folder: Path
    exercises: tuple[Exercise, ...]

    @property
    def number(self) -> str:
        return self.name[1:3]

    @property
    def files(self) -> list[str]:
        """The files that hold targets."""
        return sorted({e.file for e in self.exercises})


KEYS = {"id", "title", "minutes", "target", "hints", "checks", "mutants"}


def read_stage(folder: Path) -> Stage:
    """The stage in `folder`, with its exercises (none when it has no exercises.toml)."""
    toml = folder / "exercises.toml"
    if not toml.exists():
        return Stage(folder.name, folder, ())
    try:
        data = tomllib.loads(toml.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise CourseError(f"{toml}: {error}") from None
    lesson = data.get("lesson", f"docs/stages/{folder.name[1:].replace('_', '-')}.md")
    exercises = tuple(_exercise(table, folder, lesson) for table in data.get("exercise", []))
    ids = [e.id for e in exercises]
    if len(set(ids)) < len(ids):
        raise CourseError(f"{toml}: an exercise id occurs twice in {ids}")
    return Stage(folder.name, folder, exercises)


def _exercise(table: dict[str, Any], folder: Path, lesson: str) -> Exercise:
    where = f"{folder.name}/exercises.toml, exercise {table.get('id', '?')}"
    if set(table) - {"lesson"} != KEYS:
        missing, unknown = sorted(KEYS - set(table)), sorted(set(table) - KEYS - {"lesson"})
        raise CourseError(f"{where}: missing keys {missing}, unknown keys {unknown}")
    if not re.fullmatch(rf"{folder.name[1:3]}\.[1-9]\d*", table["id"]):
        raise CourseError(f"{where}: the id must be {folder.name[1:3]}.1, {folder.name[1:3]}.2 ...")
    if len(table["hints"]) != 3 or not table["checks"] or not table["mutants"]:
        raise CourseError(f"{where}: three hints, at least one check and at least one mutant are needed")
    prefix = f"stages.{folder.name}."
    module, _, function = table["target"].removeprefix(prefix).partition(".")
    if not table["target"].startswith(prefix) or not function or not (folder / f"{module}.py").exists():
        raise CourseError(f"{where}: target {table['target']!r} is not a function of a file of {folder.name}")
    for mutant in table["mutants"]:
        if set(mutant) != {"why", "replace", "with"}:
            raise CourseError(f"{where}: a mutant has the keys why, replace and with, not {sorted(mutant)}")
    return Exercise(
        id=table["id"],
        title=table["title"],
        minutes=table["minutes"],
        file=f"{module}.py",
        function=function,
        hints=tuple(table["hints"]),
        checks=tuple(f"stages/{folder.name}/{check}" for check in table["checks"]),
        mutants=tuple(Mutant(m["why"], m["replace"], m["with"]) for m in table["mutants"]),
        lesson=table.get("lesson", lesson),
    )


def read_stages() -> list[Stage]:
    return [read_stage(stages.STAGES_DIR / name) for name in stages.stage_names()]


def find_stage(text: str) -> Stage:
    """The stage that "1", "01", "s01" or "s01_forward" means."""
    match = re.fullmatch(r"s?(\d{1,2})(_\w+)?", text)
    names = [n for n in stages.stage_names() if match and int(n[1:3]) == int(match[1])]
    if not names:
        here = ", ".join(f"{n[1:3]} ({n[4:].replace('_', ' ')})" for n in stages.stage_names())
        raise CourseError(f"There is no stage {text!r}. The stages here are: {here}.")
    return read_stage(stages.STAGES_DIR / names[0])


def find_exercise(text: str) -> tuple[Stage, Exercise]:
    """The exercise that "1.2" or "01.2" means, and its stage."""
    number, dot, rest = text.partition(".")
    if not dot and not number.isdecimal():
        raise CourseError(f"{text!r} is no exercise; an exercise has the form 01.2: stage, dot, number.")
    stage = find_stage(number)
    for exercise in stage.exercises:
        if exercise.id == f"{stage.number}.{rest}":
            return stage, exercise
    known = ", ".join(f"{e.id} ({e.title})" for e in stage.exercises) or "none"
    fault = f"There is no exercise {text!r}." if dot else f"{text!r} is a stage; name one of its exercises."
    raise CourseError(f"{fault} Stage {stage.number} has: {known}.")
