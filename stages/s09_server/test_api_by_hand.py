"""By hand, as in the lesson on the API: when the headers of a stream go out, what goes with them, who is turned away.

No engine and no socket: `send` writes a list.
"""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from stages.s09_server.errors import ApiError
from stages.s09_server.exchange import Exchange
from stages.s09_server.messages import AnswerEvent
from stages.s09_server.service import ApiSettings, Service
from stages.s09_server.sse import EventStream


def news(text: str, finish_reason: str | None = None, answer: int = 0) -> AnswerEvent:
    return AnswerEvent(4, answer, [1], text, finish_reason=finish_reason)


class Told:
    """Stands in for an exchange: what `next` gives, one after the other; an error is raised, a text is noted."""

    def __init__(self, log: list, *script, answers: int = 1) -> None:
        self.log, self.script, self.open = log, list(script), False
        self.num_answers = self.left = answers

    @contextlib.asynccontextmanager
    async def watched(self, receive):
        self.open = True
        try:
            yield
        finally:
            self.open = False
            self.log.append("released")

    async def next(self):
        assert self.open, "nobody would notice if the client left now"
        self.log.append("next")
        events = self.script.pop(0)
        if isinstance(events, Exception):
            raise events
        self.left -= sum(event.finish_reason is not None for event in events)
        return events


class Lines:
    """Stands in for an endpoint's chunks."""

    def chunk(self, event: AnswerEvent) -> bytes:
        return f"data: {event.text}\n\n".encode() if event.text or event.finish_reason else b""

    def end(self) -> bytes:
        return b"data: usage\n\n"


def written(*script, answers: int = 1) -> list:
    """What happened, in its order: "next", "released", and what was sent: a status, bytes, the last bytes in a list."""
    log: list = []

    async def send(message):
        if message["type"] == "http.response.start":
            log.append(message["status"])
        else:
            log.append(message["body"] if message.get("more_body") else [message["body"]])

    stream = EventStream(Told(log, *script, answers=answers), Lines())
    try:
        asyncio.run(stream({"type": "http"}, None, send))
    except ApiError as error:
        log.append(error)
    return log


class TestEventStream:
    def test_an_answer_from_its_beginning_to_its_end(self):
        log = written([news("Hi")], [news("!")], [news(" How", "length")])
        assert log == [
            "next",
            200,
            b"data: Hi\n\n",
            "next",
            b"data: !\n\n",
            "next",
            "released",
            [b"data:  How\n\ndata: usage\n\ndata: [DONE]\n\n"],
        ]

    def test_an_error_before_the_first_event_is_an_answer_with_a_status(self):
        """Nothing was sent, so whoever catches it still may say 400, 500 or 503."""
        error = ApiError(503, "the engine has died")
        assert written(error) == ["next", "released", error]

    def test_an_error_after_the_headers_is_an_event_and_the_last(self):
        *_, last = log = written([news("Hi")], ApiError(500, "the step failed"))
        assert log[:5] == ["next", 200, b"data: Hi\n\n", "next", "released"]
        assert isinstance(last, list) and last[0].startswith(b'data: {"error":{"message":"the step failed"')
        assert b"DONE" not in last[0] and last[0].endswith(b"\n\n")

    def test_all_that_is_there_goes_out_in_one_write(self):
        log = written([news("a"), news("b", answer=1)], [news("c", "stop"), news("d", "stop", 1)], answers=2)
        assert log[2] == b"data: a\n\ndata: b\n\n"
        assert log[-1] == [b"data: c\n\ndata: d\n\ndata: usage\n\ndata: [DONE]\n\n"]

    def test_what_says_nothing_is_not_written(self):
        """Half a character, or the beginning of a stop string: a token has come, and no text."""
        log = written([news("")], [news("")], [news("Hi", "stop")])
        assert log[:4] == ["next", 200, "next", "next"]
        assert [entry for entry in log if isinstance(entry, bytes)] == []

    def test_one_answer_ends_before_the_other(self):
        log = written([news("a", "stop")], [news("b", answer=1)], [news("c", "length", 1)], answers=2)
        assert log[2:5:2] == [b"data: a\n\n", b"data: b\n\n"]
        assert log[-1] == [b"data: c\n\ndata: usage\n\ndata: [DONE]\n\n"]

    def test_an_answer_of_one_event_ends_with_it(self):
        """There is nothing more to wait for."""
        log = written([news("Hi", "length")])
        assert log == ["next", 200, "released", [b"data: Hi\n\ndata: usage\n\ndata: [DONE]\n\n"]]

    def test_when_the_client_has_gone_nothing_is_waited_for(self):
        """`next` gives nothing although an answer is left."""
        assert written([news("Hi")], [])[:5] == ["next", 200, b"data: Hi\n\n", "next", "released"]


# ---- who is turned away ----------------------------------------------------------------------------------------------


class Engine:
    """What a service asks of `AsyncLLM`: 2 answers run at once, `num_open` are there."""

    def __init__(self, num_open: int = 0) -> None:
        self.info, self.death = SimpleNamespace(max_num_seqs=2), None
        self.num_open, self.opened = num_open, []

    def open(self, requests, *, grammar=None):
        self.opened.append((requests, grammar))
        return "a stream"


def requests(*counts: int) -> list:
    """Checked prompts of 3 tokens, with so many answers each."""
    return [SimpleNamespace(generations=[None] * count, prompt_token_ids=[1, 2, 3]) for count in counts]


def service(num_open: int = 0, max_waiting: int = 3) -> Service:
    return Service(Engine(num_open), ApiSettings(("m",), max_waiting=max_waiting, request_timeout=30.0))


class TestOpen:
    """2 run, 3 may wait: the server holds 5 answers."""

    @pytest.mark.parametrize(("num_open", "counts"), [(0, (1,)), (4, (1,)), (0, (5,)), (2, (1, 2)), (3, (1, 1))])
    def test_as_many_as_there_is_room_for(self, num_open, counts):
        it, asked = service(num_open), requests(*counts)
        exchange = it.open(asked, 12.5, "a grammar")
        assert it.llm.opened == [(asked, "a grammar")]
        assert isinstance(exchange, Exchange) and exchange.stream == "a stream"
        assert (exchange.arrival, exchange.timeout, exchange.left) == (12.5, 30.0, sum(counts))

    @pytest.mark.parametrize(("num_open", "counts"), [(5, (1,)), (4, (2,)), (4, (1, 1)), (1, (5,))])
    def test_a_full_server_says_so_at_once(self, num_open, counts):
        """429, and when to come again; the engine hears nothing of it."""
        it = service(num_open)
        with pytest.raises(ApiError) as caught:
            it.open(requests(*counts), 12.5)
        assert (caught.value.status_code, caught.value.code) == (429, "queue_full")
        assert caught.value.headers == {"Retry-After": "1"}
        assert (it.llm.opened, it.metrics.prompt_tokens) == ([], 0)

    @pytest.mark.parametrize("num_open", [0, 5])
    def test_what_never_fits_need_not_come_again(self, num_open):
        """Six answers in one request: 400, however empty the server is, and no Retry-After."""
        it = service(num_open)
        with pytest.raises(ApiError) as caught:
            it.open(requests(2, 4), 12.5)
        assert (caught.value.status_code, caught.value.headers, it.llm.opened) == (400, None, [])

    def test_nobody_may_wait(self):
        it = service(1, max_waiting=0)
        it.open(requests(1), 12.5)
        it.llm.num_open = 2
        with pytest.raises(ApiError, match="2 answers"):
            it.open(requests(1), 12.5)
