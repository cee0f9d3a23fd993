"""Read later: a progress bar over a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stages.s01_forward.inputs import PromptRequest
from stages.s01_forward.outputs import TokenEvent


def show_progress(events: Iterator[TokenEvent], requests: Sequence[PromptRequest]) -> Iterator[TokenEvent]:
    """Pass events on, and show on stderr the answers that are complete and the tokens per second so far."""
    answers = sum(len(request.generations) for request in requests)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]:.0f} tok/s"), TimeRemainingColumn())
    with Progress("Answers", *columns, console=Console(stderr=True), transient=True) as bar:
        task, tokens = bar.add_task("", total=answers, rate=0.0), 0
        for event in events:
            tokens += 1
            elapsed = bar.tasks[task].elapsed
            bar.update(task, advance=event.finish_reason is not None, rate=tokens / elapsed if elapsed else 0.0)
            yield event
