"""A course of two tiny stages in a folder of its own: the workshop is checked on it without any real stage."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import stages

ROOT = stages.STAGES_DIR.parent

MATHS = '''"""Toy maths."""

from functools import cache

SCALE = 2  # stays


@cache
def double(x: int) -> int:
    """Twice x."""
    # the trick
    return x * SCALE


class Shape:
    def area(self, a: int, b: int) -> int:
        return a * b
'''

MATHS_TOML = """
[[exercise]]
id = "01.1"
title = "Doubling"
minutes = 5
target = "stages.s01_toy.maths.double"
hints = ["nudge", "push", "answer"]
checks = ["test_maths.py::TestDouble"]
mutants = [{ why = "adds instead", replace = "x * SCALE", with = "x + SCALE" }]

[[exercise]]
id = "01.2"
title = "Area"
minutes = 5
target = "stages.s01_toy.maths.Shape.area"
hints = ["nudge", "push", "answer"]
checks = ["test_maths.py::test_area"]
mutants = [{ why = "adds instead", replace = "a * b", with = "a + b" }]
"""

TEST_MATHS = """
import pytest
from stages.s01_toy.maths import Shape, double

class TestDouble:
    @pytest.mark.parametrize("x", [2, 3])
    def test_double(self, x):
        assert double(x) == 2 * x

def test_area():
    assert Shape().area(3, 4) == 12
"""

LATER_TOML = """
[[exercise]]
id = "02.1"
title = "Quadrupling"
minutes = 5
target = "stages.s02_later.more.quadruple"
hints = ["nudge", "push", "answer"]
checks = ["test_more.py"]
mutants = [{ why = "only doubles", replace = "double(double(x))", with = "double(x)" }]
"""

FILES = {
    "tests/__init__.py": "",
    "tests/fixtures.py": "",
    "tests/parallel.py": "",
    "stages/s01_toy/__init__.py": '"""Toy."""\n',
    "stages/s01_toy/maths.py": MATHS,
    "stages/s01_toy/exercises.toml": MATHS_TOML,
    "stages/s01_toy/test_maths.py": TEST_MATHS,
    "stages/s02_later/__init__.py": '"""Later."""\n',
    "stages/s02_later/more.py": (
        "from stages.s01_toy.maths import double\n\n\ndef quadruple(x: int) -> int:\n    return double(double(x))\n"
    ),
    "stages/s02_later/exercises.toml": LATER_TOML,
    "stages/s02_later/test_more.py": (
        "from stages.s02_later.more import quadruple\n\n\ndef test_quadruple():\n    assert quadruple(3) == 12\n"
    ),
}


class ToyCourse:
    """The toy course in `root`, and its commands as processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("conftest.py", "pyproject.toml", "stages/__init__.py"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        shutil.copytree(
            ROOT / "stages/workshop", root / "stages/workshop", ignore=shutil.ignore_patterns("__pycache__")
        )
        for name, text in FILES.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def course(self, *args: str) -> tuple[int, str]:
        """Exit code and output of `course ...`."""
        return python(self.root, "-m", "stages.workshop", *args, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")

    def pytest(self, *args: str) -> tuple[int, str]:
        """Exit code and output of `pytest ...`."""
        return python(self.root, "-m", "pytest", "-q", *args, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")

    def mine(self, name: str = "s01_toy/maths.py") -> Path:
        return self.root / "workspace" / name

    def write(self, old: str, new: str, name: str = "s01_toy/maths.py") -> None:
        """The learner edits: `old` in the file becomes `new`."""
        text = self.mine(name).read_text(encoding="utf-8")
        assert text.count(old) == 1, text
        self.mine(name).write_text(text.replace(old, new), encoding="utf-8")


def python(cwd: Path, *args: str, **extra_env: str) -> tuple[int, str]:
    """Exit code and output of a Python process in `cwd`, without what this process chose for itself."""
    ours = ("STEPINFER_MINE", "STEPINFER_WORKSPACE", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER")
    env = {k: v for k, v in os.environ.items() if k not in ours}
    env |= {"COLUMNS": "200", "NO_COLOR": "1", "PYTHONUTF8": "1", **extra_env}
    done = subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=600,
    )
    return done.returncode, done.stdout
