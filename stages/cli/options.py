"""Arguments and options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from stages.cli.numbers import above, at_least


class Dtype(StrEnum):
    """Number formats to compute in."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Acceptance(StrEnum):
    """Rules by which guesses stand."""

    match = "match"
    ratio = "ratio"


Model = Annotated[str, typer.Argument(help="A folder, a hub id such as Qwen/Qwen3-0.6B, or 'demo'.")]
Stage = Annotated[int | None, typer.Option(help="Which stage's engine answers; the latest if left out.")]
Mine = Annotated[bool, typer.Option("--mine", help="Run your own files in workspace/, of the stages that are green.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="The real scheduler, and no weights: always the same answer.")]

MaxTokens = Annotated[int, typer.Option(help="New tokens at most.")]
# The limits are those of `SamplingParams`, which cannot be imported here: `--mine` must be heard first.
Temperature = Annotated[float, typer.Option(callback=at_least(0, 1e6), help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="0 is all tokens.")]
TopP = Annotated[
    float, typer.Option(callback=above(0, 1), help="The smallest set of tokens whose probabilities reach this.")
]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]

ENGINE = "Engine"  # how the help calls these
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1", rich_help_panel=ENGINE)]
DtypeOption = Annotated[Dtype, typer.Option(help="auto: the checkpoint's own.", rich_help_panel=ENGINE)]
MaxModelLen = Annotated[int | None, typer.Option(help="Prompt and answer together, in tokens.", rich_help_panel=ENGINE)]
KvCacheMb = Annotated[
    float | None,
    typer.Option(callback=above(0), help="Memory for the KV cache, in MB; from stage 2 on.", rich_help_panel=ENGINE),
]
Speculative = Annotated[
    str | None,
    typer.Option(
        help="Who guesses ahead: ngram, layers:12, or a smaller model; from stage 8 on.", rich_help_panel=ENGINE
    ),
]
NumDraftTokens = Annotated[
    int | None, typer.Option(help="Guesses per step, with --speculative.", rich_help_panel=ENGINE)
]
AcceptanceRule = Annotated[
    Acceptance | None,
    typer.Option(help="Which guesses stand, with --speculative; match if left out.", rich_help_panel=ENGINE),
]
