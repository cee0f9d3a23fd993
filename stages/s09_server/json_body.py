"""The body of a request: JSON and nothing else, parsed once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

from stages.s09_server.errors import ApiError, bad_request


class JsonRequest(Request):
    """Reads its body with msgspec: several times as fast as Python's reader, and it takes neither NaN nor 1e999."""

    async def json(self) -> Any:
        """The parsed body. Raises ApiError for anything that is not JSON."""
        try:
            return msgspec.json.decode(await self.body())
        except msgspec.MsgspecError as error:
            raise bad_request(None, f"the body is not valid JSON: {error}", "invalid_json") from None
        except RecursionError:
            raise bad_request(None, "the body is nested too deeply", "invalid_json") from None


class JsonRoute(APIRoute):
    """A route that takes `application/json` alone.

    A page in a browser may send a form or plain text to any server of its user's machine without asking; to send JSON
    it must ask first, and is refused unless its origin was allowed.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind our reader."""
        handle = super().get_route_handler()

        async def route(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if self.body_field is not None and kind != "application/json":
                words = f"the body is {kind or 'of no type'}; send JSON, with the header Content-Type: application/json"
                raise ApiError(415, words, code="unsupported_media_type")
            coding = request.headers.get("content-encoding", "identity").strip().lower()
            if coding != "identity":
                words = f"the body's Content-Encoding is {coding or 'empty'}; send the JSON as it is, without one"
                error = ApiError(415, words, code="unsupported_content_encoding")
                error.headers = {"Accept-Encoding": "identity"}
                raise error
            return await handle(JsonRequest(request.scope, request.receive))

        return route
