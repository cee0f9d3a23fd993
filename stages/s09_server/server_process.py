"""`stepinfer serve` as a child: for checks, notebooks and measurements that want a whole server, as users have it."""

from __future__ import annotations

import queue
import re
import signal
import subprocess
import sys
import threading
import time

import httpx

from stages import STAGES_DIR

IDLE = ("stepinfer_num_requests_running", "stepinfer_num_requests_waiting", "stepinfer_kv_cache_usage_perc")


class ServerProcess:
    """A server on a free port: started at once, ready when the `with` block begins, and gone after it.

    url: its address. process: the child. lines: what it has said, stdout and stderr. The `with` block raises
    RuntimeError with these if it does not get ready in so many `seconds`.
    """

    def __init__(self, *arguments: object, seconds: float = 120.0) -> None:
        self.seconds = seconds
        command = [sys.executable, "-m", "stages.cli", "serve", *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(
            command,
            cwd=STAGES_DIR.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self.lines: list[str] = []
        self.url = ""
        self.heard: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        """All lines, as they come; then None."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self.heard.put(line)
        self.heard.put(None)

    def wait_for(self, pattern: str, seconds: float = 60.0) -> None:
        """Until a line matches that has not been waited for. An address in it becomes `url`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self.heard.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(f"no {pattern!r} in {seconds} s of:\n{self.output}") from None
            if line is None:
                raise RuntimeError(f"the server ended with exit code {self.process.wait()}:\n{self.output}")
            if match := re.search(pattern, line):
                self.url = match[1] if match.re.groups else self.url
                return

    @property
    def output(self) -> str:
        """All that it has said."""
        return "\n".join(self.lines)

    def stop(self, seconds: float = 60.0) -> int:
        """Ask it to end, wait until it has; its exit code. On Windows it is not asked."""
        if sys.platform == "win32":
            self.process.kill()
        else:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """End it now, if it has not ended."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> ServerProcess:
        try:
            self.wait_for(r"is served at (\S+)", self.seconds)
        except RuntimeError:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            self.kill()


def busy(url: str) -> dict[str, float]:
    """What a server's /metrics says of answers and blocks, as far as it is not zero."""
    lines = [line.rpartition(" ") for line in httpx.get(f"{url}/metrics").text.splitlines()]
    return {name: float(value) for name, _, value in lines if name.startswith(IDLE) and float(value)}
