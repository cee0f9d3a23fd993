"""How much a client may send before its request is known: httptools has no limit, and parses a long header slowly.

It joins what has come anew with every read, and while it does so for a header of many MB, no stream goes on.
"""

from __future__ import annotations

import http

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stages.s09_server.errors import ApiError, error_response
from stages.s09_server.limits import LINGER_SECONDS, MAX_HEAD


class HeadLimit(HttpToolsProtocol):
    """uvicorn's protocol, with a limit to what may come without completing a head, being of a body, or ending one."""

    unknown, refused = 0, False  # bytes

    def data_received(self, data: bytes) -> None:
        """Hand on no more at once than may still be unknown: so the limit holds to the byte."""
        while data and not self.refused and not self.transport.is_closing():
            room = MAX_HEAD - self.unknown
            piece, data = data[:room], data[room:]
            self.unknown += len(piece)
            super().data_received(piece)
            if self.unknown == MAX_HEAD:
                self.refuse()

    def on_headers_complete(self) -> None:
        """A head."""
        self.unknown = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of a body."""
        self.unknown = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A body's end."""
        self.unknown = 0
        super().on_message_complete()

    def refuse(self) -> None:
        """Say so, unless an answer is under way; then close. What comes meanwhile is thrown away: see `BodyLimit`."""
        self.refused = True
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(refusal())
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


def refusal() -> bytes:
    """A whole response."""
    response = error_response(ApiError(431, f"the headers have more than {MAX_HEAD} bytes", code="headers_too_large"))
    headers = b"".join(b"%s: %s\r\n" % header for header in [*response.raw_headers, (b"connection", b"close")])
    return b"HTTP/1.1 431 %s\r\n%s\r\n%s" % (http.HTTPStatus(431).phrase.encode(), headers, bytes(response.body))
