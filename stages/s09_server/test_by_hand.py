"""By hand, as in the lessons: a step's message, its way to text and back, the engine's loop, a reader who is late.

No model, no process and no socket.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from stages.s01_forward.outputs import SampledToken, TokenEvent, TokenLogprob
from stages.s01_forward.sampling_params import SamplingParams
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.engine import Engine
from stages.s04_continuous_batching.scheduler import Scheduler
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s07_cuda_graph.ahead_scheduler import AheadScheduler
from stages.s07_cuda_graph.overlap_engine import OverlapEngine
from stages.s09_server.answer_stream import AnswerStream
from stages.s09_server.answers import Answers, generations_of
from stages.s09_server.dry_run import DryRunner
from stages.s09_server.engine_loop import EngineLoop
from stages.s09_server.engine_process import serve
from stages.s09_server.messages import (
    Abort,
    Add,
    AnswerEvent,
    AskStatus,
    Begun,
    EngineStats,
    Status,
    Step,
    Stop,
    decode_from_engine,
    encode,
)

EOS = 0
WORDS = ("", "Hi", "!", "\n", "User", ":", " How", " are you?")  # by token id


def score(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -0.5, 1, ())


def add(first: int, *, n: int = 1, stream: int | None = None, limit: int = 20, prompt: int = 3, **wishes) -> Add:
    params = SamplingParams(n=n, **wishes)
    return Add(first if stream is None else stream, first, [9] * prompt, params, [7] * n, limit)


def step(*columns: tuple[int, int], begun=(), errors=None, logprobs=None, complete=()) -> Step:
    answers, tokens = [answer for answer, _ in columns], [token for _, token in columns]
    return Step(answers, tokens, logprobs or {}, list(begun), errors or {}, EngineStats(), list(complete))


# ---- the lesson's examples -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ahead", "in_vain"), [(1, 2), (0, 1)], ids=["overlapped", "one after the other"])
def test_what_is_computed_in_vain(ahead, in_vain):
    """A stop string is seen by the other side, and its abort arrives while the next step runs.

    Rows from the one that made the last token of the answer on are of no use to anybody.
    """
    story = [1, 2, 3, 4, 5, 6, 7, 6, 7, 6, 7]
    scheduler, runner = AheadScheduler(PagedCache(9, 4), SwapSpace(0), 4, 64), DryRunner(story, 0.0)
    loop, answers = EngineLoop(OverlapEngine(scheduler, runner, ahead), [EOS]), Answers()
    planned, execute = [], runner.execute
    runner.execute = lambda plan: (planned.append(plan.num_tokens), execute(plan))[1]
    message = add(8, stop=("\nUser:",))
    loop.take(answers.add(message, generations_of(message, [EOS], Tokenizer())))

    told, mail = [], []
    while loop.has_work:
        aborts, mail = mail, []
        news = loop.step()  # what was sent during the last step is read after this one began
        events, surplus = answers.take(news)
        told += [(WORDS[token], [event.text for event in events]) for token in news.tokens]
        for abort in aborts:
            loop.take(abort)
        mail = [Abort(surplus)] if surplus else []

    assert told == [("Hi", ["Hi"]), ("!", ["!"]), ("\n", [""]), ("User", [""]), (":", [""]), (" How", [])]
    rows = [count for count in planned if count]
    assert rows == [3] + [1] * (len(rows) - 1), "the prompt, then a token at a time"
    assert len(rows) - 5 == in_vain
    assert scheduler.cache.pool.num_free == 8


def test_the_size_of_a_step():
    """64 tokens in one message, and in 64."""
    stats = EngineStats(64, 10, 4000, 8000, 3, 120_000, 60_000, 0, 0, 52_000, 3_000_000)
    answers, tokens = list(range(1000, 1064)), list(range(50_000, 50_064))
    whole = len(encode(Step(answers, tokens, {}, [], {}, stats)))
    single = sum(len(encode(Step([a], [t], {}, [], {}, stats))) for a, t in zip(answers, tokens, strict=True))
    assert 400 < whole < 500 and 2900 < single < 3300


# ---- 09.1: a step's news as one message ------------------------------------------------------------------------------


class TestReport:
    @pytest.fixture
    def loop(self) -> EngineLoop:
        """8 blocks of 4 tokens, beside the dummy; nobody steps it, events are made by hand."""
        return EngineLoop(Engine(Scheduler(PagedCache(9, 4), SwapSpace(0), 4, 64), None), [EOS])

    @staticmethod
    def event(loop: EngineLoop, answer: int, token: int, logprob: TokenLogprob | None = None, complete: bool = False):
        """What the engine tells of a token: how the answer went on is decided by its generation."""
        request = loop.requests[answer]
        return request, request.generation.append(SampledToken(token, logprob), complete)

    def test_tokens_are_columns(self, loop):
        """Two prompts, the first with two answers. The engine tells them in the order of its rows."""
        loop.take(add(4, n=2))
        loop.take(add(6))
        told = loop.report([self.event(loop, answer, token) for answer, token in ((4, 11), (6, 13), (5, 12))])
        assert (told.answers, told.tokens) == ([4, 6, 5], [11, 13, 12])
        assert (told.logprobs, told.errors, loop.tokens) == ({}, {}, 3)

    def test_a_beginning_is_told_once(self, loop):
        loop.take(add(4))
        loop.requests[4].num_cached_tokens = 2
        first = loop.report([self.event(loop, 4, 11)])
        second = loop.report([self.event(loop, 4, 12)])
        assert (first.begun, second.begun) == ([Begun(4, 2, None)], [])

    def test_several_tokens_of_one_answer(self, loop):
        """Guesses that stood (stage 08): three tokens of one step, each with its own score, told by place."""
        loop.take(add(4))
        loop.take(add(5, logprobs=0))
        other, events = self.event(loop, 4, 21), [self.event(loop, 5, token, score(token)) for token in (11, 12)]
        told = loop.report([other, *events])
        assert (told.answers, told.tokens) == ([4, 5, 5], [21, 11, 12])
        assert told.logprobs == {1: score(11), 2: score(12)}
        told = loop.report([self.event(loop, 5, 13, score(13))])
        assert told.logprobs == {0: score(13)}

    def test_who_has_ended_is_forgotten(self, loop):
        loop.take(add(4, limit=1, logprobs=0))
        loop.take(add(5))
        told = loop.report([self.event(loop, 4, 11, score(11)), self.event(loop, 5, 12)])
        assert (told.answers, told.tokens) == ([4, 5], [11, 12])
        assert (list(loop.requests), loop.not_begun, loop.scored) == ([5], {}, {})

    def test_an_error_is_no_token(self, loop):
        loop.take(add(4))
        loop.take(add(5))
        request = loop.requests[4]
        told = loop.report([(request, request.generation.fail("out of memory")), self.event(loop, 5, 12)])
        assert (told.answers, told.tokens, told.errors) == ([5], [12], {4: "out of memory"})
        assert (list(loop.requests), loop.tokens) == ([5], 1)

    def test_where_a_grammar_is_complete(self, loop):
        """The one end that does not follow from the tokens: no further one is allowed. Others have ended otherwise."""
        for answer, limit in ((4, 20), (5, 20), (6, 1), (7, 20)):
            loop.take(add(answer, limit=limit))
        events = [self.event(loop, 4, 11), self.event(loop, 5, EOS), self.event(loop, 6, 12)]
        told = loop.report([*events, self.event(loop, 7, 13, complete=True)])
        assert (told.answers, told.complete) == ([4, 5, 6, 7], [3])
        assert loop.report([self.event(loop, 4, 14, complete=True)]).complete == [0]

    def test_who_can_never_run_is_told_so_once(self, loop):
        """A prompt of 40 tokens, and a pool of 32."""
        loop.take(add(4, prompt=40))
        assert loop.has_work
        first, second = loop.report([]), loop.report([])
        assert list(first.errors) == [4] and "there are 8" in first.errors[4]
        assert (second.errors, loop.has_work) == ({}, False)

    def test_who_wants_no_token_ends_with_its_prompt(self, loop):
        loop.take(add(4, limit=0, prompt_logprobs=0))
        assert loop.report([]).begun == [], "its prompt has not been computed"
        request = loop.requests[4]
        request.prompt_logprobs += [score(9), score(9)]
        request.state = "finished"
        told = loop.report([])
        assert told.begun == [Begun(4, 0, [None, score(9), score(9)])]
        assert (told.tokens, loop.requests) == ([], {})
        assert loop.report([]).begun == []

    def test_events_are_told_by_the_first_number_and_the_index(self, loop):
        """Also when the prompt's first answer has ended before."""
        loop.take(add(4, n=3))
        loop.take(Abort([4]))
        request = loop.requests[6]
        told = loop.report([(request, TokenEvent(4, 2, 11, "", None))])
        assert told.answers == [6]


# ---- 09.2: from tokens to text, and back to aborts -------------------------------------------------------------------


class Tokenizer:
    """What a text stream needs of one."""

    def token_bytes(self, token_id: int) -> bytes:
        return WORDS[token_id].encode()


def following(*messages: Add) -> Answers:
    answers = Answers()
    for message in messages:
        answers.add(message, generations_of(message, [EOS], Tokenizer()))
    return answers


def brief(events: Sequence[AnswerEvent]) -> list[tuple[int, list[int], str, str | None]]:
    return [(event.answer, event.token_ids, event.text, event.finish_reason) for event in events]


class TestTake:
    def test_a_stop_string_across_tokens(self):
        """The lesson's example: what may become the stop string is held back, and the answer ends before it."""
        answers = following(add(8, stop=("\nUser:",)))
        told = []
        for token in (1, 2, 3, 4):
            events, surplus = answers.take(step((8, token)))
            told += brief(events)
            assert surplus == []
        assert told == [(0, [1], "Hi", None), (0, [2], "!", None), (0, [3], "", None), (0, [4], "", None)]
        (event,), surplus = answers.take(step((8, 5)))
        assert (event.token_ids, event.text, event.finish_reason, event.stop_reason) == ([5], "", "stop", "\nUser:")
        assert (surplus, answers.open) == ([8], {})
        assert answers.take(step((8, 6))) == ([], []), "a token that was on its way"

    def test_what_was_held_back_for_nothing_comes_later(self):
        answers = following(add(8, stop=("\nUser:",)))
        answers.take(step((8, 3)))
        assert brief(answers.take(step((8, 6)))[0]) == [(0, [6], "\n How", None)]

    def test_the_engine_knows_of_all_other_ends(self):
        """EOS, a stop token, the cap: nothing to abort."""
        answers = following(add(1), add(2, stop_token_ids=(5,)), add(3, limit=1))
        events, surplus = answers.take(step((1, EOS), (2, 5), (3, 1)))
        assert brief(events) == [(0, [EOS], "", "stop"), (0, [5], "", "stop"), (0, [1], "Hi", "length")]
        assert [event.stop_reason for event in events] == [EOS, 5, None]
        assert (surplus, answers.open) == ([], {})

    def test_each_answer_goes_by_its_number_within_the_stream(self):
        """A stream of two prompts: the engine's numbers are 20 to 22, the stream's 0 to 2."""
        answers = following(add(20, n=2), add(22, stream=20, stop=("!",)))
        events, surplus = answers.take(step((22, 1), (20, 6), (21, 6)))
        assert [(event.stream, event.answer) for event in events] == [(20, 2), (20, 0), (20, 1)]
        events, surplus = answers.take(step((22, 2)))
        assert (events[0].answer, surplus) == (2, [22])

    def test_nobody_is_told_of_an_answer_that_was_dropped(self):
        answers = following(add(4), add(5))
        assert answers.drop([4, 4, 77]) == [4]
        events, surplus = answers.take(step((4, 1), (5, 1), begun=[Begun(4, 0, None)], errors={4: "too late"}))
        assert (brief(events), surplus) == ([(0, [1], "Hi", None)], [])

    def test_a_run_of_tokens_ends_where_the_text_does(self):
        """Three tokens of one step (stage 08); the second completes a stop string, the third is nobody's."""
        answers = following(add(4, stop=("!",)))
        events, surplus = answers.take(step((4, 1), (4, 2), (4, 6)))
        assert brief(events) == [(0, [1], "Hi", None), (0, [2], "", "stop")]
        assert surplus == [4]

    def test_what_is_known_at_the_beginning_comes_with_the_first_event(self):
        answers = following(add(4))
        events, _ = answers.take(step((4, 1), (4, 2), begun=[Begun(4, 16, [None])]))
        assert [event.num_cached_tokens for event in events] == [16, 0]
        assert [event.prompt_logprobs for event in events] == [[None], None]

    def test_who_wants_no_token_has_one_event(self):
        answers = following(add(4, limit=0, prompt_logprobs=0))
        (event,), surplus = answers.take(step(begun=[Begun(4, 0, [None, score(9)])]))
        assert (event.token_ids, event.finish_reason, event.prompt_logprobs) == ([], "length", [None, score(9)])
        assert (surplus, answers.open) == ([], {})

    def test_an_answer_ends_where_its_grammar_is_complete(self):
        """Told by place; the engine knows."""
        answers = following(add(4), add(5))
        events, surplus = answers.take(step((4, 1), (5, 6), complete=[1]))
        assert brief(events) == [(0, [1], "Hi", None), (0, [6], " How", "stop")]
        assert (events[1].stop_reason, surplus, list(answers.open)) == (None, [], [4])

    def test_who_fails_before_its_first_token_has_one_end(self):
        """It wants its prompt scored and no token, and the step that computes it fails."""
        answers = following(add(4, limit=0, prompt_logprobs=0))
        (event,), surplus = answers.take(step(begun=[Begun(4, 8, None)], errors={4: "out of memory"}))
        assert (event.finish_reason, event.error, event.num_cached_tokens) == ("error", "out of memory", 8)
        assert (surplus, answers.open) == ([], {})

    def test_scores_by_place(self):
        answers = following(add(4), add(5, logprobs=0))
        events, _ = answers.take(step((4, 1), (5, 1), (5, 2), logprobs={1: score(1), 2: score(2)}))
        assert [event.logprobs for event in events] == [[], [score(1)], [score(2)]]

    def test_an_error_ends_the_answer_and_keeps_its_text(self):
        """Held back, because it may have become a stop string: now it will not."""
        answers = following(add(4, stop=("\nUser:",)))
        answers.take(step((4, 3)))
        (event,), surplus = answers.take(step(errors={4: "out of memory"}))
        assert (event.token_ids, event.text, event.finish_reason, event.error) == ([], "\n", "error", "out of memory")
        assert (surplus, answers.open) == ([], {})


# ---- 09.3: the engine's loop -----------------------------------------------------------------------------------------


class Script:
    """A loop whose work is counted in steps. With each step, and whenever somebody waits, the next batch arrives."""

    def __init__(self, *batches: list) -> None:
        first, *rest = batches
        self.arrived, self.coming = list(first), rest
        self.steps_left, self.log = 0, []

    @property
    def has_work(self) -> bool:
        return self.steps_left > 0

    def take(self, message) -> None:
        self.log.append(type(message).__name__)
        if isinstance(message, Add):
            self.steps_left = max(self.steps_left, message.token_limit)

    def step(self) -> Step:
        assert self.has_work, "a step without work"
        self.steps_left -= 1
        self.log.append("step")
        self.arrived += self.coming.pop(0) if self.coming else []
        return step((1, 1))

    def status(self, *_) -> dict:
        self.log.append("status")
        return {}

    def receive(self, wait: bool) -> bytes | None:
        assert len(self.log) < 40, "round and round"
        if not self.arrived and not wait:
            self.log.append("nothing")
            return None
        if not self.arrived:
            assert not self.has_work, "waits although somebody counts on a step"
            self.log.append("waits")
            self.arrived += self.coming.pop(0)
        return encode(self.arrived.pop(0))

    def run(self) -> list[str]:
        """What happened, in this order; looking whether something has come, in vain, is left out."""
        self.sent = []
        serve(self, self.receive, lambda frame: self.sent.append(decode_from_engine(frame)))
        return [what for what in self.log if what != "nothing"]


class TestServe:
    def test_all_that_has_come_counts_for_the_next_step(self):
        script = Script([add(1, limit=2), add(2, limit=2), Abort([1])], [add(3, limit=2)], [], [Stop()])
        assert script.run() == ["Add", "Add", "Abort", "step", "Add", "step", "step"]
        assert script.sent == [step((1, 1))] * 3, "one message for each step"

    def test_it_steps_on_while_nobody_says_anything(self):
        script = Script([add(1, limit=3)], [], [], [], [Stop()])
        assert script.run() == ["Add", "step", "step", "step", "waits"]

    def test_without_work_it_waits_and_does_not_step(self):
        assert Script([], [Abort([7])], [Abort([8])], [Stop()]).run() == ["waits", "Abort", "waits", "Abort", "waits"]

    def test_it_never_goes_round_without_work(self):
        """Who finds nothing, and has nothing to do, waits next."""
        script = Script([Abort([7])], [add(1, limit=1)], [], [Stop()])
        script.run()
        assert ("nothing", "nothing") not in pairwise(script.log)

    def test_stop_means_now(self):
        script = Script([add(1, limit=5), Stop(), add(2, limit=5)], [], [])
        assert script.run() == ["Add"]
        assert script.sent == []

    def test_a_status_is_told_between_two_steps(self):
        script = Script([add(1, limit=2)], [AskStatus()], [Stop()])
        assert script.run() == ["Add", "step", "status", "step"]
        assert [type(message) for message in script.sent] == [Step, Status, Step]

    def test_a_status_needs_no_work(self):
        script = Script([AskStatus()], [Stop()])
        assert script.run() == ["status", "waits"]
        assert [type(message) for message in script.sent] == [Status]


# ---- 09.4: a reader who is late --------------------------------------------------------------------------------------


def news(answer: int, token: int, text: str, finish_reason: str | None = None, **more) -> AnswerEvent:
    return AnswerEvent(4, answer, [token], text, finish_reason=finish_reason, **more)


def stream(num_answers: int = 1, forget: Callable[[AnswerStream], object] = lambda _: None) -> AnswerStream:
    return AnswerStream(range(4, 4 + num_answers), forget)


def soon(coroutine):
    """Its result; what waits for ever fails."""

    async def timed():
        return await asyncio.wait_for(coroutine, 2.0)

    return asyncio.run(timed())


class TestNext:
    def test_news_that_are_there(self):
        it = stream()
        it.put(news(0, 1, "Hi"))
        assert soon(it.next()) == [news(0, 1, "Hi")]
        assert it.pending == []

    def test_it_waits_for_news(self):
        it = stream()

        async def both():
            reader = asyncio.create_task(it.next())
            for _ in range(20):
                await asyncio.sleep(0)
                assert not reader.done()
            it.put(news(0, 1, "Hi"))
            return await reader

        assert soon(both()) == [news(0, 1, "Hi")]

    def test_waiting_costs_nothing(self):
        """The loop sleeps meanwhile: no turn of it is taken by who waits."""
        it, turns = stream(), []

        async def both():
            loop = asyncio.get_running_loop()
            reader = asyncio.create_task(it.next())
            await asyncio.sleep(0.01)
            call_soon = loop.call_soon
            loop.call_soon = lambda *call, **context: (turns.append(call), call_soon(*call, **context))[1]
            await asyncio.sleep(0.05)
            loop.call_soon = call_soon
            it.put(news(0, 1, "Hi", "stop"))
            return await reader

        soon(both())
        assert len(turns) < 5

    def test_a_late_reader_finds_all_of_it_merged(self):
        """Three steps have gone by: one event has what three would have had."""
        it = stream()
        it.put(news(0, 1, "Hi", logprobs=[score(1)], num_cached_tokens=16))
        it.put(news(0, 2, "!", logprobs=[score(2)]))
        it.put(news(0, EOS, "", "stop", logprobs=[score(EOS)], stop_reason=EOS))
        (event,) = soon(it.next())
        assert (event.token_ids, event.text) == ([1, 2, EOS], "Hi!")
        assert event.logprobs == [score(1), score(2), score(EOS)]
        assert (event.finish_reason, event.stop_reason, event.num_cached_tokens) == ("stop", EOS, 16)

    def test_one_event_for_each_answer(self):
        it = stream(2)
        for token, text in ((1, "Hi"), (2, "!")):
            it.put(news(1, token, text))
            it.put(news(0, token, text))
        assert [(event.answer, event.text) for event in soon(it.next())] == [(1, "Hi!"), (0, "Hi!")]
        assert it.pending == []

    def test_the_end_comes_after_the_last_news(self):
        it = stream(2)
        it.put(news(0, 1, "Hi", "length"))
        it.put(news(1, 1, "Hi", "length"))
        assert [event.finish_reason for event in soon(it.next())] == ["length", "length"]
        assert soon(it.next()) == []
        assert soon(it.next()) == []

    def test_it_goes_on_until_every_answer_has_ended(self):
        it = stream(2)
        it.put(news(0, 1, "Hi", "stop"))

        async def both():
            first = await it.next()
            reader = asyncio.create_task(it.next())
            await asyncio.sleep(0)
            it.put(news(1, 2, "!", "stop"))
            return first, await reader, await it.next()

        assert soon(both()) == ([news(0, 1, "Hi", "stop")], [news(1, 2, "!", "stop")], [])

    def test_an_abort_wakes_the_reader(self):
        it = stream()

        async def both():
            reader = asyncio.create_task(it.next())
            await asyncio.sleep(0)
            it.abort()
            return await reader

        assert soon(both()) == []

    def test_only_one_may_wait(self):
        """A second one would take the first one's place; it is told so, and the first goes on waiting."""
        it = stream()

        async def both():
            reader = asyncio.create_task(it.next())
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError):
                await it.next()
            it.put(news(0, 1, "Hi"))
            return await reader

        assert soon(both()) == [news(0, 1, "Hi")]

    def test_who_gave_up_waiting_may_come_again(self):
        it = stream()

        async def twice():
            reader = asyncio.create_task(it.next())
            await asyncio.sleep(0)
            reader.cancel()
            await asyncio.wait([reader])
            it.put(news(0, 1, "Hi"))
            return await it.next()

        assert soon(twice()) == [news(0, 1, "Hi")]
