"""Options from a YAML file: `--config FILE.yaml`. Its keys are the command's options; the command line goes first."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import typer

WORDS = {False: "true", True: "false"}  # what `no-...: true` makes of a switch


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Called before the other options are looked at: makes the file's values their defaults."""
    if path is not None:
        try:
            context.default_map = {**(context.default_map or {}), **options_of(context.command, path)}
        except (ValueError, OSError) as error:
            typer.secho(f"error: {path}: {error}", fg="red", err=True)
            raise typer.Exit(2) from None
    return path


def options_of(command: Any, path: Path) -> dict[str, Any]:
    """The file's values as text, by the names of the command's parameters. Each is checked later, as if typed."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"this is not YAML: {' '.join(str(error).split())}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"this is not UTF-8 text: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"it must hold options, as in 'port: 8000'; it holds a {type(content).__name__}")
    known = names_of(command)
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"there is no option {str(key)!r}" + (f"; the nearest is {near[0]!r}" if near else ""))
        parameter, inverted = known[name]
        if parameter.name in values:
            raise ValueError(f"{str(key)!r} says again what another line has said")
        values[parameter.name] = text_of(name, value, getattr(parameter, "multiple", False), inverted)
    return values


def names_of(command: Any) -> dict[str, tuple[Any, bool]]:
    """What a file may say: an option's names without their dashes, and whether the name switches it off."""
    known: dict[str, tuple[Any, bool]] = {}
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            known[parameter.name.replace("_", "-")] = parameter, False
            continue
        for inverted, flags in enumerate((parameter.opts, parameter.secondary_opts)):
            known.update({flag.removeprefix("--"): (parameter, bool(inverted)) for flag in flags})
    return {name: what for name, what in known.items() if name not in ("config", "help")}


def text_of(name: str, value: Any, multiple: bool, inverted: bool) -> Any:
    """A value as it would be typed; a list for an option that may be repeated."""
    if multiple:
        return [text_of(name, each, False, inverted) for each in (value if isinstance(value, list) else [value])]
    if value is None or isinstance(value, (dict, list)):
        raise ValueError(f"{name!r} must have one value, not {'none' if value is None else value}")
    if inverted:
        if not isinstance(value, bool):
            raise ValueError(f"{name!r} is {value!r}; it must be true or false")
        return WORDS[value]
    return str(value)
