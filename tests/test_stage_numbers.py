"""`pytest stages/01` and its relatives."""

from pathlib import Path

import pytest

import stages
from stages.workshop.exercises import CourseError, find_exercise, find_stage
from stages.workshop.plugin import stage_path
from tests.toy_course import ToyCourse

ROOT = stages.STAGES_DIR.parent
FIRST = stages.STAGES_DIR / "s01_forward"


@pytest.mark.parametrize(
    ("arg", "path"),
    [
        ("stages/01", FIRST),
        ("stages/1", FIRST),
        ("stages/s01", FIRST),
        (r"stages\01", FIRST),
        ("./stages/01", FIRST),
        (str(stages.STAGES_DIR / "01"), FIRST),
        ("stages/01/test_model.py", FIRST / "test_model.py"),
        ("stages/01/test_model.py::TestX::test_y[a-b]", f"{FIRST / 'test_model.py'}::TestX::test_y[a-b]"),
    ],
)
def test_number_becomes_folder(arg: str, path: Path | str):
    assert stage_path(arg, ROOT).replace("\\", "/") == str(path).replace("\\", "/")


@pytest.mark.parametrize(
    "arg",
    ["stages", "tests", "stages/s01_forward", "tests/test_imports.py::test_x", "docs/stages/01", "stages/workshop"],
)
def test_other_arguments_stay(arg: str):
    assert stage_path(arg, ROOT) == arg


def test_number_is_read_from_where_pytest_was_called():
    assert stage_path("../stages/01", ROOT / "tests") == str(FIRST)
    assert stage_path("stages/01", ROOT / "tests") == "stages/01"


def test_unknown_number_lists_the_stages():
    with pytest.raises(CourseError, match=r"no stage '77'.*01 \(forward\)"):
        stage_path("stages/77", ROOT)


@pytest.mark.parametrize("text", ["1", "01", "s01", "s01_forward"])
def test_find_stage(text: str):
    assert find_stage(text).name == "s01_forward"


@pytest.mark.parametrize("text", ["", "x", "001", "77", "-1", "0x1"])
def test_find_stage_refuses(text: str):
    with pytest.raises(CourseError, match="no stage"):
        find_stage(text)


@pytest.mark.parametrize("text", ["1", "01.99", "01.", "01.x", "77.1"])
def test_find_exercise_refuses(text: str):
    with pytest.raises(CourseError, match="exercise|no stage"):
        find_exercise(text)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyCourse:
    return ToyCourse(tmp_path_factory.mktemp("toy"))


@pytest.mark.parametrize(
    ("args", "passed"),
    [
        (["stages/01"], 3),
        (["stages/2"], 1),
        (["stages/01::TestDouble"], 2),
        (["stages/01::test_area", "stages/02"], 2),
        (["stages/01::TestDouble::test_double[3]"], 1),
        (["stages/1/test_maths.py"], 3),
        (["stages/s01_toy"], 3),
        ([], 4),
    ],
)
def test_pytest_takes_numbers(toy: ToyCourse, args: list[str], passed: int):
    code, out = toy.pytest(*args)
    assert code == 0, out
    assert f"{passed} passed" in out


def test_pytest_takes_numbers_in_worker_processes(toy: ToyCourse):
    code, out = toy.pytest("stages/01", "-p", "xdist", "-n2")
    assert code == 0, out
    assert "3 passed" in out


@pytest.mark.parametrize(
    ("arg", "words"),
    [("stages/77", "01 (toy), 02 (later)"), ("stages/01::TestNowhere", "TestNowhere is in no file of s01_toy")],
)
def test_pytest_says_what_is_wrong(toy: ToyCourse, arg: str, words: str):
    code, out = toy.pytest(arg)
    assert code == 4
    assert words in out
    assert "Traceback" not in out
