"""A server's other processes: how they are started, and that they are while their parent still imports."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ENGINE, TEXT = "stages.s09_server.engine_process", "stages.s09_server.text_process"  # who may be a child
ROOT = Path(__file__).resolve().parents[2]  # where `stages` can be imported from
EARLY: dict[str, subprocess.Popen[bytes]] = {}  # who has been started, and not been told anything yet; by module


@contextlib.contextmanager
def early_child(module: str) -> Iterator[None]:
    """Start a child that the block will call: it imports for seconds, and so does its parent, now both at once.

    Whoever has not been called when the block ends is not needed, and ended.
    """
    EARLY[module] = launch(module)
    try:
        yield
    finally:
        if uncalled := EARLY.pop(module, None):
            uncalled.kill()
            uncalled.communicate()


def launch(module: str) -> subprocess.Popen[bytes]:
    """A Python that runs a module of this repository, and waits for a line on its stdin.

    What else a terminal says, Ctrl-C say, is meant for the parent alone.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],  # -P: files of the current folder are no modules of ours
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
    )


def start_child(module: str, call: bytes) -> subprocess.Popen[bytes]:
    """A child that is told whom to call: the one that was started early, or a new one."""
    process = EARLY.pop(module, None) or launch(module)
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended already; whoever waits for it will see
        process.stdin.write(call + b"\n")
        process.stdin.flush()
    return process
