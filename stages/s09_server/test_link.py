"""The wire between two processes: what is said arrives, who is gone is missed, and nothing is left behind."""

import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from stages.s01_forward.sampling_params import SamplingParams
from stages.s09_server.children import EARLY, ROOT, early_child, launch
from stages.s09_server.engine_process import EngineSettings
from stages.s09_server.link import ChildLink, pack_settings
from stages.s09_server.messages import Add, AskStatus, Dead, Ready, Status, Step, decode_from_engine, encode
from stages.s09_server.rigged_engine import GARBAGE, LENGTH
from tests.fixtures import start_early

MODULE = "stages.s09_server.rigged_engine"
PATIENCE = 30.0  # seconds, for anything


class Phone:
    """A link, and what was heard on it."""

    def __init__(self, model: str = "serves") -> None:
        self.said: list = []
        self.news = threading.Condition()
        self.link = ChildLink(MODULE, EngineSettings(model), self.hear, self.hear)

    def hear(self, what: bytes | str) -> None:
        with self.news:
            self.said.append(what if isinstance(what, str) or what == GARBAGE else decode_from_engine(what))
            self.news.notify_all()

    def wait_for(self, count: int) -> list:
        with self.news:
            assert self.news.wait_for(lambda: len(self.said) >= count, PATIENCE), self.said
            return self.said

    def is_over(self) -> bool:
        """Is nothing left of it?"""
        link = self.link
        gone = link.process.poll() is not None and not link.porter.is_alive()
        closed = link.router.closed and link.inner.closed and link.outer.closed and link.process.stdin.closed
        return gone and closed and not link.folder


@pytest.fixture(scope="module", autouse=True)
def early(request):
    start_early(request, "launched", "test_serve.py")


@pytest.fixture
def phone(tmp_path, monkeypatch):
    """`phone(model)` starts a child; in the end all are closed, and neither files nor threads are left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made: list[Phone] = []

    def make(model: str = "serves") -> Phone:
        made.append(Phone(model))
        return made[-1]

    yield make
    for it in made:
        it.link.close()
        assert it.is_over()
    assert list(tmp_path.iterdir()) == []


def add(first: int, limit: int, prompt: list[int] | None = None) -> bytes:
    return encode(Add(first, first, prompt or [5], SamplingParams(max_tokens=limit), [0], limit))


def open_files() -> int:
    me = psutil.Process()
    return me.num_fds() if hasattr(me, "num_fds") else 0  # Windows has handles, that come and go by themselves


def ends(pid: int) -> bool:
    """Is a process, no child of this one, gone within seconds?"""
    deadline = time.monotonic() + PATIENCE
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_frames_arrive_whole_and_in_order(phone):
    """Of a million token ids, too, and of 200 requests at once."""
    it = phone()
    assert isinstance(it.wait_for(1)[0], Ready)
    it.link.send(add(0, 2, [7] * 1_000_000))
    for number in range(1, 200):
        it.link.send(add(number, 3))
    steps = it.wait_for(1 + 2 + 199 * 3)[1:]
    assert all(isinstance(step, Step) for step in steps)
    assert [(*step.answers, *step.tokens) for step in steps] == [
        (number, token) for number in range(200) for token in range(1, 3 + (number > 0))
    ]


def test_the_folder_goes_with_the_first_frame(phone, tmp_path):
    """What is connected needs no file: not even a parent that is killed later leaves one behind."""
    it = phone()
    it.wait_for(1)
    it.link.send(encode(AskStatus()))
    assert isinstance(it.wait_for(2)[1], Status)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("far", [False, True], ids=["ipc", "loopback"])
def test_strangers_are_not_heard(far, phone, tmp_path, monkeypatch):
    """Whoever finds the address, and does not know the name. Too long a path for `ipc` is a case for loopback."""
    if far:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
        Path(tempfile.tempdir).mkdir()
    it = phone("ready late")
    address = it.link.router.getsockopt_string(zmq.LAST_ENDPOINT)
    assert address.startswith("tcp://127.0.0.1:" if far or sys.platform == "win32" else "ipc://")
    names = [b"somebody", secrets.token_hex(16).encode(), it.link.name[:-1].encode() + b"~", None]
    strangers = [zmq.Context.instance().socket(zmq.DEALER) for _ in names]
    for stranger, name in zip(strangers, names, strict=True):
        if name:
            stranger.setsockopt(zmq.IDENTITY, name)
        stranger.connect(address)
        for frames in ([GARBAGE], [b""], [b"", GARBAGE], [encode(Dead("nonsense", fault=True))] * 3):
            stranger.send_multipart(frames)
    assert isinstance(it.wait_for(1)[0], Ready), "they are passed over, and the thread is well"
    it.link.send(add(0, 2))
    assert [step.tokens for step in it.wait_for(3)[1:]] == [[1], [2]]
    for stranger in strangers:
        assert stranger.poll(0) == 0, "a stranger is told nothing"
        stranger.close(linger=0)
    if far:
        Path(tempfile.tempdir).rmdir()


def test_last_words_come_before_the_news_of_a_death(phone):
    for _ in range(2):
        it = phone("says why")
        words, death = it.wait_for(2)
        assert words == Dead("there is no such model", fault=False)
        assert death == "the engine process ended with exit code 2"
    time.sleep(0.3)
    assert len(it.said) == 2, "a death is told once"


def test_a_child_that_is_killed(phone):
    it = phone()
    it.wait_for(1)
    it.link.process.kill()
    assert "ended with exit code" in it.wait_for(2)[1]
    it.link.send(add(0, 1))  # to nobody: it does not wait
    it.link.process.stdin.write(b"what nobody reads")  # as if it had gone before it was told its settings


def test_a_death_is_noticed_however_much_is_said_to_the_dead(phone):
    it = phone()
    it.wait_for(1)
    it.link.process.kill()
    deadline = time.monotonic() + PATIENCE
    while len(it.said) < 2 and time.monotonic() < deadline:
        it.link.send(encode(AskStatus()))
        time.sleep(0.002)
    assert "ended with exit code" in it.said[-1]


def test_no_death_is_told_of_a_child_that_was_closed(phone):
    it, silent = phone(), phone("never ready")
    it.wait_for(1)
    it.link.close(seconds=PATIENCE)
    silent.link.close()
    assert it.link.process.returncode == 0, "it goes when its stdin closes"
    it.link.close()
    it.link.send(add(0, 1))
    time.sleep(0.3)
    assert (len(it.said), silent.said) == (1, [])


def test_who_does_not_go_is_ended_by_force(phone):
    it = phone("hangs")
    it.wait_for(1)
    child = psutil.Process(it.link.process.pid)
    before = child.cpu_times().user
    while child.cpu_times().user < before + 0.1:  # it has begun to hang
        time.sleep(0.01)
    it.link.close(seconds=0.1)
    assert it.link.process.returncode != 0
    assert it.is_over()


def test_a_child_that_is_still_importing_is_not_waited_for(tmp_path, monkeypatch):
    """It does not know yet that it should listen."""
    (tmp_path / "slow_to_import.py").write_text("import time\n\ntime.sleep(60)\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("stages.s09_server.link.DEAF_SECONDS", 0.2)
    child = ChildLink("slow_to_import", EngineSettings(), print, print)
    began = time.monotonic()
    child.close()
    assert 0.1 < time.monotonic() - began < 30.0
    assert child.process.returncode


def test_a_child_may_be_started_before_it_is_called(phone):
    with early_child(MODULE):
        early = EARLY[MODULE]
        it = phone()
    assert it.link.process is early
    assert isinstance(it.wait_for(1)[0], Ready), "it lives on after the block"
    assert phone().link.process is not early


def test_who_is_not_called_is_ended():
    with pytest.raises(ValueError, match="there is no such model"), early_child(MODULE):
        early = EARLY[MODULE]
        raise ValueError("there is no such model")
    assert early.returncode
    assert EARLY == {}


def test_who_is_not_called_and_has_no_parent_any_more_says_nothing(capfd):
    child = launch(MODULE)
    child.communicate(timeout=PATIENCE)
    assert (child.returncode, *capfd.readouterr()) == (0, "", "")


def test_nothing_is_left_open(phone):
    phone().link.close()
    before = open_files()
    for model in ("serves", "leaves", "says why", "serves"):
        phone(model).link.close()
    deadline = time.monotonic() + PATIENCE
    while open_files() > before and time.monotonic() < deadline:  # a thread of ZeroMQ's closes them
        time.sleep(0.01)
    assert open_files() <= before


def test_the_child_goes_with_its_parent(tmp_path):
    """Killed, so that nobody can say goodbye."""
    script = f"""
import time
from stages.s09_server.link import ChildLink
from stages.s09_server.rigged_engine import Rigged
link = ChildLink({MODULE!r}, Rigged("serves"), lambda frame: print(link.process.pid, flush=True), print)
time.sleep(60)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "TEMP": str(tmp_path)},
    )
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert ends(child)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_is_meant_for_the_parent_alone(phone):
    """A terminal tells it to all of a group; the child is in another one. (Windows has no numbers for them.)"""
    it = phone()
    group_of = getattr(os, "getpgid", lambda pid: pid)
    assert group_of(it.link.process.pid) != group_of(os.getpid())


def test_settings_are_packed_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    threads = threading.active_count()
    with pytest.raises(TypeError, match="object"):
        ChildLink(MODULE, EngineSettings(options={"device": object()}), print, print)
    assert (list(tmp_path.iterdir()), threading.active_count()) == ([], threads)


def test_a_path_is_told_as_text(tmp_path):
    settings = EngineSettings(tmp_path, options={"speculative": tmp_path})  # type: ignore[arg-type]
    told = msgspec.json.decode(pack_settings(settings), type=EngineSettings)
    assert told == EngineSettings(str(tmp_path), options={"speculative": str(tmp_path)})


def test_the_rigged_engine_counts_to_nine_at_most(phone):
    it = phone()
    it.wait_for(1)
    it.link.send(add(3, LENGTH))
    assert [step.tokens for step in it.wait_for(10)[1:]] == [[token] for token in range(1, 10)]
