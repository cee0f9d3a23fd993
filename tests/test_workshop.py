"""The workshop, first on a toy course, then every exercise of every stage, then the way of a learner through stage 01."""

import ast
import json
from functools import cache
from pathlib import Path

import pytest

import course
from stages.cli import app as stepinfer
from stages.workshop import prove
from stages.workshop.cut import cut, function_text, mutate, put_function
from stages.workshop.exercises import CourseError, Exercise, Mutant, Stage, find_stage, read_stage, read_stages
from tests.toy_course import MATHS, MATHS_TOML, ROOT, ToyCourse, python

SOLVED_DOUBLE = ('raise NotImplementedError("01.1 Doubling: see docs/stages/01-toy.md")', "return x + x")
SOLVED_AREA = ('raise NotImplementedError("01.2 Area: see docs/stages/01-toy.md")', "return b * a")


@pytest.fixture
def toy(tmp_path: Path) -> ToyCourse:
    return ToyCourse(tmp_path)


def exercise(function: str, *mutants: Mutant) -> Exercise:
    return Exercise("01.1", 'Té"st', 5, "x.py", function, ("a", "b", "c"), ("t",), mutants, "docs/x.md")


# ---- cutting ---------------------------------------------------------------------------------------------------------

RAISE = 'raise NotImplementedError("01.1 Té\\"st: see docs/x.md")'


@pytest.mark.parametrize(
    ("source", "function", "expected"),
    [
        ("def f(x):\n    return x\n", "f", f"def f(x):\n    {RAISE}\n"),
        ('def f(x):\n    """Doc."""\n    # how\n    return x\n', "f", f'def f(x):\n    """Doc."""\n    {RAISE}\n'),
        ('def f(x):\n    """One\n\n    two."""\n    y = x\n    return y\n', "f", f'def f(x):\n    """One\n\n    two."""\n    {RAISE}\n'),
        ("def f(x):\n    # how\n    return x\n", "f", f"def f(x):\n    {RAISE}\n"),
        ("def f(x):  # [T]\n    return x\n", "f", f"def f(x):  # [T]\n    {RAISE}\n"),
        ("def f(x): return x\ny = 1\n", "f", f"def f(x):\n    {RAISE}\ny = 1\n"),
        (
            "@d(1)\ndef f(\n    x: dict[str, int] = {1: 2},\n    g=lambda a: a,\n) -> int:\n    return x\n\n\ny = f\n",
            "f",
            f"@d(1)\ndef f(\n    x: dict[str, int] = {{1: 2}},\n    g=lambda a: a,\n) -> int:\n    {RAISE}\n\n\ny = f\n",
        ),
        (
            "class A:\n    def f(self):\n        return 1\n        # the end\n\n    # next\n    def g(self):\n        return 2\n",
            "A.f",
            f"class A:\n    def f(self):\n        {RAISE}\n\n    # next\n    def g(self):\n        return 2\n",
        ),
        ("async def f():\n    return 'ä\x0c'  # ü\nz = 'é'\n", "f", f"async def f():\n    {RAISE}\nz = 'é'\n"),
        ("def g():\n    def f():\n        pass\ndef f():\n    pass", "f", f"def g():\n    def f():\n        pass\ndef f():\n    {RAISE}"),
    ],
)  # fmt: skip
def test_cut(source: str, function: str, expected: str):
    assert cut(source, exercise(function)) == expected
    ast.parse(expected)


def test_cut_function_put_back_gives_the_source():
    for name in ("double", "Shape.area"):
        text = function_text(MATHS, name)
        assert put_function(cut(MATHS, exercise(name)), name, text) == MATHS
    assert function_text(MATHS, "double").startswith("@cache\ndef double")


@pytest.mark.parametrize("name", ["triple", "Shape", "Shape.volume", "SCALE"])
def test_cut_refuses_what_is_no_function(name: str):
    with pytest.raises(CourseError, match=name):
        cut(MATHS, exercise(name))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [("q", "z", "occurs 0 times"), ("x", "z", "occurs [2-9] times"), ("x * SCALE", "x *", "no valid Python")],
)
def test_mutant_must_hit_once_and_parse(old: str, new: str, words: str):
    with pytest.raises(CourseError, match=words):
        mutate(MATHS, exercise("double"), Mutant("why", old, new))
    fine = mutate(MATHS, exercise("double"), Mutant("why", "x * SCALE", "x + SCALE"))
    assert fine == MATHS.replace("x * SCALE", "x + SCALE")


# ---- exercises.toml --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('id = "01.1"', 'id = "02.1"', "the id must be 01.1"),
        ('id = "01.2"', 'id = "01.1"', "occurs twice"),
        ('title = "Area"\n', "", r"missing keys \['title'\]"),
        ('title = "Area"', 'titel = "Area"', r"unknown keys \['titel'\]"),
        ('hints = ["nudge", "push", "answer"]\nchecks = ["test_area"]', 'hints = ["x"]\nchecks = ["y"]', "three hints"),
        ("s01_toy.maths.double", "s02_later.more.quadruple", "not a function of a file of s01_toy"),
        ("s01_toy.maths.double", "s01_toy.nowhere.double", "not a function of a file of s01_toy"),
        ('why = "adds instead", replace = "a', 'reason = "adds", replace = "a', "a mutant has the keys"),
        ("minutes = 5", "minutes = ", "exercises.toml"),
    ],
)
def test_wrong_exercises_are_refused(toy: ToyCourse, old: str, new: str, words: str):
    folder = toy.root / "stages/s01_toy"
    text = MATHS_TOML.replace('checks = ["test_maths.py::test_area"]', 'checks = ["test_area"]')
    assert old in text
    (folder / "exercises.toml").write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(CourseError, match=words):
        read_stage(folder)


def test_an_exercise_may_belong_to_another_lesson(toy: ToyCourse):
    text = MATHS_TOML.replace('title = "Area"', 'title = "Area"\nlesson = "docs/stages/01b-area.md"')
    (toy.root / "stages/s01_toy/exercises.toml").write_text(text, encoding="utf-8")
    assert "lesson: docs/stages/01-toy.md and docs/stages/01b-area.md." in toy.course("start", "01")[1]
    assert '"01.2 Area: see docs/stages/01b-area.md"' in toy.mine().read_text(encoding="utf-8")


# ---- the commands ----------------------------------------------------------------------------------------------------


def test_learner_goes_from_red_to_green(toy: ToyCourse):
    code, out = toy.course("start", "01")
    assert code == 0, out
    assert "maths.py, function double" in out
    assert "The first run is red" in out
    cut_text = toy.mine().read_text(encoding="utf-8")
    assert '"""Twice x."""\n    raise NotImplementedError("01.1 Doubling: see docs/stages/01-toy.md")' in cut_text
    assert "x * SCALE" not in cut_text
    assert "SCALE = 2  # stays" in cut_text

    code, out = toy.course("check", "01")
    assert code == 1
    assert "red    01.1 Doubling: not written yet: function double in " in out
    assert "Red is what a fresh start looks like" in out

    toy.write(*SOLVED_DOUBLE)
    toy.write(SOLVED_AREA[0], "return a + b")
    code, out = toy.course("check", "01")
    assert code == 1
    assert "green  01.1 Doubling: all 2 checks pass" in out
    assert "red    01.2 Area: 1 of 1 checks fail: function Shape.area" in out
    assert "assert 7 == 12" in out
    assert "python course.py check 01.2 --verbose" in out
    assert "Use -v" not in out
    assert "Red is what a fresh start" not in out
    assert toy.course("check", "01.1")[0] == 0

    toy.write("return a + b", "return b * a")
    code, out = toy.course("check", "01")
    assert code == 0, out
    assert "3 passed" in out  # the whole stage
    code, out = toy.course("progress")
    assert out.count("green") == 2
    assert "02.1 Quadrupling" in out
    toy.write("return b * a", "return 0")
    assert "changed since it was green" in toy.course("progress")[1]


def test_plain_pytest_runs_and_records_the_learners_code(toy: ToyCourse):
    code, out = toy.pytest("stages/01", "--mine")
    assert code == 4
    assert "python course.py start 01" in out
    toy.course("start", "01")
    code, out = toy.pytest("stages/01", "--mine")
    assert code == 1
    assert "NotImplementedError: 01.1 Doubling: see docs/stages/01-toy.md" in out
    assert "Red is what a fresh start looks like" in out
    assert toy.pytest("stages/01")[0] == 0, "without --mine the shipped code runs"
    toy.write(*SOLVED_DOUBLE)
    assert toy.pytest("stages/01::TestDouble::test_double[3]", "--mine")[0] == 0
    assert "01.1 Doubling" in (out := toy.course("progress")[1])
    assert "green" not in out, "one check of two makes no exercise green"
    toy.pytest("stages/01", "--mine", "-k", "double and 3")
    assert "green" not in toy.course("progress")[1]
    code, out = toy.pytest("stages/01", "--mine", "-p", "xdist", "-n2")
    assert code == 1
    assert "green  01.1 Doubling" in out
    assert toy.course("progress")[1].count("green") == 1


def test_a_later_stage_takes_earlier_ones_only_when_they_are_green(toy: ToyCourse):
    toy.course("start", "01")
    toy.course("start", "02")
    toy.write('raise NotImplementedError("02.1 Quadrupling: see docs/stages/02-later.md")',
              "return double(double(x))", "s02_later/more.py")  # fmt: skip
    code, out = toy.pytest("stages/02", "--mine", "-v")
    assert code == 0, out
    assert "s01_toy" not in out.split("yours:")[1].splitlines()[0]
    toy.write(*SOLVED_DOUBLE)
    toy.write(*SOLVED_AREA)
    assert toy.course("check", "01")[0] == 0
    code, out = toy.pytest("stages/02", "--mine", "-v")
    assert code == 0, out
    assert "yours: s01_toy (maths.py), s02_later (more.py)" in out
    assert "With your own code of stage 01, too" in toy.course("check", "02")[1]
    assert "own code" not in toy.course("check", "01")[1]
    toy.write("return x + x", "return x + x + 1")
    code, out = toy.pytest("stages/02", "--mine", "-v")
    assert code == 0, "an earlier stage that changed since it was green stays out"
    assert "yours: s02_later (more.py)" in out


def test_learners_code_runs_under_a_later_stage(toy: ToyCourse):
    toy.course("start", "01")
    script = "from stages.s02_later.more import quadruple; print(quadruple(1))"
    assert python(toy.root, "-c", script) == (0, "4\n")
    code, out = python(toy.root, "-c", script, STEPINFER_MINE="01")
    assert code == 1
    assert "01.1 Doubling" in out


def test_nothing_of_the_learners_is_overwritten_unasked(toy: ToyCourse):
    toy.course("start", "01")
    toy.write(*SOLVED_DOUBLE)
    text = toy.mine().read_text(encoding="utf-8")
    code, out = toy.course("start", "01")
    assert code == 0
    assert "kept" in out
    code, out = toy.course("reset", "01.1")
    assert code == 1
    assert "--force" in out
    assert toy.mine().read_text(encoding="utf-8") == text

    toy.write("SCALE = 2", "SCALE = 20")
    code, out = toy.course("reset", "01.1", "--force")
    assert code == 0, out
    now = toy.mine().read_text(encoding="utf-8")
    assert SOLVED_DOUBLE[0] in now
    assert "SCALE = 20" in now, "the rest of the file stays"
    assert "return x + x" in toy.mine("s01_toy/maths.py.old").read_text(encoding="utf-8")
    toy.course("start", "01", "--force")
    assert "SCALE = 2 " in toy.mine().read_text(encoding="utf-8")
    assert toy.mine("s01_toy/maths.py.old2").read_text(encoding="utf-8") == now


def test_hints_come_one_by_one(toy: ToyCourse):
    for shown in (["nudge"], ["nudge", "push"], ["nudge", "push", "answer"], ["nudge", "push", "answer"]):
        code, out = toy.course("hint", "1.2")
        assert code == 0
        assert [word for word in ("nudge", "push", "answer") if word in out] == shown
    assert "reveal 01.2" in out
    assert "Hint 1 of 3" in (out := toy.course("hint", "01.1")[1])
    assert "Hint 2" not in out


def test_solution_is_shown_after_green_or_by_force(toy: ToyCourse):
    toy.course("start", "01")
    for command in ("reveal", "diff"):
        code, out = toy.course(command, "01.1")
        assert code == 1
        assert "x * SCALE" not in out
    assert "return x * SCALE" in toy.course("reveal", "01.1", "--force")[1]
    toy.write(*SOLVED_DOUBLE)
    toy.course("check", "01.1")
    assert "return x * SCALE" in toy.course("reveal", "01.1")[1]
    code, out = toy.course("diff", "01.1")
    assert code == 0
    assert "-    return x + x" in out
    assert "+    return x * SCALE" in out


def test_workspace_of_another_version_is_told(toy: ToyCourse):
    toy.course("start", "01")
    assert "another version" not in toy.course("check", "01")[1]
    shipped = toy.root / "stages/s01_toy/maths.py"
    shipped.write_text(MATHS.replace("Twice x.", "Two times x."), encoding="utf-8", newline="\r\n")
    for command in (["check", "01"], ["start", "01"], ["progress"]):
        out = toy.course(*command)[1]
        assert "another version" in out, command
    assert "another version" in toy.pytest("stages/01", "--mine", "-v")[1]
    toy.course("start", "01", "--force")
    shipped.write_text(shipped.read_text(encoding="utf-8"), encoding="utf-8", newline="\n")
    assert "another version" not in toy.course("check", "01")[1], "line endings are no version"


@pytest.mark.parametrize(
    ("text", "words"),
    [("def double(x:\n", "maths.py, line 1: "), ("x = 1\n", "no longer has the function double")],
)
def test_broken_file_is_named(toy: ToyCourse, text: str, words: str):
    toy.course("start", "01")
    toy.mine().write_text(text, encoding="utf-8")
    for command in (["check", "01"], ["reset", "01.1", "--force"]):
        code, out = toy.course(*command)
        assert code == 1
        assert words in out
        assert "Traceback" not in out


def test_file_that_does_not_import_is_red(toy: ToyCourse):
    toy.course("start", "01")
    toy.write("from functools import cache", "from functools import cash")
    code, out = toy.course("check", "01")
    assert code == 1
    assert "cannot import name 'cash'" in out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["start", "77"], "no stage '77'"),
        (["check", "02"], "python course.py start 02"),
        (["check", "01.9"], "01.1 (Doubling), 01.2 (Area)"),
        (["hint", "x"], "the form 01.2"),
        (["reset", "01.1"], "python course.py start 01"),
        (["reset", "02"], "For the whole stage: python course.py start 02 --force"),
        (["reveal", "2"], "name one of its exercises. Stage 02 has: 02.1 (Quadrupling)"),
    ],
)
def test_wrong_requests_get_a_sentence(toy: ToyCourse, command: list[str], words: str):
    code, out = toy.course(*command)
    assert code == 1
    assert words in out
    assert "Traceback" not in out


def test_only_check_needs_the_development_tools(toy: ToyCourse):
    hide = (
        "import sys; sys.modules |= dict.fromkeys(('pytest', '_pytest', 'hypothesis', 'matplotlib', 'xdist', 'psutil'))"
    )
    run = f"{hide}; from stages.workshop.cli import app; app(prog_name='course')"
    for command in (["start", "01"], ["start", "01"], ["hint", "01.1"], ["progress"], ["reset", "01.1", "--force"],
                    ["diff", "01.1", "--force"], ["reveal", "01.1", "--force"]):  # fmt: skip
        code, out = python(toy.root, "-c", run, *command)
        assert code == 0, (command, out)
    code, out = python(toy.root, "-c", run, "check", "01")
    assert code == 1
    assert "python course.py setup dev" in out
    assert "Traceback" not in out


# ---- course.py -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["demo", "Why?", "--max-tokens", "5"], "options belong to generate"),
        (["stat", "01"], "There is no command 'stat'"),
        (["setup", "cuda"], "There is no extra cuda"),
    ],
)
def test_entry_says_what_it_cannot_do_before_it_installs(command: list[str], words: str):
    code, out = python(ROOT, "course.py", *command)
    assert code == 2
    assert words in out


def test_entry_offers_the_commands_that_are_there():
    names = {command.name or command.callback.__name__ for command in stepinfer.registered_commands}
    assert names == set(course.STEPINFER) <= set(course.NEEDS)


# ---- the exercises of the stages -------------------------------------------------------------------------------------


def test_prover_finds_what_does_not_hold(toy: ToyCourse):
    code, out = python(toy.root, "-m", "stages.workshop.prove", "01", "02")
    assert code == 0, out
    assert len(out.splitlines()) == 9

    path = toy.root / "stages/s01_toy/test_maths.py"
    good = path.read_text(encoding="utf-8")
    faults = {
        "Shape().area(3, 4) == 12": ("Shape().area(2, 2) == 4", {("01.2", "mutant: adds instead")}),
        "double(x) == 2 * x": ("double(x) == 2 * x == Shape().area(2, x)", {("01.1", "solution")}),
        "assert double(x)": ("assert x == 2 or True or double(x)", {("01.1", "cut"), ("01.1", "mutant: adds instead")}),
        "def test_area():": ("@pytest.mark.skip\ndef test_area():", {("01.2", v) for v in ("cut", "solution", "mutant: adds instead")}),
    }  # fmt: skip
    for old, (new, expected) in faults.items():
        path.write_text(good.replace(old, new), encoding="utf-8")
        code, out = python(toy.root, "-m", "stages.workshop.prove", "01")
        found = {(p["exercise"], p["variant"]) for line in out.splitlines() if (p := json.loads(line))["fault"]}
        assert (code, found) == (1, expected), out


@cache
def proofs(number: str) -> dict[tuple[str, str], str]:
    """(exercise, variant) -> what does not hold, of all exercises of a stage: one process, run once."""
    code, out = python(ROOT, "-m", "stages.workshop.prove", number)
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert lines, f"exit code {code}:\n{out}"
    return {(p["exercise"], p["variant"]): p["fault"] for p in lines}


@pytest.mark.parametrize("stage", [s for s in read_stages() if (s.folder / "llm.py").exists()], ids=lambda s: s.name)
def test_stage_has_exercises(stage: Stage):
    assert stage.exercises


VARIANTS = [pair for stage in read_stages() for pair in prove.variants(stage)]


@pytest.mark.parametrize(("exercise_id", "variant"), VARIANTS)
def test_exercise(exercise_id: str, variant: str):
    fault = proofs(exercise_id[:2])[exercise_id, variant]
    assert not fault, fault


def test_learners_way_through_stage_01(tmp_path: Path):
    """The canary: started, red because of the cut, green with the solution; as processes, on the real stage."""
    stage = find_stage("01")
    checks = [check.replace("s01_forward", "01") for e in stage.exercises for check in e.checks]
    assert python(ROOT, "-m", "stages.workshop", "start", "01", STEPINFER_WORKSPACE=str(tmp_path))[0] == 0
    code, out = python(ROOT, "-m", "pytest", "stages/01", "--mine", "-x", STEPINFER_WORKSPACE=str(tmp_path))
    assert code == 1, out
    assert any(f"NotImplementedError: {e.message}" in out for e in stage.exercises), out
    for file in stage.files:
        (tmp_path / stage.name / file).write_text((stage.folder / file).read_text(encoding="utf-8"), encoding="utf-8")
    code, out = python(ROOT, "-m", "pytest", *checks, "--mine", STEPINFER_WORKSPACE=str(tmp_path))
    assert code == 0, out
    for e in stage.exercises:
        assert f"green  {e.id} {e.title}" in out
