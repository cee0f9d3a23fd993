"""Cuts a function's body out of a source text, by the syntax tree; everything outside the body stays as it is."""

import ast
import io
import json
import tokenize

from stages.workshop.exercises import CourseError, Exercise, Mutant

Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_function(source: str, name: str) -> Function:
    """The function `name` ("rms_norm", "Attention.forward") of a module's source."""
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        found = [
            child
            for child in getattr(node, "body", [])
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name == part
        ]
        if not found:
            raise CourseError(f"there is no function {name} in the file")
        node = found[-1]  # the last definition is the one that counts
    if isinstance(node, ast.ClassDef):
        raise CourseError(f"{name} is a class; a target is a function or a method")
    return node  # type: ignore[return-value]


def cut(source: str, exercise: Exercise) -> str:
    """`source` with the exercise's function cut: its body, but for the docstring, becomes one `raise`."""
    node = find_function(source, exercise.function)
    lines = source.split("\n")
    row, column = _colon(source, node)
    first = node.body[0]
    head, docstring = lines[:row], []
    if first.lineno == row:  # def f(x): return x
        head[-1] = head[-1][: column + 1]
    elif ast.get_docstring(node, clean=False) is not None:
        docstring = lines[first.lineno - 1 : first.end_lineno]
    indent = " " * (node.col_offset + 4)
    stub = f"{indent}raise NotImplementedError({json.dumps(exercise.message, ensure_ascii=False)})"
    return "\n".join([*head, *docstring, stub, *lines[_last_row(lines, node) :]])


def function_text(source: str, name: str) -> str:
    """The text of a function, from its first decorator to its last line."""
    first, last = _rows(source, name)
    return "\n".join(source.split("\n")[first - 1 : last])


def put_function(source: str, name: str, text: str) -> str:
    """`source` with the function `name` replaced by `text`."""
    first, last = _rows(source, name)
    lines = source.split("\n")
    return "\n".join([*lines[: first - 1], text, *lines[last:]])


def mutate(source: str, exercise: Exercise, mutant: Mutant) -> str:
    """`source` with the known-wrong variant of the exercise's function."""
    text = function_text(source, exercise.function)
    if text.count(mutant.old) != 1:
        raise CourseError(
            f"{exercise.id}, mutant {mutant.why!r}: {mutant.old!r} occurs {text.count(mutant.old)} times "
            f"in {exercise.function}, not once"
        )
    wrong = put_function(source, exercise.function, text.replace(mutant.old, mutant.new))
    try:
        ast.parse(wrong)
    except SyntaxError as error:
        raise CourseError(f"{exercise.id}, mutant {mutant.why!r} is no valid Python: {error}") from None
    return wrong


def _rows(source: str, name: str) -> tuple[int, int]:
    node = find_function(source, name)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return first, _last_row(source.split("\n"), node)


def _last_row(lines: list[str], node: Function) -> int:
    """The function's last row, with the comments that follow inside its body: the tree does not know them."""
    last = row = node.end_lineno or node.lineno
    while row < len(lines):
        text = lines[row].strip()
        inside = len(lines[row]) - len(lines[row].lstrip()) > node.col_offset
        if text and not (text.startswith("#") and inside):
            break
        row += 1
        if text:
            last = row
    return last


def _colon(source: str, node: Function) -> tuple[int, int]:
    """Row (from 1) and column of the colon that ends the signature; the tree does not say where it is."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.start < (node.lineno, 0) or token.type != tokenize.OP:
            continue
        if token.string in "([{":
            depth += 1
        elif token.string in ")]}":
            depth -= 1
        elif token.string == ":" and depth == 0:
            return token.start
    raise CourseError(f"{node.name} has no body")
