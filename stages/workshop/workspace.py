"""The learner's folder: `workspace/s01_forward/` holds the cut files, `workspace/progress.json` what was reached.

Nothing of the learner's is replaced unless `force` is given, and even then the replaced file is kept beside the new one
as `layers.py.old`, `layers.py.old2` and so on.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages import workspace_dir
from stages.workshop.cut import cut, function_text, put_function
from stages.workshop.exercises import CourseError, Exercise, Stage, read_stages

CUT_FROM = "cut_from.json"  # in the stage's workspace: file -> digest of the source that it was cut from


@dataclass
class Progress:
    """What the learner has reached: hints shown per exercise, and per green exercise the digest of its file."""

    hints: dict[str, int] = field(default_factory=dict)
    green: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls) -> "Progress":
        path = workspace_dir() / "progress.json"
        if not path.exists():
            return cls()
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise CourseError(f"{path} cannot be read ({error}). Delete it: only hints and ticks are lost.") from None

    def save(self) -> None:
        workspace_dir().mkdir(parents=True, exist_ok=True)
        _write_json(workspace_dir() / "progress.json", {"hints": self.hints, "green": self.green})


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def mine(stage: Stage, file: str = "") -> Path:
    """The learner's folder of a stage, or a file in it."""
    return workspace_dir() / stage.name / file


def shown(path: Path) -> str:
    """A path as the learner would type it: relative to the current folder where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def shipped(stage: Stage, file: str) -> str:
    return (stage.folder / file).read_text(encoding="utf-8")


def cut_file(stage: Stage, file: str) -> str:
    """The source of a file of the stage, with every exercise in it cut."""
    source = shipped(stage, file)
    for exercise in stage.exercises:
        if exercise.file == file:
            source = cut(source, exercise)
    return source


def start(stage: Stage, force: bool = False) -> tuple[list[Path], list[Path]]:
    """Cut the stage's files into the workspace. Returns the files that were written, and those that were kept."""
    if not stage.exercises:
        raise CourseError(f"Stage {stage.number} has no exercises.")
    written, kept, versions = [], [], _versions(stage)
    for file in stage.files:
        path = mine(stage, file)
        if path.exists() and not force:
            kept.append(path)
            continue
        _write(path, cut_file(stage, file))
        versions[file] = digest(shipped(stage, file))
        written.append(path)
    _write_json(mine(stage, CUT_FROM), versions)
    return written, kept


def outdated(stage: Stage) -> list[str]:
    """The learner's files that were cut from another version of the course than this one."""
    versions = _versions(stage)
    present = [f for f in stage.files if mine(stage, f).exists()]
    return [f for f in present if versions.get(f) != digest(shipped(stage, f))]


def version_warning(stage: Stage) -> str | None:
    """A sentence when the learner's files of this stage stem from another version of the course."""
    files = outdated(stage)
    if not files:
        return None
    names = ", ".join(shown(mine(stage, f)) for f in files)
    return (
        f"{names}: cut from another version of the course, so the checks may ask for more than the file has. "
        f"`python course.py start {stage.number} --force` cuts the present version and keeps your file as .old"
    )


def reset(stage: Stage, exercise: Exercise) -> Path:
    """Cut one function again in the learner's file; the rest of the file stays. Returns where the old file is kept."""
    path = require_file(stage, exercise)
    fresh = function_text(cut_file(stage, exercise.file), exercise.function)
    return _write(path, put_function(read_mine(stage, exercise), exercise.function, fresh))


def require_file(stage: Stage, exercise: Exercise) -> Path:
    path = mine(stage, exercise.file)
    if not path.exists():
        raise CourseError(f"{shown(path)} is not there. First: python course.py start {stage.number}")
    return path


def read_mine(stage: Stage, exercise: Exercise) -> str:
    """The learner's file of an exercise; a file that is no Python gives an error that names the line."""
    path = require_file(stage, exercise)
    source = path.read_text(encoding="utf-8")
    try:
        function_text(source, exercise.function)
    except SyntaxError as error:
        raise CourseError(f"{shown(path)}, line {error.lineno}: {error.msg}. Correct that first.") from None
    except CourseError:
        raise CourseError(f"{shown(path)} no longer has the function {exercise.function}.") from None
    return source


def is_started(stage: Stage) -> bool:
    return any(mine(stage, file).exists() for file in stage.files)


def is_green(exercise: Exercise, stage: Stage, progress: Progress) -> bool:
    """Its checks passed, and its file has not changed since."""
    path = mine(stage, exercise.file)
    return path.exists() and progress.green.get(exercise.id) == digest(path.read_text(encoding="utf-8"))


def stages_to_take(asked: list[str]) -> list[Stage]:
    """The stages that take the learner's files: those asked for, and earlier ones that are wholly green.

    `asked` holds stage numbers; empty means every stage that was started.
    """
    progress = Progress.load()
    started = [s for s in read_stages() if is_started(s)]
    if not asked:
        return started
    return [
        s
        for s in started
        if s.number in asked
        or (s.number < max(asked) and not outdated(s) and all(is_green(e, s, progress) for e in s.exercises))
    ]


def _versions(stage: Stage) -> dict[str, str]:
    path = mine(stage, CUT_FROM)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _write(path: Path, text: str) -> Path:
    """Write `text`; a file that is there is kept under another name, which is returned."""
    kept = path
    if path.exists():
        names = [path.with_name(f"{path.name}.old{n}") for n in ("", *range(2, 1000))]
        kept = next(p for p in names if not p.exists())
        path.replace(kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
    return kept


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
