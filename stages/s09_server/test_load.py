"""The load generator against servers whose latencies and faults are known: its figures must be those.

Both are in an event loop whose time stands still while they are busy: however slow the machine, it is 0.1 s or 0.11.
"""

import asyncio
import math
import statistics
import time
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.s09_server import load as loads
from stages.s09_server import load_request as load_requests
from stages.s09_server.fake_time import FakeTimeLoop
from stages.s09_server.load import arrivals, drive, warm_up
from stages.s09_server.load_prompts import Lengths, bodies, random_questions, read_questions
from stages.s09_server.load_report import read_goals, read_percentiles, summarise
from stages.s09_server.load_request import EventReader
from stages.s09_server.load_target import Target
from stages.s09_server.scripted_server import (
    DONE,
    Script,
    ScriptedServer,
    answer,
    delta,
    event,
    text,
    usage,
)


@pytest.fixture(scope="module", autouse=True)
def time_of_the_loop():
    """What the load generator measures with is the clock of the event loop that it runs in."""
    clock = SimpleNamespace(perf_counter=lambda: asyncio.get_running_loop().time(), process_time=time.process_time)
    with pytest.MonkeyPatch.context() as patch:
        for module in (loads, load_requests):
            patch.setattr(module, "time", clock)
        yield


def run(coroutine):
    with asyncio.Runner(loop_factory=FakeTimeLoop) as runner:
        return runner.run(coroutine)


async def load(server, count, due=None, endpoint="/v1/completions", timeout=30.0, **options):
    """Run `count` requests, {"number": 0}, {"number": 1} and so on."""
    target = Target(server.url, endpoint, timeout=timeout)
    asked = [b'{"number": %d}' % number for number in range(count)]
    return await drive(target, asked, [0.0] * count if due is None else due, **options)


def run_of(script, count=1, **options):
    """The server, when all is over, and what was measured."""

    async def both():
        async with ScriptedServer(script) as server:
            return server, await load(server, count, **options)

    return run(both())


def report_of(script, count=1, goals=None, **options):
    return summarise(run_of(script, count, **options)[1], goals or {})


def seconds(expected):
    return pytest.approx(expected, abs=1e-6)


class TestFigures:
    def test_known_latencies(self):
        report = report_of(lambda body: answer(6, first=0.1, gap=0.03), count=3)
        assert (report.completed, report.failed, report.output_tokens, report.prompt_tokens) == (3, 0, 18, 9)
        ttft, itl, tpot, e2el = (report.latencies[name] for name in ("ttft", "itl", "tpot", "e2el"))
        assert (ttft.count, itl.count, tpot.count, e2el.count) == (3, 15, 3, 3)
        assert (ttft.mean, itl.mean, itl.percentiles[50.0], tpot.mean) == tuple(map(seconds, (0.1, 0.03, 0.03, 0.03)))
        assert e2el.mean == report.seconds == seconds(0.25)
        assert report.per_second(report.output_tokens) == pytest.approx(18 / report.seconds)
        assert report.counted and report.good is None

    def test_several_tokens_in_a_chunk(self):
        """ITL is between chunks, TPOT between tokens."""
        pieces = [(0.03, text(" a b c")) for _ in range(4)] + [(0.0, text("", "stop") + usage(5, 12) + DONE)]
        report = report_of(lambda body: Script(pieces))
        assert (report.output_tokens, report.chunks, report.latencies["itl"].count) == (12, 4, 3)
        assert report.latencies["itl"].mean == seconds(0.03)
        assert report.latencies["tpot"].mean == seconds(3 * 0.03 / 11)

    def test_an_opening_chunk_is_no_token(self):
        pieces = [(0.0, delta(role="assistant", content="")), (0.1, delta(content="Hi"))]
        ending = (0.0, delta("stop") + usage(4, 1) + DONE)
        report = report_of(lambda body: Script([*pieces, ending]), endpoint="/v1/chat/completions")
        assert report.latencies["ttft"].mean == seconds(0.1)
        assert report.chunks == 1
        assert report.latencies["itl"] is None and report.latencies["tpot"] is None

    def test_thoughts_and_tool_calls_are_tokens(self):
        said = [delta(reasoning_content="Hm"), delta(reasoning="so"), delta(tool_calls=[{"index": 0}]), delta("stop")]
        report = report_of(lambda body: Script([(0.0, each) for each in said]), endpoint="/v1/chat/completions")
        assert (report.completed, report.chunks) == (1, 3)

    def test_an_answer_without_text(self):
        """Its first token is told by its end."""
        report = report_of(lambda body: Script([(0.05, text("", "stop") + usage(4, 2) + DONE)]))
        assert report.completed == 1
        assert report.latencies["ttft"].mean == report.latencies["e2el"].mean == seconds(0.05)

    def test_no_usage_is_told(self):
        report = report_of(lambda body: Script([(0.0, text(" a")), (0.02, text(" b", "length"))]))
        assert (report.output_tokens, report.counted) == (2, False)
        assert any("tokens are counted as chunks" in warning for warning in report.warnings)

    def test_no_end_mark_is_needed(self):
        """Some servers send no [DONE]: a finish reason ends an answer too."""
        assert report_of(lambda body: Script([(0.0, text(" a", "stop"))])).completed == 1

    def test_goodput(self):
        def script(body):
            return answer(3, first=0.0 if body["number"] % 2 else 0.15, gap=0.05 if body["number"] == 1 else 0.0)

        _, measured = run_of(script, count=6)
        assert summarise(measured, {"ttft": 0.1}).good == 3
        assert summarise(measured, {"ttft": 0.1, "itl": 0.04}).good == 2
        assert summarise(measured, {"e2el": 10.0}).good == 6


class TestFailures:
    FAULTS = {
        "HTTP 429": Script(
            [(0.0, b'{"error": {"message": "queue full"}}')], 429, b"Content-Type: application/json\r\n"
        ),
        "not an event stream": Script([(0.0, b"<html>")], headers=b"Content-Type: text/html\r\n"),
        "closed early": Script([(0.0, text(" a"))]),
        "error event": Script([(0.0, text(" a") + event(error={"message": "out of blocks"}))]),
        "malformed event": Script([(0.0, b"data: {oops\n\n")]),
        "finish_reason error": Script([(0.0, text("", "error") + DONE)]),
    }

    @pytest.mark.parametrize("kind", FAULTS)
    def test_each_kind_is_counted_and_the_others_go_on(self, kind):
        report = report_of(lambda body: self.FAULTS[kind] if body["number"] % 3 == 0 else answer(2), count=7)
        assert {each: count for each, (count, _) in report.errors.items()} == {kind: 3}
        assert (report.completed, report.failed, report.output_tokens) == (4, 3, 8)
        assert all(spread.count == 4 for spread in report.latencies.values())

    def test_the_servers_words_are_kept(self):
        report = report_of(lambda body: self.FAULTS["HTTP 429"])
        assert "queue full" in report.errors["HTTP 429"][1]

    @pytest.mark.parametrize("sent", [text(" a"), text(" a", "stop"), b"data: {"])
    def test_a_cut_connection(self, sent):
        """The response is not whole, even where its last event was."""
        report = report_of(lambda body: Script([(0.0, sent)], whole=False))
        assert list(report.errors) == ["closed early"]

    def test_timeout(self):
        report = report_of(lambda body: answer(2, first=5.0 if body["number"] else 0.0), count=2, timeout=0.3)
        assert (report.completed, list(report.errors)) == (1, ["timeout"])
        assert report.seconds == seconds(0.3)

    def test_nobody_listens(self):
        async def scenario():
            async with ScriptedServer(lambda body: answer(1)) as server:
                pass
            return await load(server, 2)

        report = summarise(run(scenario()), {})
        assert (report.completed, report.errors["cannot connect"][0]) == (0, 2)

    def test_trial_request(self):
        async def scenario():
            async with ScriptedServer(lambda body: self.FAULTS["HTTP 429"]) as server:
                await warm_up(Target(server.url), [b"{}"])

        with pytest.raises(ValueError, match="queue f"):
            run(scenario())


class TestWhenRequestsLeave:
    def test_poisson(self):
        due = arrivals(20_000, 50.0, Random(1))
        gaps = [b - a for a, b in zip(due, due[1:], strict=False)]
        assert due[0] == 0.0
        assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
        assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.05)
        assert arrivals(20_000, 50.0, Random(1)) == due
        assert arrivals(3, math.inf, Random(1)) == [0.0, 0.0, 0.0]

    @pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
    def test_bad_rate(self, rate):
        with pytest.raises(ValueError, match=f"above 0, got {rate}"):
            arrivals(1, rate, Random(0))

    def test_a_slow_server_delays_nobody(self):
        """Open loop: all are under way at a time, and each left when it was due."""
        due = [0.01 * number for number in range(20)]
        server, measured = run_of(lambda body: answer(1, first=0.5), 20, due=due)
        assert server.most_open == 20
        start = measured.traces[0].due
        for trace, after in zip(measured.traces, due, strict=True):
            assert trace.due - start == seconds(after)
            assert trace.sent == seconds(trace.due)
        assert measured.seconds == seconds(0.19 + 0.5)

    def test_a_late_client_catches_up_and_says_so(self):
        """Held up for 0.3 s after the first answer."""

        def hold_up():
            if not held:
                held.append(asyncio.get_running_loop())
                held[0].now += 0.3

        held = []
        due = [0.0, *(0.1 + 0.02 * number for number in range(20))]
        _, measured = run_of(lambda body: answer(1), 21, due=due, done=hold_up)
        start = measured.traces[0].due
        assert [trace.due - start for trace in measured.traces] == [seconds(after) for after in due]
        assert [trace.woken - start for trace in measured.traces] == [0.0, *(seconds(max(0.3, t)) for t in due[1:])]
        told = " ".join(summarise(measured, {}).warnings)
        assert "requests left up to" in told and "the client's loop woke" in told

    def test_closed_loop(self):
        """Waiting for a place is not lateness."""
        server, measured = run_of(lambda body: answer(2, first=0.02, gap=0.01), 12, max_concurrency=3)
        assert server.most_open == 3
        assert summarise(measured, {}).completed == 12
        assert sorted(body["number"] for body in server.bodies) == list(range(12))
        assert [trace.woken for trace in measured.traces] == [seconds(trace.due) for trace in measured.traces]
        assert measured.seconds == seconds(4 * 0.03)

    def test_interrupted(self):
        """What was waited for counts."""

        async def some_of_it():
            async with ScriptedServer(lambda body: answer(1, first=30.0 * body["number"])) as server:
                task = asyncio.ensure_future(load(server, 2))
                await asyncio.sleep(0.3)
                task.cancel()
                return await task

        report = summarise(run(some_of_it()), {})
        assert (report.completed, list(report.errors), report.interrupted) == (1, ["interrupted"], True)
        assert report.seconds == seconds(0.3)


class TestEvents:
    LINES = b': hello\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b":\ndata: 2}\n\n\n' + "data: é\n\ndata: cut".encode()

    @given(st.lists(st.integers(0, len(LINES))))
    def test_cut_anywhere(self, cuts):
        reader, at = EventReader(), sorted({0, len(self.LINES), *cuts})
        pieces = [self.LINES[a:b] for a, b in zip(at, at[1:], strict=False)]
        found = [data for piece in pieces for data in reader.events(piece)]
        assert found == [b'{"a": 1}', b'{"b":\n2}', "é".encode()]


class TestPrompts:
    def test_lengths(self):
        questions = random_questions(200, Lengths(20, 10, 0.5), Random(3))
        words = [len(question.prompt.split()) for question in questions]
        tokens = [question.max_tokens for question in questions]
        assert (min(words), max(words)) == (10, 30) and (min(tokens), max(tokens)) == (5, 15)
        assert random_questions(200, Lengths(20, 10, 0.5), Random(3)) == questions
        assert random_questions(1, Lengths(20, 10), Random(4))[0].prompt != questions[0].prompt

    def test_shared_beginning(self):
        first, second = random_questions(2, Lengths(5, 1, shared=30), Random(0))
        assert first.prompt.split()[:30] == second.prompt.split()[:30]
        assert first.prompt != second.prompt and len(first.prompt.split()) == 35

    @pytest.mark.parametrize("wrong", [{"prompt": 0}, {"answer": 0}, {"shared": -1}, {"spread": 1.0}])
    def test_bad_lengths(self, wrong):
        with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
            Lengths(**wrong)

    def test_dataset(self, tmp_path):
        path = tmp_path / "asked.jsonl"
        rows = [
            '{"prompt": "One\u2028line"}',
            "",
            '{"messages": [{"role": "user", "content": "é"}], "max_tokens": 7}',
            "",
        ]
        path.write_text("\n".join(rows), encoding="utf-8")
        one, two = read_questions(path, None, 9)
        assert (one.prompt, one.max_tokens, two.max_tokens) == ("One\u2028line", 9, 7)
        assert one.body(chat=True)["messages"] == [{"role": "user", "content": "One\u2028line"}]
        with pytest.raises(ValueError, match="messages go to"):
            bodies([two], False, {})
        with pytest.raises(ValueError, match="2 prompts, asked for 3"):
            read_questions(path, 3, 9)

    @pytest.mark.parametrize("line", ["{", "[]", '{"prompt": 3}', '{"prompt": ""}', '{"prompt": "a", "max_tokens": 0}'])
    def test_bad_line(self, tmp_path, line):
        path = tmp_path / "asked.jsonl"
        path.write_text(f'{{"prompt": "good"}}\n{line}\n', encoding="utf-8")
        with pytest.raises(ValueError, match="asked.jsonl, prompt 2"):
            read_questions(path, None, 9)


class TestOptions:
    @pytest.mark.parametrize("wrong", ["ttft", "ttft:", "ttft:0", "speed:3", "itl:-1", "itl:nan"])
    def test_bad_goal(self, wrong):
        with pytest.raises(ValueError, match=f"got '{wrong}'"):
            read_goals([wrong])

    def test_goals(self):
        assert read_goals(["ttft:200", "itl:50"]) == {"ttft": 0.2, "itl": 0.05}

    @pytest.mark.parametrize("wrong", ["", "101", "50,x", "-1", "nan"])
    def test_bad_percentiles(self, wrong):
        with pytest.raises(ValueError, match=f"got '{wrong}'"):
            read_percentiles(wrong)

    def test_urls(self):
        for base in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
            assert Target(base).url("/v1/completions") == "http://h:1/v1/completions"
        assert Target("http://h:1/v1").url("/completions") == "http://h:1/v1/completions"
        with pytest.raises(ValueError, match="got 'h:1'"):
            Target("h:1")
        with pytest.raises(ValueError, match="got '/v1/embeddings'"):
            Target(endpoint="/v1/embeddings")
