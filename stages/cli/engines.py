"""Which engine runs: of which stage, whose code, with which options."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

import typer

from stages import STAGES_DIR, stage_names, use_workspace
from stages.cli.options import Acceptance


def take_mine(mine: bool) -> None:
    """Put the learner's files before the shipped ones, in the stages whose exercises are all green; say which.

    To be called before any module of a stage is imported. Raises ValueError if there is no such stage.
    """
    if not mine:
        return
    from stages.workshop.workspace import stages_to_take

    after_the_last = "99"
    green = [stage.number for stage in stages_to_take([after_the_last])]  # earlier ones, if they are green
    if not green:
        raise ValueError("--mine: no stage of yours is green yet. First: python course.py check 01")
    use_workspace(",".join(green))
    typer.secho(f"your code: stage {', '.join(green)}; the shipped code: all others", dim=True, err=True)


def engine_of(stage: int | None, dry_run: bool = False) -> Any:
    """The `LLM` class of a stage, or of the latest; or the one without weights."""
    engines = {int(name[1:3]): name for name in stage_names() if (STAGES_DIR / name / "llm.py").exists()}
    number = max(engines) if stage is None else stage
    if number not in engines:
        raise ValueError(f"there is no engine of stage {number}; there are {', '.join(map(str, engines))}")
    if dry_run and number != max(engines):
        raise ValueError(f"--dry-run is a dry run of the latest stage's engine; --stage is {stage}")
    if dry_run:
        return importlib.import_module(f"stages.{engines[number]}.dry_run").DryLLM
    return importlib.import_module(f"stages.{engines[number]}.llm").LLM


def load_engine(
    model: str,
    stage: int | None,
    dry_run: bool,
    *,
    device: str,
    dtype: str,
    max_model_len: int | None,
    kv_cache_mb: float | None,
    speculative: str | None,
    num_draft_tokens: int | None,
    acceptance: Acceptance | None,
) -> Any:
    """An `LLM` of a stage, made as the command line says; tells how long that took."""
    started, engine = time.perf_counter(), engine_of(stage, dry_run)
    llm = engine(
        model,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        progress=sys.stderr.isatty(),
        **known(engine, 2, "has no KV cache", kv_cache_mb=kv_cache_mb),
        **guessing(speculative, num_draft_tokens, acceptance, engine),
    )
    typer.secho(f"{llm.folder.name} ready in {time.perf_counter() - started:.1f} s", dim=True, err=True)
    return llm


def given(**options: Any) -> dict[str, Any]:
    """The options that somebody gave; the others are the engine's to choose."""
    return {name: value for name, value in options.items() if value is not None}


def known(engine: Any, first: int, lack: str, **options: Any) -> dict[str, Any]:
    """The options that were given. ValueError if `engine` is of a stage before the `first` that knows them.

    None stands for the latest. lack: what an earlier one has not, in words.
    """
    wanted = given(**options)
    number = first if engine is None else int(engine.__module__.split(".")[1][1:3])
    if wanted and number < first:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in wanted)
        raise ValueError(f"the engine of stage {number} {lack}: no {flags} before stage {first}")
    return wanted


def guessing(speculative: str | None, count: int | None, rule: Acceptance | None, engine: Any = None) -> dict[str, Any]:
    """The options of speculative decoding that were given. ValueError if `engine` has none, or nobody guesses."""
    how = {"num_draft_tokens": count, "acceptance": rule and rule.value}
    options = known(engine, 8, "does not guess", speculative=speculative, **how)
    if options and speculative is None:
        raise ValueError("--num-draft-tokens and --acceptance say how to guess; --speculative says who does")
    return options
