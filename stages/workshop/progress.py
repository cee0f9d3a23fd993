"""The learner's map: every stage, every exercise, and what it came to."""

from rich.table import Table

from stages.workshop.exercises import Exercise, Stage, read_stages
from stages.workshop.workspace import Progress, is_green, is_started, outdated


def table() -> Table:
    """One row per exercise of the stages that are here."""
    progress = Progress.load()
    out = Table(title="Your way through StepInfer", title_justify="left", show_lines=False)
    for name in ("Stage", "Exercise", "Minutes", "State", "Hints"):
        out.add_column(name, justify="right" if name in ("Minutes", "Hints") else "left")
    for stage in read_stages():
        name = f"{stage.number} {stage.name[4:].replace('_', ' ')}"
        if stage.exercises and outdated(stage):
            name += "\n(cut from another version)"
        if not stage.exercises:
            out.add_row(name, "no exercises", "", "", "")
        for exercise in stage.exercises:
            hints = f"{progress.hints.get(exercise.id, 0)}/{len(exercise.hints)}"
            state = state_of(stage, exercise, progress)
            out.add_row(name, f"{exercise.id} {exercise.title}", str(exercise.minutes), state, hints)
            name = ""
        out.add_section()
    return out


def state_of(stage: Stage, exercise: Exercise, progress: Progress) -> str:
    if not is_started(stage):
        return "not started"
    if is_green(exercise, stage, progress):
        return "[green]green[/]"
    return "[yellow]changed since it was green[/]" if exercise.id in progress.green else "[red]to do[/]"
