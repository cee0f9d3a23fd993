"""`stepinfer download`."""

from __future__ import annotations

import sys

import typer

from stages.cli.errors import plain_errors
from stages.cli.options import Model


def download(model: Model) -> None:
    """Fetch a model from the hub (or prepare the demo model) and say where it lies."""
    with plain_errors():
        from stages.s01_forward.hub import resolve_model

        typer.echo(resolve_model(model, progress=sys.stderr.isatty()))
