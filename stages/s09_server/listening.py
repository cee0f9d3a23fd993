"""The socket that a server listens on, the event loop that serves it, and who parses what comes."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import socket
import sys
from collections.abc import Callable
from typing import Any

from stages.s09_server.limits import MAX_HEAD


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address, which does not listen yet. Raises ValueError if the address cannot be had."""
    try:  # asyncio sends at once (TCP_NODELAY) only on sockets that say that they are TCP's: elsewhere 40 ms are lost
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ValueError(f"host {host!r} is not known: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        if sys.platform == "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:  # a server that has just ended does not keep the next one out
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ValueError(why_not(host, port, error)) from None
    return listener


def why_not(host: str, port: int, error: OSError) -> str:
    """What the system's refusal means to whoever chose the address."""
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use by another program; choose another with --port (0: any that is free)"
    if error.errno == errno.EACCES:
        return f"port {port} may not be used by this user; choose one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host {host} is not an address of this machine; use 127.0.0.1, or 0.0.0.0 for all of them"
    return f"port {port} of {host} cannot be had: {error.strerror}"


def url_of(listener: socket.socket) -> str:
    """Where a client of this machine finds it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed, else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def parser() -> dict[str, Any]:
    """Options of uvicorn: httptools where it is installed, as it is faster, else h11, which has a limit of its own."""
    if importlib.util.find_spec("httptools") is None:
        return {"http": "h11", "h11_max_incomplete_event_size": MAX_HEAD}
    from stages.s09_server.head_limit import HeadLimit

    return {"http": HeadLimit}
