"""A model behind an OpenAI-compatible server, to talk to."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import httpx

from stages.s01_forward.sampling_params import SamplingParams
from stages.s01_forward.tokenizer import Message
from stages.s09_server.chat_model import ChatError

CONNECT_SECONDS, READ_SECONDS = 10.0, 600.0  # a long prompt may take a while
CUT = "cut: the answer has reached --max-tokens, or the model its length; /reset begins a new conversation"
SHOWN = 300  # characters of a complaint that is not in OpenAI's form


class RemoteModel:
    """Raises ValueError if there is no such server, or it lists no model."""

    def __init__(self, url: str, api_key: str | None, model: str | None, params: SamplingParams) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url is {url!r}; it must begin with http:// or https://")
        self.url, self.params = url.rstrip("/").removesuffix("/v1"), params
        self.cut = ""
        self.client = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS),
        )
        self.name = model or self.first_model()

    def __enter__(self) -> RemoteModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def first_model(self) -> str:
        """What the server calls its model."""
        try:
            response = self.client.get(f"{self.url}/v1/models")
            if response.status_code != 200:
                raise ValueError(f"{self.url} answers {complaint(response)}")
            return str(response.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            raise ValueError(f"there is no server at {self.url}: {error}") from None
        except (LookupError, TypeError, json.JSONDecodeError):
            raise ValueError(f"{self.url} lists no model; is it an OpenAI-compatible server?") from None

    def answer(self, messages: Sequence[Message]) -> Generator[str]:
        """Piece by piece. Closing the iterator closes the connection, and the server gives the answer up."""
        self.cut = ""
        body: dict[str, Any] = {"model": self.name, "messages": list(messages), "stream": True}
        body |= {"temperature": self.params.temperature, "top_p": self.params.top_p}
        if self.params.max_tokens is not None:
            body["max_tokens"] = self.params.max_tokens
        if self.params.seed is not None:
            body["seed"] = self.params.seed
        try:
            with self.client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    hint = "; /reset begins a new conversation" if response.status_code == 400 else ""
                    raise ChatError(complaint(response) + hint)
                yield from self.pieces(response.iter_lines())
        except httpx.HTTPError as error:
            raise ChatError(f"the connection to {self.url} broke: {error or type(error).__name__}") from None

    def pieces(self, lines: Iterator[str]) -> Iterator[str]:
        """The text of an event stream. Raises ChatError if it does not come to a good end."""
        for line in lines:
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if not line.startswith("data:"):
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise ChatError(message_of(chunk))
            for choice in chunk["choices"]:
                yield choice["delta"].get("content") or ""
                if choice.get("finish_reason") == "length":
                    self.cut = CUT
        raise ChatError("the server closed the connection before the answer was complete")


def complaint(response: httpx.Response) -> str:
    """A refusal in one line."""
    try:
        words = message_of(response.json())
    except (ValueError, LookupError, TypeError, AttributeError):
        words = " ".join(response.text.split())[:SHOWN]
    return f"{response.status_code}: {words}"


def message_of(body: Any) -> str:
    """The words of OpenAI's error object."""
    error = body["error"]
    return str(error["message"] if isinstance(error, dict) else error)
