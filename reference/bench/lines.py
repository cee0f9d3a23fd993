"""How many lines the engine has, stage by stage: `python -m reference.bench lines`.

What counts is what the finished engine imports, followed from the modules in `ENTRIES`: so no test, no benchmark and no
check. Lines of code are those that are neither blank nor comment nor docstring. Files that import Triton are kernels;
others may say of themselves, in their first words, that they can be read later. The result is `speed_lines`.
"""

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from reference.bench.harness import RESULTS, Measurement, Result
from reference.bench.provenance import ROOT
from reference.bench.report import markdown_table

ENTRIES = {"engine": "stages.s08_speculative.llm", "server": "stages.s09_server.serve"}
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def module_path(module: str, root: Path = ROOT) -> Path | None:
    """The file of a module of the stages, or None for what is no such module (a function in one, say)."""
    path = root.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


def imports(source: str) -> Iterator[str]:
    """Names of all that a module imports from the stages, inside functions, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("stages."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "stages":
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reachable(entry: str, root: Path = ROOT) -> set[Path]:
    """Files of the stages that a module needs, itself among them."""
    found: set[Path] = set()
    todo = [entry]
    while todo:
        path = module_path(todo.pop(), root)
        if path is not None and path not in found:
            found.add(path)
            todo += imports(path.read_text(encoding="utf-8"))
    return {path for path in found if path.parent != root / "stages"}


def code_lines(source: str) -> int:
    """Lines on which there is code."""
    docstrings = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                text = node.body[0]
                docstrings |= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def kind_of(source: str) -> str:
    """What a reader does with a file."""
    if re.search(r"^(import|from) triton\b", source, re.MULTILINE):
        return "kernels"
    return "read later" if (ast.get_docstring(ast.parse(source)) or "").startswith("Read later") else "to read"


def measure(name: str, sources: Sequence[str]) -> Measurement:
    """Lines of code in these files."""
    whole = sum(len(source.splitlines()) for source in sources)
    note = f"{len(sources)} files, {whole:,} lines with comments and blank ones"
    return Measurement.single(name, sum(map(code_lines, sources)), "lines", note=note)


def count(root: Path = ROOT) -> Result:
    """Files, lines and lines of code of each stage's part of the engine, then of the server; of both, by kinds."""
    result = Result("speed_lines", "")
    counted: set[Path] = set()
    for what, entry in ENTRIES.items():
        files = reachable(entry, root) - counted
        counted |= files
        sources = {path: path.read_text(encoding="utf-8") for path in files}
        for stage in sorted({path.parent.name for path in files}):
            own = [source for path, source in sources.items() if path.parent.name == stage]
            result.measurements.append(measure(f"{what}, {stage}", own))
        result.measurements.append(measure(f"{what}, all", list(sources.values())))
        for kind in ("to read", "read later", "kernels"):
            own = [source for source in sources.values() if kind_of(source) == kind]
            if 0 < len(own) < len(sources):
                result.measurements.append(measure(f"{what}, of these {kind}", own))
    return result


def main(arguments: list[str] | None = None) -> None:
    """Count, save, print."""
    parser = argparse.ArgumentParser(prog="python -m reference.bench lines", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args(arguments)
    print(markdown_table(count().save(options.out)))


if __name__ == "__main__":
    main()
