"""Other engines' servers, started for a comparison and ended after it: transformers' own, and llama.cpp's."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 120.0  # seconds until a server that is not ready is an error
GRACE = 10.0  # seconds to end when asked to
LLAMA_SERVER = "LLAMA_SERVER"  # environment variable: the program, if it is not on the path


def transformers_serve(folder: Path, port: int, *, continuous_batching: bool = False, blocks: int = 64) -> list[str]:
    """Command of `transformers serve` on a CPU in fp32.

    Args:
        continuous_batching: Answers share steps; otherwise a request waits until the one before it is answered.
        blocks: Of 256 tokens, for the KV cache of continuous batching. On a CPU every step takes time for all of them,
            and without a number they fill the memory.
    """
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder)]
    command += ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    if continuous_batching:
        command += ["--continuous-batching", "--cb-num-blocks", str(blocks), "--cb-max-batch-tokens", "512"]
    return command


def llama_server(gguf: Path, port: int, *, threads: int, slots: int = 8, context: int = 1024) -> list[str]:
    """Command of llama.cpp's server: `slots` answers at a time, each with `context` tokens.

    Raises:
        FileNotFoundError: There is no such program.
    """
    program = os.environ.get(LLAMA_SERVER) or shutil.which("llama-server")
    if program is None:
        raise FileNotFoundError(f"llama-server is not on the path, and {LLAMA_SERVER} does not say where it is")
    return [
        *(program, "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port), "--threads", str(threads)),
        *("--parallel", str(slots), "--ctx-size", str(slots * context), "--no-webui"),
    ]


def free_port() -> int:
    """A port of this machine that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(command: Sequence[str], port: int, *, threads: int | None = None) -> Iterator[subprocess.Popen]:
    """Inside the block the server answers at http://127.0.0.1:`port`; after it the process has ended.

    Raises:
        RuntimeError: It ended, or was not ready in time; with the last lines that it wrote.
    """
    with tempfile.TemporaryFile() as log:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            if not _becomes_ready(process, f"http://127.0.0.1:{port}/health"):
                log.seek(0)
                words = log.read().decode(errors="replace").splitlines()[-5:]
                raise RuntimeError(f"{Path(command[0]).name} does not serve: " + " / ".join(words))
            yield process
        finally:
            process.terminate()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _becomes_ready(process: subprocess.Popen, url: str) -> bool:
    """Ask until the server answers 200. False if it ends before, or takes too long."""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    return False
