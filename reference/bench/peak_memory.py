"""Peak anonymous memory of a function, measured in a process of its own.

Anonymous memory is what a process must really have: allocations, and not the pages of a mapped file, which the system
can drop at any time. A loader that maps a checkpoint and copies it needs the weights once, not twice.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
READY, DONE = b"ready\n", b"done\n"


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of anonymous memory: before the call, at its peak, and after it with the result still alive."""

    before: int
    peak: int
    after: int

    @property
    def added(self) -> int:
        """Bytes that the call needed at its peak beyond what was there before."""
        return self.peak - self.before


def peak_memory(target: str, arguments: Sequence[str | int | float] = (), timeout: float = 300.0) -> PeakMemory | None:
    """Run `target(*arguments)` in a fresh Python process and watch its anonymous memory every millisecond.

    Args:
        target: "package.module:function". The module is imported before the measurement starts.
        arguments: Plain values (they travel as JSON).
        timeout: Seconds until the process is ended and TimeoutError raised.

    Returns:
        The peak, or None where the system does not tell ("not measured"): everywhere but on Linux.

    Raises:
        RuntimeError: The function failed; the message ends with its traceback.
    """
    if not Path("/proc/self/status").exists():
        return None
    with subprocess.Popen(
        [sys.executable, "-m", "reference.bench.peak_memory", target, json.dumps(list(arguments))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as child:
        assert child.stdin and child.stdout and child.stderr
        try:
            _expect(child, READY)
            before = peak = _anonymous_bytes(child.pid)
            os.set_blocking(child.stdout.fileno(), False)
            child.stdin.write(b"go\n")
            child.stdin.flush()
            deadline = time.monotonic() + timeout
            while (said := child.stdout.readline()) != DONE:
                if child.poll() is not None:
                    raise RuntimeError(f"{target} failed:\n{child.stderr.read().decode(errors='replace')}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{target} took longer than {timeout} s")
                assert not said, said
                peak = max(peak, _anonymous_bytes(child.pid))
                time.sleep(0.001)
            after = _anonymous_bytes(child.pid)
            return PeakMemory(before, max(peak, after), after)
        finally:
            child.kill()


def _expect(child: "subprocess.Popen[bytes]", line: bytes) -> None:
    assert child.stdout and child.stderr
    if child.stdout.readline() != line:
        raise RuntimeError(f"the measured process failed:\n{child.stderr.read().decode(errors='replace')}")


def _anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0  # the process has ended: it holds nothing


def _child() -> None:
    """The measured side: import, say ready, wait for go, call, say done, keep the result until ended."""
    talk = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the function prints must not look like our words
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    talk.write(READY)
    sys.stdin.readline()
    kept = function(*json.loads(sys.argv[2]))
    talk.write(DONE)
    sys.stdin.readline()  # until the measuring side closes the pipe or ends this process
    del kept


if __name__ == "__main__":
    _child()
