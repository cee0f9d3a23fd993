"""What a client is told when something goes wrong: an error object as OpenAI's, with a status that clients act on."""

from __future__ import annotations

import contextlib
import http
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, cast

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ExceptionHandler

from stages.s09_server.answer_stream import CLOSING, STARTING, EngineDied

RETRY_SECONDS = 1  # what a client is told to wait when it came at a bad time
MAX_ECHO, MAX_WORDS = 100, 1000  # characters of a refused value that are told back, and of a message
CODES = {STARTING: "engine_starting", CLOSING: "shutting_down"}  # of engines that are not there, and not dead
TYPES = {429: "rate_limit_error", 401: "authentication_error"}


class ErrorDetail(BaseModel):
    """What went wrong, in words for a person (`message`) and for a program."""

    message: str
    type: str
    param: str | None  # the field of the request that is to blame
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer whose status is 400 or more."""

    error: ErrorDetail


class ApiError(HTTPException):
    """The request ends with this status and these words. `retry`: it may well work a little later."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(status, message, {"Retry-After": str(RETRY_SECONDS)} if retry else None)
        self.param, self.code = param, code


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400: the client must ask otherwise."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str) -> ApiError:
    """503: the server cannot serve this now."""
    return ApiError(503, message, code=code, retry=True)


def engine_died(death: str | None) -> ApiError:
    """503: the engine is gone; a new one may come. None: it is on its way."""
    why = death or STARTING
    return unavailable(why, CODES[why]) if why in CODES else unavailable(f"the engine has died: {why}", "engine_dead")


@contextlib.contextmanager
def refusing(param: str | None, fields: type[BaseModel]) -> Iterator[None]:
    """What our own checks refuse here is the client's mistake; `param` unless the words begin with a field's name."""
    try:
        yield
    except (ValueError, TypeError) as error:
        name = re.match(r"\w+", str(error))
        raise bad_request(name[0] if name and name[0] in fields.model_fields else param, str(error)) from None


def error_object(error: HTTPException) -> dict[str, Any]:
    """The body as data; msgspec turns what is no number into null, so it is JSON whatever the words."""
    kind = TYPES.get(error.status_code, "server_error" if error.status_code >= 500 else "invalid_request_error")
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return {"error": {"message": error.detail[:MAX_WORDS], "type": kind, "param": param, "code": code}}


def error_response(error: HTTPException) -> Response:
    """The body as bytes, with the status and the headers that belong to it."""
    body = msgspec.json.encode(error_object(error))
    return Response(body, error.status_code, dict(error.headers or {}), media_type="application/json")


def first_fault(error: RequestValidationError) -> ApiError:
    """Pydantic finds all faults of a request at once; a client is told the first."""
    fault = error.errors()[0]
    where = ".".join(str(part)[:MAX_ECHO] for part in fault["loc"][1:] if part != "[key]")
    words = fault["msg"].removeprefix("Value error, ")
    if fault["type"] != "missing" and (value := in_short(fault["input"])):
        words += f"; it is {value}"
    return bad_request(where or None, f"{where or 'the body'}: {words}")


def in_short(value: object) -> str:
    """A value as JSON; nothing if that is long, of which no more is looked at than could be told."""
    pieces = json.JSONEncoder(ensure_ascii=False, default=repr).iterencode(value)
    text = "".join(itertools.islice(pieces, MAX_ECHO + 1))
    return text if len(text) <= MAX_ECHO else ""


def install(app: FastAPI) -> None:
    """Every way out of a request that is not its answer."""

    async def http_error(request: Request, error: HTTPException) -> Response:
        if not isinstance(error, ApiError) and error.detail == http.HTTPStatus(error.status_code).phrase:
            error.detail = f"{error.detail}: {request.method} {request.url.path}"  # 404 and 405 of the router
        return error_response(error)

    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        return error_response(first_fault(error))

    async def engine_death(request: Request, error: EngineDied) -> Response:
        return error_response(engine_died(str(error)))

    async def own_fault(request: Request, error: Exception) -> Response:  # uvicorn logs where it was
        return error_response(ApiError(500, "the server made a mistake, which its log tells", code="internal_error"))

    app.add_exception_handler(HTTPException, cast(ExceptionHandler, http_error))
    app.add_exception_handler(RequestValidationError, cast(ExceptionHandler, validation_error))
    app.add_exception_handler(EngineDied, cast(ExceptionHandler, engine_death))
    app.add_exception_handler(Exception, own_fault)
