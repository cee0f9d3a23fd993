"""The wire between two processes: a ROUTER and a DEALER of ZeroMQ, and a child that lives as long as its parent.

The child connects under a secret name; the parent hears and answers that name alone. Without `ipc`, on Windows, this
is what keeps the other programs of the machine out; elsewhere the socket lies in a private folder besides.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from stages.s09_server.children import start_child

HANG_UP = b""
DEAF_SECONDS = 1.0  # for a child that has not spoken: it may still be importing, and does not hear that it is to end
QUIET_MS = 100  # nothing has come for as long, and the child has ended: that was its last word


class Call(msgspec.Struct, frozen=True):
    """What a child is told at its start: whom to call, and how to name itself."""

    address: str
    name: str
    settings: msgspec.Raw = msgspec.Raw(b"null")


class ChildLink:
    """The parent's end: starts `python -m module`, and brings its frames.

    on_frame and on_death are called from a thread of this object. on_death comes once, after the last frame, unless
    `close` was called before.
    """

    def __init__(
        self,
        module: str,
        settings: msgspec.Struct | msgspec.Raw,
        on_frame: Callable[[bytes], object],
        on_death: Callable[[str], object],
    ) -> None:
        self.on_frame, self.on_death, self.closed = on_frame, on_death, False
        packed, self.name = pack_settings(settings), secrets.token_hex(16)
        self.folder = tempfile.mkdtemp(prefix="stepinfer-")  # mode 0700
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.router, self.inner, self.outer = (context.socket(kind) for kind in (zmq.ROUTER, zmq.PULL, zmq.PUSH))
        for socket in (self.router, self.inner, self.outer):
            socket.set_hwm(0)  # a pause of the other side must not stop this one
            socket.linger = 0
        self.router.bind(address_in(self.folder))
        self.inner.bind(f"inproc://{self.name}")
        self.outer.connect(f"inproc://{self.name}")
        address = self.router.getsockopt_string(zmq.LAST_ENDPOINT)
        call = Call(address, self.name, msgspec.Raw(packed))
        self.process = start_child(module, msgspec.json.encode(call))
        # A socket belongs to one thread: this one has the router, and takes what is to be sent from the inner pair.
        self.porter = threading.Thread(target=self.carry, name="link", daemon=True)
        self.porter.start()

    def send(self, frame: bytes) -> None:
        """From the thread that made this object, always the same."""
        if not self.closed:
            self.outer.send(frame)

    def carry(self) -> None:
        """Frames in both directions, until the call ends. Tells when the child has ended, and all it said was heard."""
        poller = zmq.Poller()
        poller.register(self.router, zmq.POLLIN)
        poller.register(self.inner, zmq.POLLIN)
        seen, told = time.monotonic(), False
        while True:
            ready = dict(poller.poll(None if told else QUIET_MS))
            if self.router in ready:
                name, frame, *_ = self.router.recv_multipart()
                if secrets.compare_digest(name, self.name.encode()):
                    self.remove_folder()  # the child is here, and nobody else is to come
                    self.on_frame(frame)
            if self.inner in ready:
                frame = self.inner.recv()
                if frame == HANG_UP:
                    break
                self.router.send_multipart([self.name.encode(), frame])
            if self.router in ready or self.process.poll() is None:
                seen = time.monotonic()  # it lives, or what it said last is still coming
            elif not told and time.monotonic() > seen + QUIET_MS / 1000:
                told = True
                if not self.closed:
                    self.on_death(f"the engine process ended with exit code {self.process.returncode}")
        self.router.close()
        self.inner.close()

    def close(self, seconds: float = 5.0) -> None:
        """End the child: it goes when its stdin closes, or else by force; soon, if it has not spoken yet."""
        if self.closed:
            return
        self.closed = True
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it went before it had read everything
            self.process.stdin.close()
        try:
            self.process.wait(min(seconds, DEAF_SECONDS) if self.folder else seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.outer.send(HANG_UP)
        self.porter.join()
        self.outer.close()
        self.remove_folder()

    def remove_folder(self) -> None:
        """A socket that is connected needs no file."""
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = ""


def pack_settings(settings: msgspec.Struct | msgspec.Raw) -> bytes:
    """As JSON; a path becomes its text. Raises TypeError for what has no place in it."""
    return msgspec.json.encode(settings, enc_hook=os.fspath)


def address_in(folder: str) -> str:
    """A socket in a private folder; on loopback, if there are none here, or the folder's path is too long for one."""
    path = f"{folder}/engine"
    fits = sys.platform != "win32" and len(os.fsencode(path)) < zmq.IPC_PATH_MAX_LEN
    return f"ipc://{path}" if fits else "tcp://127.0.0.1:*"


class ParentLink:
    """The child's end. From its making on, the process ends when the parent does, whatever it is doing."""

    def __init__(self) -> None:
        line = sys.stdin.buffer.readline()
        if not line:  # it was started early, and its parent has gone without a word
            sys.exit(0)
        call = msgspec.json.decode(line, type=Call)
        self.settings = call.settings
        threading.Thread(target=end_with_parent, daemon=True).start()
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.LINGER, 1000)  # ms: the last words are heard
        self.socket.setsockopt(zmq.IDENTITY, call.name.encode())
        self.socket.connect(call.address)

    def send(self, frame: bytes) -> None:
        """To the parent."""
        self.socket.send(frame)

    def receive(self, wait: bool) -> bytes | None:
        """The next frame; None if there is none and nobody waits."""
        try:
            return self.socket.recv(0 if wait else zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self) -> None:
        """After the last words."""
        self.socket.close()
        zmq.Context.instance().term()


def end_with_parent() -> None:
    """Nothing more is ever written to stdin: it ends when the parent closes it, or is gone."""
    while os.read(sys.stdin.fileno(), 4096):  # not through `sys.stdin`: its lock would be in the way of an orderly end
        pass
    os._exit(0)
