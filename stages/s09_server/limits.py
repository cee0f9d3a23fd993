"""What is settled before a request is looked at: who asks, how much is sent, whether anybody is served at all.

Pure ASGI middleware: it sees a body as it comes in, so that too large a one is never held in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stages.s09_server.errors import ApiError, error_response, unavailable

GUARDED = ("/v1/", "/tokenize", "/detokenize", "/status")  # what needs the key; machines ask for health and metrics
MAX_HEAD = 2**16  # bytes of the request line and all headers together
LINGER_SECONDS, LINGER_BYTES = 1.0, 2**26
MAX_ID = 128  # characters of a request id that are told back


def path_of(scope: Scope) -> str:
    """The path below the one that a proxy in front of this server is told to cut off."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


class RequestId:
    """Tell a client its own X-Request-Id again, or a new one. Nothing inside goes by it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the header to the response."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request_id = Headers(scope=scope).get("x-request-id", "")[:MAX_ID] or secrets.token_hex(16)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self.app(scope, receive, named)


class ApiKey:
    """Who does not know the key is told nothing. It is compared in constant time."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.wanted = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """401, or on."""
        if scope["type"] == "http" and path_of(scope).startswith(GUARDED):
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self.wanted):
                error = ApiError(401, "the API key is missing or wrong: send Authorization: Bearer KEY")
                error.code, error.headers = "invalid_api_key", {"WWW-Authenticate": "Bearer"}
                return await error_response(error)(scope, receive, send)
        await self.app(scope, receive, send)


class Draining:
    """While the server waits for its last answers, it takes no new requests."""

    def __init__(self, app: ASGIApp, draining: Callable[[], bool]) -> None:
        self.app, self.draining = app, draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """503, or on."""
        if scope["type"] == "http" and scope["method"] == "POST" and self.draining():
            error = unavailable("the server is shutting down", "shutting_down")
            return await error_response(error)(scope, receive, send)
        await self.app(scope, receive, send)


class Head:
    """HEAD is GET without the body: monitors, proxies and `curl -I` ask so. FastAPI's routes know GET alone."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask for the same with GET, and keep what comes to oneself, but for the headers."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self.app(scope, receive, send)

        async def bodiless(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self.app({**scope, "method": "GET"}, receive, bodiless)


class BodyLimit:
    """413 for a body of more bytes than this: by its header, or as soon as that many have come."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what comes in."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self.limit:
            return await self.refuse(receive, send)
        came, refused = 0, False

        async def counted() -> Message:
            nonlocal came, refused
            message = await receive()
            came += len(message.get("body", b""))
            if came > self.limit:
                refused = True
                raise BodyTooLarge
            return message

        async def unless_refused(message: Message) -> None:
            if not refused:  # what the app makes of the broken body is not told
                await send(message)

        with contextlib.suppress(BodyTooLarge):
            await self.app(scope, counted, unless_refused)
        if refused:
            await self.refuse(receive, send)

    async def refuse(self, receive: Receive, send: Send) -> None:
        """Answer, and close. A client that only writes must be read from for a moment, or it may never see the answer:
        a connection that is closed with unread bytes is reset. What it sends is thrown away.
        """
        response = error_response(ApiError(413, f"the body has more than {self.limit} bytes", code="body_too_large"))
        headers = [*response.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                came, more = 0, True
                while more and came < LINGER_BYTES:
                    message = await receive()
                    came, more = came + len(message.get("body", b"")), message.get("more_body", False)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class BodyTooLarge(Exception):
    """Ends the reading of a body."""
