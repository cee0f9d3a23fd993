"""`course.py` sets up one environment, whoever asks for it at the same time."""

import importlib.util
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

COURSE = Path(__file__).parent.parent / "course.py"
HOLD = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("course", sys.argv[1])
course = importlib.util.module_from_spec(spec)
spec.loader.exec_module(course)
course.LOCK = course.Path(sys.argv[2])
with course.alone():
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def course(tmp_path):
    """The module, whose environment would lie elsewhere."""
    spec = importlib.util.spec_from_file_location("course_under_test", COURSE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.LOCK, module.STAMP, module.PYTHON = tmp_path / "lock", tmp_path / "stamp.json", Path(sys.executable)
    return module


def finish(course, extras):
    """As if somebody had set it up."""
    course.STAMP.write_text(
        json.dumps({"key": course.fingerprint(), "extras": extras, "torch": None}), encoding="utf-8"
    )


@pytest.mark.parametrize("other_does_all", [True, False])
def test_a_second_command_waits_and_then_does_what_is_left(course, other_does_all, monkeypatch, capsys):
    done = []
    monkeypatch.setattr(course, "set_up", lambda extras, index: done.append(extras))
    command = [sys.executable, "-c", HOLD, str(COURSE), str(course.LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        mine = threading.Thread(target=course.install, args=({"server"}, None))
        mine.start()
        time.sleep(0.5)
        assert mine.is_alive() and not done
        finish(course, ["server"] if other_does_all else ["docs"])
        other.communicate("\n")
    mine.join(10)
    assert not mine.is_alive() and done == ([] if other_does_all else [{"server"}])
    assert capsys.readouterr().out.startswith("Another command is setting up")


def test_who_ended_holds_nothing(course, monkeypatch):
    """However it ended."""
    command = [sys.executable, "-c", HOLD, str(COURSE), str(course.LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        other.kill()
    done = []
    monkeypatch.setattr(course, "set_up", lambda extras, index: done.append(extras))
    course.install({"server"}, None)
    assert done == [{"server"}]


def test_nobody_waits_where_all_is_there(course, monkeypatch):
    finish(course, ["server", "demo"])
    monkeypatch.setattr(course, "alone", lambda: pytest.fail("nothing is to be set up"))
    course.install({"server"}, None)
