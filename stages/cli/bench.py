"""`stepinfer bench`."""

from __future__ import annotations

import typer


def bench(context: typer.Context) -> None:
    """Measure a server: `stepinfer bench serve --help`."""
    from stages.s09_server.bench_serve import app

    app(args=context.args or ["--help"], prog_name="stepinfer bench")
