"""Which module may import which: earlier stages only, nothing in stage `__init__` files, nothing a plain CPU lacks.

Read from the syntax tree, so that what a machine happens to have installed makes no difference.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import stages

ROOT = stages.STAGES_DIR.parent
POSIX_ONLY = {"curses", "fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "termios", "tty", "uvloop"}
GPU_ONLY = {"cupy", "flash_attn", "flashinfer", "triton"}
SOURCES = sorted(p for top in ("stages", "reference", "tests") for p in (ROOT / top).rglob("*.py"))
ALL = [ROOT / "course.py", ROOT / "conftest.py", *SOURCES]


def name_of(path: Path) -> str:
    """`stages.s01_forward.layers` of a file."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(nodes: list[ast.stmt], top_only: bool) -> Iterator[str]:
    """The modules that statements import; `from a import b` gives `a` and `a.b`.

    With `top_only`: what runs when the module is loaded on any system, so nothing inside functions, behind a test of
    the platform or of what is installed, or where a failing import is handled.
    """
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not top_only:
            yield from imports([n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)], False)
            for handler in getattr(node, "handlers", []) + getattr(node, "cases", []):
                yield from imports(handler.body, False)
        elif isinstance(node, ast.If):
            guards = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
            guards |= {n.attr for n in ast.walk(node.test) if isinstance(n, ast.Attribute)}
            body = [] if guards & {"TYPE_CHECKING", "platform", "find_spec"} else node.body
            yield from imports([*body, *node.orelse], True)
        elif isinstance(node, ast.Try):
            handled = {n.id for h in node.handlers for n in ast.walk(h.type or node) if isinstance(n, ast.Name)}
            body = [] if handled & {"ImportError", "ModuleNotFoundError"} else node.body
            yield from imports([*body, *node.orelse, *node.finalbody], True)
        elif isinstance(node, ast.With | ast.For | ast.While | ast.ClassDef):
            yield from imports(node.body, True)


@cache
def imports_of(path: Path, top_only: bool) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return set(imports(tree.body, top_only))


def roots(modules: set[str]) -> set[str]:
    return {m.partition(".")[0] for m in modules}


def skips_without(path: Path, module: str) -> bool:
    """Whether a test file begins with `pytest.importorskip("triton")`."""
    return re.search(rf'^(\w+ = )?pytest\.importorskip\("{module}"', path.read_text(encoding="utf-8"), re.M) is not None


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_stage_imports_no_later_stage(path: Path):
    own = re.match(r"stages\.s(\d\d)_", name_of(path))
    if not own:
        return
    later = {m for m in imports_of(path, False) if (other := re.match(r"stages\.s(\d\d)_", m)) and other[1] > own[1]}
    assert not later, f"{name_of(path)} imports from a later stage: {sorted(later)}"


@pytest.mark.parametrize("stage", stages.stage_names())
def test_stage_init_holds_a_docstring_only(stage: str):
    tree = ast.parse((stages.STAGES_DIR / stage / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_loads_on_every_system(path: Path):
    assert not roots(imports_of(path, True)) & POSIX_ONLY


@cache
def kernel_modules() -> set[str]:
    """Modules that need a package for GPUs as soon as they are loaded."""
    return {name_of(p) for p in SOURCES if roots(imports_of(p, True)) & GPU_ONLY}


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_kernels_are_loaded_only_when_used(path: Path):
    if name_of(path) in kernel_modules() and not path.name.startswith("test_"):
        return  # a kernel may use a kernel
    loaded = imports_of(path, True)
    needs = (loaded & kernel_modules()) | (roots(loaded) & GPU_ONLY)
    assert not needs or skips_without(path, "triton"), f"loaded at module level: {sorted(needs)}"


def test_reader_sees_what_it_should():
    tree = ast.parse(
        "import a.b\nfrom c import d\nif TYPE_CHECKING:\n    import e\nelse:\n    import f\n"
        "try:\n    import g\nexcept ImportError:\n    pass\nif sys.platform == 'linux':\n    import h\n"
        "def x():\n    import i\nclass Y:\n    import j\n"
    )
    assert set(imports(tree.body, True)) == {"a.b", "c", "c.d", "f", "j"}
    assert set(imports(tree.body, False)) >= {"a.b", "c", "c.d", "e", "f", "g", "h", "i", "j"}
