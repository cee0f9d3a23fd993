"""What a page can include: code of the tested source, a diff of two files, a stage's exercises, a drawing.

Standard library only. A directive stands alone on a line of a page, `{{ KIND ARGUMENT ... }}`:

    {{ code stages/s01_forward/layers.py rms_norm apply_rope }}   functions, classes, `Class.method`s, constants
    {{ diff stages/s01_forward/llm.py stages/s02_kv_cache/llm.py }}   unified diff, folded
    {{ exercises 01 }}   {{ exercises 03 03.1 03.2 }}   from the stage's exercises.toml; only some of them
    {{ result NAME }}   table of reference/results/NAME.json
    {{ table NAME }}   {{ table NAME SHAPE ... }}   what several results make together: reference/bench/tables.py
    {{ plot NAME What it shows }}   picture reference/results/NAME.svg or .png
    {{ drawing NAME }}   docs/assets/drawings/NAME.svg, inlined so that it follows light and dark

Whatever is named and does not exist raises IncludeError, and the build fails.
"""

from __future__ import annotations

import ast
import difflib
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DIRECTIVE = re.compile(r"^(?P<indent>[ ]*)\{\{ (?P<kind>[a-z]+)(?P<args>(?: [^{}]+)?) \}\}$", re.MULTILINE)


class IncludeError(ValueError):
    """A directive names something that does not exist."""


def read(path: str) -> str:
    """Text of a file of the repository, given relative to its root."""
    full = ROOT / path
    if not full.is_file():
        raise IncludeError(f"no such file: {path}")
    return full.read_text(encoding="utf-8")


def definitions(source: str) -> dict[str, tuple[int, int]]:
    """Name → (first line, last line), from 1, of each function, class, method (`Class.method`) and constant."""
    found: dict[str, tuple[int, int]] = {}

    def visit(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            end = node.end_lineno or node.lineno
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([node.lineno] + [decorator.lineno for decorator in node.decorator_list])
                found[prefix + node.name] = (first, end)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        found[prefix + target.id] = (node.lineno, end)

    visit(ast.parse(source).body, "")
    return found


def without_bodies(source: str, exercises: dict[str, str]) -> str:
    """`source` with the body of each exercise (function → id), but for its docstring, replaced by its number."""
    lines = source.splitlines()
    found: list[tuple[int, int, str]] = []

    def visit(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and prefix + node.name in exercises:
                body = node.body[1:] if ast.get_docstring(node) else node.body
                note = " " * body[0].col_offset + f"...  # exercise {exercises[prefix + node.name]}"
                found.append(
                    (
                        node.body[0].end_lineno or 0 if body != node.body else body[0].lineno - 1,
                        node.end_lineno or 0,
                        note,
                    )
                )

    visit(ast.parse(source).body, "")
    for before, last, note in sorted(found, reverse=True):
        lines[before:last] = [note]
    return "\n".join(lines)


def extract(path: str, names: list[str], without: dict[str, str] | None = None) -> str:
    """Source of the named definitions of a Python file, in the order asked for; the whole file without names."""
    source = without_bodies(read(path), without or {})
    if not names:
        return source.strip("\n")
    known = definitions(source)
    lines = source.splitlines()
    parts = []
    for name in names:
        if name not in known:
            raise IncludeError(f"{path} has no {name!r}; it has: {', '.join(known)}")
        first, last = known[name]
        parts.append(textwrap.dedent("\n".join(lines[first - 1 : last])))
    return "\n\n\n".join(parts)


def fence(text: str, language: str, title: str = "") -> str:
    """A fenced block, its fence longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    ticks = "`" * (longest + 1)
    head = f'{language} title="{title}"' if title else language
    return f"{ticks}{head}\n{text}\n{ticks}"


def indented(text: str, by: str = "    ") -> str:
    return "\n".join(by + line if line.strip() else "" for line in text.splitlines())


def code(path: str, *names: str) -> str:
    """The named parts of a file. No reader sees the solution of an exercise unasked: it is folded.

    Functions that are all exercises are folded whole. Otherwise only the exercises' bodies are left out, and follow
    below, folded.
    """
    parts = names or ("",)
    solved = {
        name: number
        for (file, name), number in solutions().items()
        if file == path and any(part in ("", name) or name.startswith(part + ".") for part in parts)
    }
    title = f"{path} · {', '.join(names)}" if names else path
    shown = fence(extract(path, list(names), without=solved), "python", title)
    if not solved:
        return shown
    solution = fence(extract(path, list(solved)), "python", f"{path} · {', '.join(solved)}")
    ours = ", ".join(solved).replace("__", r"\_\_")  # else `__call__` would be bold
    fold = f'??? success "Our {ours}: the solution of {", ".join(solved.values())}"\n' + indented(solution)
    return fold if set(names) == set(solved) else f"{shown}\n\n{fold}"


def diff(old: str, new: str) -> str:
    lines = difflib.unified_diff(read(old).splitlines(), read(new).splitlines(), old, new, lineterm="")
    text = "\n".join(lines)
    if not text:
        raise IncludeError(f"{old} and {new} do not differ")
    added = sum(line.startswith("+") for line in text.splitlines()) - 1
    removed = sum(line.startswith("-") for line in text.splitlines()) - 1
    return f'??? note "{old} → {new}: +{added} −{removed} lines"\n' + indented(fence(text, "diff"))


def drawing(name: str) -> str:
    svg = read(f"docs/assets/drawings/{name}.svg")
    return '<div class="drawing">\n' + re.sub(r"\n\s*\n", "\n", svg).strip() + "\n</div>"


def stage_folder(number: str) -> Path:
    folders = sorted((ROOT / "stages").glob(f"s{number}_*"))
    if len(folders) != 1:
        raise IncludeError(f"stage {number}: {len(folders)} folders match stages/s{number}_*")
    return folders[0]


def target_file(target: str) -> tuple[str, str]:
    """`stages.s01_forward.layers.rms_norm` → (`stages/s01_forward/layers.py`, `rms_norm`)."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        path = "/".join(parts[:cut]) + ".py"
        if (ROOT / path).is_file():
            name = ".".join(parts[cut:])
            extract(path, [name])
            return path, name
    raise IncludeError(f"exercise target {target!r}: no such module")


def exercise_tables(path: Path) -> list[dict[str, Any]]:
    return tomllib.loads(read(path.relative_to(ROOT).as_posix()))["exercise"]


def solutions() -> dict[tuple[str, str], str]:
    """(file, function) of every exercise of the course → its id."""
    paths = sorted((ROOT / "stages").glob("s*/exercises.toml"))
    return {target_file(entry["target"]): entry["id"] for path in paths for entry in exercise_tables(path)}


def exercises(stage: str, *only: str) -> str:
    path = stage_folder(stage) / "exercises.toml"
    entries = exercise_tables(path)
    unknown = set(only) - {entry["id"] for entry in entries}
    if unknown:
        raise IncludeError(f"{path.name} of stage {stage} has no exercise {', '.join(sorted(unknown))}")
    chosen = [entry for entry in entries if not only or entry["id"] in only]
    table = ["| exercise | what you write | minutes | file | function |", "|---|---|---|---|---|"]
    hints = []
    for entry in chosen:
        file, name = target_file(entry["target"])
        learner = file.replace("stages/", "workspace/", 1)
        table.append(f"| {entry['id']} | {entry['title']} | {entry['minutes']} | `{learner}` | `{name}` |")
        nested = ""
        for number, hint in reversed(list(enumerate(entry["hints"], start=1))):
            body = hint.strip() + (f"\n\n{nested}" if nested else "")
            nested = f'??? tip "Hint {number} of {len(entry["hints"])}"\n' + indented(body)
        hints.append(f'??? example "Hints for {entry["id"]}, {entry["title"]}"\n' + indented(nested))
    return "\n".join(table) + "\n\n" + "\n\n".join(hints)


KINDS: dict[str, Callable[..., str]] = {"code": code, "diff": diff, "exercises": exercises, "drawing": drawing}


def expand(markdown: str, kinds: dict[str, Callable[..., str]]) -> str:
    """The page with every directive replaced; an unknown directive or a wrong number of arguments is an error."""

    def replace(match: re.Match[str]) -> str:
        kind, args = match["kind"], match["args"].split()
        if kind not in kinds:
            raise IncludeError(f"unknown directive {kind!r}; known: {', '.join(kinds)}")
        try:
            text = kinds[kind](*args)
        except TypeError as error:
            raise IncludeError(f"directive {match[0].strip()}: {error}") from error
        return indented(text, match["indent"])

    return DIRECTIVE.sub(replace, markdown)


def missing_checks(markdown: str, stage: str) -> list[str]:
    """Checks that a page names, as `test_layers.py::TestRope::test_x`, and that do not exist.

    A path without a folder lies in the folder of `stage`; any other starts at the repository's root.
    """
    missing = []
    for path, name in re.findall(r"`([\w/]+\.py)::([\w:]+)`", markdown):
        full = path if "/" in path else f"{stage_folder(stage).relative_to(ROOT).as_posix()}/{path}"
        if name.replace("::", ".") not in definitions(read(full)):
            missing.append(f"{path}::{name}")
    return missing


def titles(source: str) -> Iterator[str]:
    """Titles of the level-two headings of a page, outside fenced blocks."""
    for line in re.sub(r"^(`{3,}).*?^\1", "", source, flags=re.DOTALL | re.MULTILINE).splitlines():
        if line.startswith("## "):
            yield re.sub(r"\s*\{.*\}$", "", line[3:]).strip()
