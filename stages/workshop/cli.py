"""The `course` command; `python course.py start 01` runs it too."""

import difflib
import importlib.util
from collections.abc import Callable
from functools import wraps
from typing import Annotated, ParamSpec

import typer
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax

from stages.workshop import workspace
from stages.workshop.cut import function_text
from stages.workshop.exercises import CourseError, Exercise, Stage, find_exercise, find_stage
from stages.workshop.workspace import Progress, is_green, is_started, mine, shown, version_warning

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Build the engine yourself, stage by stage.",
)
console = Console(highlight=False, soft_wrap=True)
P = ParamSpec("P")

StageArg = Annotated[str, typer.Argument(help="the number of a stage: 01")]
ExerciseArg = Annotated[str, typer.Argument(help="the number of an exercise: 01.2")]
Force = Annotated[bool, typer.Option("--force", help="do it all the same")]


def command(function: Callable[P, None]) -> Callable[P, None]:
    """Registers a command; a CourseError becomes its plain text and exit code 1."""

    @app.command()
    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except CourseError as error:
            say(f"[red]{escape(str(error))}[/]")
            raise typer.Exit(1) from None

    return run


def say(text: str = "") -> None:
    console.print(text)


@command
def start(stage: StageArg, force: Force = False) -> None:
    """Cut the exercises of a stage into workspace/, for you to write."""
    it = find_stage(stage)
    written, kept = workspace.start(it, force)
    for path in written:
        say(f"[green]written[/]  {escape(shown(path))}")
    for path in kept:
        say(f"[yellow]kept[/]     {escape(shown(path))}: it is yours. --force cuts it anew and keeps yours as .old")
    _warn_version(it)
    lessons = list(dict.fromkeys(exercise.lesson for exercise in it.exercises))
    say(f"\nStage {it.number}, lesson: {' and '.join(lessons)}. Edit only these functions:")
    for exercise in it.exercises:
        where = f"{shown(mine(it, exercise.file))}, function {exercise.function}"
        say(f"  [bold]{exercise.id} {escape(exercise.title)}[/] ({exercise.minutes} min): {escape(where)}")
    say(f"\nThen: [bold]python course.py check {it.number}[/]. The first run is red: that is how it is meant to be.")
    say(f"Stuck? [bold]python course.py hint {it.exercises[0].id}[/]")


@command
def check(
    what: Annotated[str, typer.Argument(help="a stage (01) or one exercise (01.2)")],
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show pytest's own output")] = False,
) -> None:
    """Run the checks against your files: first of the exercises, and when these are green, of the whole stage."""
    if importlib.util.find_spec("pytest") is None:
        raise CourseError("The checks need pytest, which is not installed here. First: python course.py setup dev")
    from stages.workshop import checks, report  # here only: the other commands need no pytest

    it, exercises = _stage_or_exercise(what)
    for exercise in exercises:
        workspace.read_mine(it, exercise)
    _warn_version(it)
    earlier = [stage.number for stage in workspace.stages_to_take([it.number]) if stage.number != it.number]
    if earlier:
        say(f"With your own code of stage {', '.join(earlier)}, too: it is green.")
    verdicts, printed = checks.check_exercises(exercises)
    if verbose:
        console.print(printed, markup=False)
    for line in report.lines(it, verdicts):
        colour = "green" if line.startswith("green") else "red" if line.startswith("red") else "default"
        say(f"[{colour}]{escape(line)}[/]")
    red = [e for e in exercises if not verdicts[e.id].green]
    if red:
        say(f"\nNext: {red[0].id}. A hint: [bold]python course.py hint {red[0].id}[/]")
        if not verbose and any(exercise.message not in verdicts[exercise.id].reason for exercise in red):
            say(f"More of what failed: [bold]python course.py check {red[0].id} --verbose[/]")
        raise typer.Exit(1)
    if len(exercises) < len(it.exercises):
        return
    say(f"\nAll exercises of stage {it.number} are green. Now every check of the stage, with your code in it:")
    raise typer.Exit(checks.check_whole_stage(it))


@command
def hint(exercise: ExerciseArg) -> None:
    """One more hint for an exercise, each time you ask."""
    _, it = find_exercise(exercise)
    progress = Progress.load()
    count = min(progress.hints.get(it.id, 0) + 1, len(it.hints))
    progress.hints[it.id] = count
    progress.save()
    for number, text in enumerate(it.hints[:count], start=1):
        say(f"[bold]Hint {number} of {len(it.hints)}[/]  {escape(text)}")
    if count == len(it.hints):
        say(f"That was the last one. The solution: [bold]python course.py reveal {it.id} --force[/]")


@command
def reveal(exercise: ExerciseArg, force: Force = False) -> None:
    """Show the solution of an exercise, once its checks pass."""
    stage, it = find_exercise(exercise)
    _after_green(stage, it, force)
    text = function_text(workspace.shipped(stage, it.file), it.function)
    console.print(Syntax(text, "python", background_color="default"))


@command
def diff(exercise: ExerciseArg, force: Force = False) -> None:
    """Compare your function with the shipped one, once its checks pass."""
    stage, it = find_exercise(exercise)
    _after_green(stage, it, force)
    yours = function_text(workspace.read_mine(stage, it), it.function).splitlines()
    ours = function_text(workspace.shipped(stage, it.file), it.function).splitlines()
    lines = list(difflib.unified_diff(yours, ours, "yours", "shipped", lineterm=""))
    console.print(Syntax("\n".join(lines) or "They are the same.", "diff", background_color="default"))


@command
def reset(exercise: ExerciseArg, force: Force = False) -> None:
    """Put an exercise back to its start."""
    if "." not in exercise:
        number = find_stage(exercise).number
        raise CourseError(
            f"reset takes one exercise, such as {number}.1. For the whole stage: python course.py start {number} "
            "--force, which cuts its files anew and keeps yours as .old"
        )
    stage, it = find_exercise(exercise)
    path = workspace.require_file(stage, it)
    if not force:
        raise CourseError(
            f"This removes what you wrote in {it.function} of {shown(path)}; the rest of the file stays, "
            f"and the old file is kept as .old. Say it again with --force: python course.py reset {it.id} --force"
        )
    kept = workspace.reset(stage, it)
    say(f"{it.id} {escape(it.title)} is cut again in {escape(shown(path))}; your file is now {escape(shown(kept))}")


@command
def progress() -> None:
    """A map of the stages: what is green, what is to do."""
    from stages.workshop.progress import table

    console.print(table())


def _stage_or_exercise(text: str) -> tuple[Stage, list[Exercise]]:
    if "." in text:
        stage, exercise = find_exercise(text)
        return stage, [exercise]
    stage = find_stage(text)
    if not is_started(stage):
        raise CourseError(f"You have not started stage {stage.number}. First: python course.py start {stage.number}")
    return stage, list(stage.exercises)


def _after_green(stage: Stage, exercise: Exercise, force: bool) -> None:
    if not force and not is_green(exercise, stage, Progress.load()):
        raise CourseError(
            f"The checks of {exercise.id} have not passed on your file as it is now. First: python course.py check "
            f"{exercise.id}. To see it all the same, add --force."
        )


def _warn_version(stage: Stage) -> None:
    warning = version_warning(stage)
    if warning:
        say(f"[yellow]{escape(warning)}[/]")
