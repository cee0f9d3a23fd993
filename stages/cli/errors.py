"""Whose mistake it was."""

from __future__ import annotations

import typer


class plain_errors:
    """What the caller did wrong is said in one line; a fault of ours keeps its traceback."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("stages"):
            error = ValueError(f"this needs the package {error.name}: pip install 'stepinfer[server]'")
        if isinstance(error, (ValueError, TypeError, FileNotFoundError)):
            typer.secho(f"error: {error}", fg="red", err=True)
            raise typer.Exit(2) from None
