"""asyncio's face of the engine: in a thread, in a process, in two; and all the ways in which one may go."""

import asyncio
import gc
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs

from stages.s01_forward.inputs import RequestBuilder
from stages.s01_forward.sampling_params import SamplingParams
from stages.s09_server import engine_process, loop_link
from stages.s09_server.answer_stream import AnswerStream, EngineDied, merged
from stages.s09_server.async_llm import AsyncLLM
from stages.s09_server.dry_run import DryLLM
from stages.s09_server.engine_process import EngineSettings
from stages.s09_server.messages import AnswerEvent
from stages.s09_server.rigged_engine import GARBAGE, ready, step
from stages.s09_server.test_link import ends, open_files

LONG = SamplingParams(max_tokens=200, ignore_eos=True)
HOWS = ("thread", "process", "text process")
Run = Callable[[Coroutine[Any, Any, Any]], Any]


def dry(folder: Path, step_ms: float = 0.0, **options: Any) -> EngineSettings:
    return EngineSettings(str(folder), {"device": "cpu", **options}, dry_run=True, dry_run_step_ms=step_ms)


@pytest.fixture(scope="module")
def run(dry_engines) -> Run:
    """Runs a coroutine in the engines' event loop; what does not come to an end fails."""
    runner, _ = dry_engines
    return lambda coroutine: runner.run(asyncio.wait_for(coroutine, 120.0))


@pytest.fixture(scope="module")
def starting(dry_engines) -> dict[str, asyncio.Task[AsyncLLM]]:
    """The same dry engine in three ways. The processes take seconds: those who want them come last in this file."""
    return dry_engines[1]


@pytest.fixture(scope="module")
def llm(starting) -> AsyncLLM:
    """The quick one."""
    return starting["thread"].result()


@pytest.fixture(scope="module")
def llms(starting, run) -> dict[str, AsyncLLM]:
    """All three."""

    async def started() -> dict[str, AsyncLLM]:
        return {how: await task for how, task in starting.items()}

    return run(started())


@pytest.fixture
def rigged(run, monkeypatch, tmp_path) -> Iterator[Callable[..., AsyncLLM]]:
    """`rigged(what)` starts a process that does that; in the end nothing is left of it."""
    monkeypatch.setattr(loop_link, "ENGINE", "stages.s09_server.rigged_engine")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made: list[AsyncLLM] = []

    async def start(what: str) -> AsyncLLM:
        made.append(AsyncLLM(EngineSettings(what), in_process=False, text_process=False))
        await made[-1].launch()
        return made[-1]

    yield start
    for it in made:
        run(it.close())
        assert it.link.link.process.poll() is not None
        assert (it.streams, it.answers.open, it.num_open) == ({}, {}, 0)
    assert list(tmp_path.iterdir()) == []


def open_one(llm: AsyncLLM, prompt: Any = "Hello", params: SamplingParams = LONG) -> AnswerStream:
    return llm.open(llm.requests.build([prompt], params))


async def read(stream: AnswerStream) -> list[AnswerEvent]:
    """All of it, one event for each answer."""
    events: list[AnswerEvent] = []
    while news := await stream.next():
        events += news
    return sorted(merged(events), key=lambda event: event.answer)


async def settles(llm: AsyncLLM) -> None:
    """Nothing is open, and soon nothing runs."""
    assert (llm.num_open, llm.streams, llm.answers.open) == (0, {}, {})
    while llm.stats.running or llm.stats.waiting or llm.stats.kv_blocks_used:
        await asyncio.sleep(0.001)


# ---- readers ---------------------------------------------------------------------------------------------------------


def test_a_reader_who_never_reads_is_in_nobodys_way(llm, run):
    async def ask() -> None:
        late, prompt = open_one(llm), open_one(llm)
        (answer,) = await read(prompt)
        while late.left:
            await asyncio.sleep(0.001)
        await settles(llm)
        (event,) = await late.next()
        assert (event.token_ids, event.text, event.finish_reason) == (answer.token_ids, answer.text, "length")
        assert await late.next() == []

    run(ask())


def test_a_task_that_is_cancelled_while_it_waits(llm, run):
    """Nothing is lost: the next one goes on."""

    async def ask() -> None:
        stream, events = open_one(llm), []
        while stream.left or stream.pending:
            task = asyncio.create_task(stream.next())
            await asyncio.sleep(0)
            if task.cancel():
                assert (await asyncio.gather(task, return_exceptions=True))[0] is not None
            if not task.cancelled():
                events += task.result()
            await asyncio.sleep(0.001)
        (event,) = merged(events)
        assert event.token_ids == (await read(open_one(llm)))[0].token_ids

    run(ask())


def test_only_one_task_may_wait(llm, run):
    async def ask() -> None:
        stream = AnswerStream(range(1), lambda stream: None)
        first = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task"):
            await stream.next()
        stream.put(AnswerEvent(0, 0, [1], "x", finish_reason="stop"))
        assert [event.text for event in await first] == ["x"]
        assert await stream.next() == []

    run(ask())


def test_an_abort(llm, run):
    """Once, twice, after the end: nothing comes any more, and the blocks are free at once. Nobody else notices."""

    async def ask() -> None:
        stream, other = open_one(llm, params=replace(LONG, n=3)), open_one(llm)
        await stream.next()
        stream.abort()
        stream.abort()
        assert (await stream.next(), stream in llm.streams.values()) == ([], False)
        assert len((await read(other))[0].token_ids) == 200
        other.abort()
        await settles(llm)

    run(ask())


def test_leaving_a_loop_over_an_answer_aborts_it(llm, run):
    async def ask() -> None:
        async for event in llm.generate("Hello", LONG):
            assert event.token_ids
            break
        gc.collect()
        while llm.num_open:  # the loop closes what nobody goes on with
            await asyncio.sleep(0)
        await settles(llm)
        whole = [event async for event in llm.generate("Hello", replace(LONG, max_tokens=5))]
        assert len(merged(whole)[0].token_ids) == 5
        with pytest.raises(ValueError, match="empty"):
            await anext(llm.generate(""))

    run(ask())


# ---- what is not queued ----------------------------------------------------------------------------------------------


def test_no_prompts_are_a_stream_that_has_ended(llm, run):
    """And it is not taken for the next one, whose number is the same."""

    async def ask() -> None:
        nothing = llm.open([])
        stream = open_one(llm, params=replace(LONG, max_tokens=3))
        nothing.abort()
        assert await nothing.next() == []
        assert len((await read(stream))[0].token_ids) == 3
        await settles(llm)

    run(ask())


def test_what_cannot_be_sent_is_refused_whole(llm, run):
    async def ask() -> None:
        good, bad = SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, cache_salt="\ud83d")
        number = llm.next_number
        with pytest.raises(ValueError, match="surrogates"):
            llm.open(llm.requests.build(["a", "b"], [good, bad]))
        assert llm.next_number == number
        await settles(llm)
        assert (await read(open_one(llm, params=good)))[0].finish_reason == "length"

    run(ask())


# ---- steps that fail -------------------------------------------------------------------------------------------------


@pytest.fixture
def failing(run, tiny, monkeypatch) -> Iterator[tuple[AsyncLLM, list[Exception]]]:
    """An engine whose next steps raise what is in the list. Until one has, each takes 20 ms; then no time."""
    errors: list[Exception] = []

    def make(settings: EngineSettings) -> DryLLM:
        made = DryLLM(settings.model, step_ms=settings.dry_run_step_ms, **settings.options)
        execute = made.engine.runner.execute

        def run_or_fail(plan: Any) -> Any:
            if errors:
                made.engine.runner.step_seconds = 0.0
                raise errors.pop()
            return execute(plan)

        made.engine.runner.execute = run_or_fail
        return made

    monkeypatch.setattr(engine_process, "make_llm", make)
    started = run(AsyncLLM.start(dry(tiny("qwen2"), 20.0, max_num_seqs=2), in_process=True))
    yield started, errors
    run(started.close())


def test_a_step_that_fails(failing, run):
    """Two run, one waits, one is on its way; then one more. ml-explore/mlx-lm#1909."""
    llm, errors = failing

    async def ask() -> None:
        streams = [open_one(llm) for _ in range(3)]
        for stream in streams[:2]:
            await stream.next()
        errors.append(MemoryError("no room"))
        streams.append(open_one(llm))
        first, second, *others = [event for (event,) in await asyncio.gather(*map(read, streams))]
        assert {event.error for event in (first, second)} == {"MemoryError: no room"}
        assert [event.finish_reason for event in others] == ["length", "length"]
        assert (await read(open_one(llm)))[0].finish_reason == "length"
        assert (llm.alive, llm.stats.failed_steps) == (True, 1)
        await settles(llm)

    run(ask())


def test_steps_that_fail_one_after_the_other(failing, run):
    """It is the end, for all; and it can be started again."""
    llm, errors = failing

    async def ask() -> None:
        errors.extend([MemoryError("no room")] * 3)
        streams = [open_one(llm) for _ in range(8)]
        events = [event for (event,) in await asyncio.gather(*map(read, streams))]
        assert [event.finish_reason for event in events] == ["error"] * 8
        assert {event.error for event in events} == {"MemoryError: no room"}
        assert (llm.alive, llm.death, llm.stats.running) == (False, "MemoryError: no room", 0)
        with pytest.raises(EngineDied, match="no room"):
            open_one(llm)
        with pytest.raises(EngineDied, match="no room"):
            await llm.status()
        number = llm.next_number
        await llm.launch()
        stream = open_one(llm, params=replace(LONG, max_tokens=5))
        assert stream.numbers.start == number, "numbers are never used twice"
        assert (await read(stream))[0].finish_reason == "length"
        await settles(llm)

    run(ask())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_without_a_word(run, monkeypatch):
    """Some library calls `sys.exit`."""
    monkeypatch.setattr(engine_process, "make_llm", lambda settings: sys.exit(1))
    with pytest.raises(EngineDied, match="thread has ended"):
        run(AsyncLLM.start(EngineSettings("any"), in_process=True))


# ---- processes that go -----------------------------------------------------------------------------------------------


def test_who_cannot_start_says_why(rigged, run):
    with pytest.raises(EngineDied, match="there is no such model") as raised:
        run(rigged("says why"))
    assert not raised.value.fault
    with pytest.raises(EngineDied, match="exit code 3") as raised:
        run(rigged("leaves"))
    assert raised.value.fault


def test_an_engine_that_is_killed_while_it_starts(run, monkeypatch):
    monkeypatch.setattr(loop_link, "ENGINE", "stages.s09_server.rigged_engine")

    async def ask() -> None:
        llm = AsyncLLM(EngineSettings("never ready"), in_process=False, text_process=False)
        starting = asyncio.create_task(llm.launch())
        await asyncio.sleep(0)
        with pytest.raises(EngineDied, match="being started"):
            llm.open([])
        llm.link.link.process.kill()
        with pytest.raises(EngineDied, match="exit code"):
            await starting
        with pytest.raises(EngineDied, match="exit code"):
            llm.open([])

    run(ask())


def test_a_model_that_is_not_there(run, tmp_path, tiny):
    """In the engine's own words, and no fault of ours; an option that is none, likewise."""
    for settings, words in (
        (EngineSettings(str(tmp_path), dry_run=True), "config.json"),
        (dry(tiny("qwen2"), max_model_len=10**6), "max_model_len.*256"),
        (dry(tiny("qwen2"), max_num_sheep=3), "max_num_sheep"),
    ):
        with pytest.raises(EngineDied, match=words) as raised:
            run(AsyncLLM.start(settings, in_process=True))
        assert not raised.value.fault
    with pytest.raises(TypeError):
        run(AsyncLLM.start(EngineSettings(options={"device": object()}), in_process=True))


@pytest.mark.parametrize("what", ["ready and gone", "ready and dead"])
def test_a_death_right_after_the_start(what, rigged, run):
    """Noticed, whatever comes first: nobody waits for ever for an engine that is gone."""

    async def ask() -> None:
        try:
            llm = await rigged(what)
            (event,) = await read(open_one(llm, [5]))
            assert event.finish_reason == "error"
        except EngineDied as error:
            assert "out of memory" in str(error) or "exit code 5" in str(error)

    run(ask())


def test_nothing_is_heard_of_an_engine_that_was_given_up(rigged, run):
    """Neither that it is ready, nor how many run."""

    async def ask() -> None:
        llm = await rigged("serves")
        llm.receive(GARBAGE)
        llm.receive(ready())
        llm.receive(step(0, 7))
        assert (llm.alive, llm.stats.running, llm.stats.tokens) == (False, 0, 0)
        with pytest.raises(EngineDied, match="not understood"):
            open_one(llm, [5])

    run(ask())


def test_a_death_while_the_tokenizer_is_read(rigged, run, monkeypatch):
    """It was ready, and is not any more: then it was not started."""
    prepare = AsyncLLM.prepare

    async def slowly(llm: AsyncLLM) -> None:
        while llm.settings.model == dies and llm.death is None:  # others may be starting meanwhile
            await asyncio.sleep(0.01)
        await prepare(llm)

    dies = "ready and dead"
    monkeypatch.setattr(AsyncLLM, "prepare", slowly)
    with pytest.raises(EngineDied, match="out of memory"):
        run(rigged(dies))


def test_a_start_that_is_given_up(rigged, run):
    """Its process would be silent for ten minutes."""

    async def ask() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rigged("never ready"), 0.3)

    run(ask())


def test_a_message_that_nobody_understands(rigged, run):
    async def ask() -> None:
        llm = await rigged("babbles")
        (event,) = await read(open_one(llm, [5]))
        assert event.finish_reason == "error" and "not understood" in event.error
        assert not llm.alive

    run(ask())


def test_a_close_while_much_is_open(rigged, run):
    async def ask() -> None:
        llm = await rigged("serves")
        streams, status = [open_one(llm, [5]) for _ in range(20)], asyncio.create_task(llm.status())
        await asyncio.sleep(0)
        closing = asyncio.create_task(llm.close())
        events = [(await read(stream))[-1] for stream in streams]
        assert {event.error for event in events} == {"the server is shutting down"}
        with pytest.raises(EngineDied, match="shutting down"):
            await status
        await closing
        await llm.close()
        with pytest.raises(EngineDied, match="shutting down"):
            open_one(llm, [5])

    run(ask())


def test_another_engine_after_the_first(rigged, run):
    """Nothing of the first is heard any more, and its thread, sockets and process are gone."""

    async def ask() -> None:
        llm = await rigged("serves")
        for _ in range(2):
            first, link = open_one(llm, [5]), llm.link
            await first.next()
            link.link.process.kill()
            assert (await read(first))[-1].error.startswith("the engine process ended with exit code")
            await llm.launch()
            assert (llm.alive, llm.death, link.link.porter.is_alive()) == (True, None, False)
            link.later(llm.receive)(b"\xc1")
            second = open_one(llm, [5], SamplingParams(max_tokens=4))
            assert second.numbers.start > first.numbers.start
            assert (await read(second))[0].token_ids == [1, 2, 3, 4]
        with pytest.raises(EngineDied, match="another engine"):
            stream, _ = open_one(llm, [5]), await llm.launch()
            raise EngineDied((await read(stream))[-1].error)

    run(ask())


def test_an_event_loop_that_ends_first(rigged, monkeypatch):
    """As in a script that forgot to close it, or a notebook that was interrupted."""
    trouble: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", trouble.append)

    async def forget() -> AsyncLLM:
        llm = await rigged("serves")
        open_one(llm, [5])
        return llm

    with asyncio.Runner() as runner:
        llm = runner.run(forget())
    time.sleep(0.2)
    llm.link.link.close()
    assert trouble == []


# ---- three ways, one answer ------------------------------------------------------------------------------------------


def test_the_same_in_a_thread_a_process_and_two(llms, run):
    prompts = ["Hello", [5, 6, 7] * 9, "é😀", [9], [1, 2, 3]]
    params = [
        SamplingParams(max_tokens=30, n=3, temperature=1.0, seed=1),
        SamplingParams(max_tokens=9, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=40, stop=["scheduler", "dry run: t"]),
        SamplingParams(max_tokens=0, prompt_logprobs=0),
        SamplingParams(max_tokens=2**80, top_k=2**70, min_tokens=3),
    ]

    async def ask(llm: AsyncLLM) -> list[AnswerEvent]:
        events = await read(llm.open(llm.requests.build(prompts, params)))
        await settles(llm)
        return [anonymous(event) for event in events]

    answers = {how: run(ask(llm)) for how, llm in llms.items()}
    events = answers["thread"]
    assert answers["process"] == answers["text process"] == events
    assert [event.answer for event in events] == list(range(7))
    assert [event.finish_reason for event in events] == ["length"] * 4 + ["stop", "length", "stop"]
    assert events[4].stop_reason == "dry run: t" and events[4].text.endswith("This is a ")
    assert (len(events[3].logprobs), len(events[3].prompt_logprobs), len(events[5].prompt_logprobs)) == (9, 27, 1)


def anonymous(event: AnswerEvent) -> AnswerEvent:
    """Without the number of its stream, and how much of the prompt others had left in the cache."""
    return structs.replace(event, stream=0, num_cached_tokens=0)


def test_what_is_told_of_the_engine(llms, run, tiny):
    first, *others = (llm.info for llm in llms.values())
    assert others == [first, first]
    assert (first.folder, first.vocab_size, first.max_model_len, first.device) == (str(tiny("qwen2")), 512, 256, "cpu")


@pytest.mark.parametrize("how", HOWS)
def test_a_status_while_nobody_asks_for_anything_else(how, llms, run):
    status = run(llms[how].status())
    assert (status["requests"], status["blocks"]["used"]) == ([], 0)


def test_200_streams_at_once(llms, run):
    """More than run at a time; each gets its own."""

    async def ask(llm: AsyncLLM) -> None:
        lengths = [1 + number % 50 for number in range(200)]
        streams = [open_one(llm, [5, number], replace(LONG, max_tokens=n)) for number, n in enumerate(lengths)]
        assert llm.num_open == 200
        answers = await asyncio.gather(*map(read, streams))
        assert [len(event.token_ids) for (event,) in answers] == lengths
        await settles(llm)

    for llm in llms.values():
        run(ask(llm))


def test_a_million_token_ids(llms, run):
    """The engine says what it thinks of them, and goes on with the others."""

    async def ask(llm: AsyncLLM) -> None:
        wide = RequestBuilder(512, 2_000_000, llm.requests.eos_token_ids, llm.tokenizer)
        other = open_one(llm)
        (event,) = await read(llm.open(wide.build([[5] * 1_000_000], SamplingParams(max_tokens=9))))
        assert event.finish_reason == "error" and "1000008 tokens" in event.error
        assert len((await read(other))[0].token_ids) == 200

    for llm in llms.values():
        run(ask(llm))


def test_nothing_is_kept_of_a_thousand_requests(llm, llms, run):
    async def ask() -> None:
        streams: list[weakref.ref[AnswerStream]] = []
        before = 0
        for number in range(1_020):
            stream = open_one(llm, [5, number % 500], SamplingParams(max_tokens=1 + number % 2, n=1 + number % 3))
            streams.append(weakref.ref(stream))
            (stream.abort() if number % 5 == 0 else await read(stream)) if number % 7 else await stream.next()
            if number % 7 == 0:
                stream.abort()
            if number == 20:
                gc.collect()
                before = len(gc.get_objects())
        del stream
        await settles(llm)
        gc.collect()
        assert [ref for ref in streams if ref() is not None] == []
        assert len(gc.get_objects()) - before < 3_000, "three objects a request"

    run(ask())


def test_nothing_is_left_open(llms, rigged, run):
    async def once(what: str) -> None:
        try:
            await (await rigged(what)).close()
        except EngineDied:
            pass

    run(once("serves"))
    before = open_files()
    for what in ("serves", "says why", "ready and gone"):
        run(once(what))
    deadline = time.monotonic() + 30.0
    while open_files() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_files() <= before


# ---- the real ones, at the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["process", "text process"])
def test_an_engine_that_is_killed_in_the_middle_of_a_stream(how, llms, run):
    """All who wait are told. Where it is the text process that is killed, the engine goes with it: no orphan."""
    llm = llms[how]

    async def ask() -> None:
        process = psutil.Process(llm.link.link.process.pid)
        family = [process, *process.children()]
        assert len(family) == 1 + (how == "text process")
        streams = [open_one(llm, params=replace(LONG, n=16)) for _ in range(30)]
        status = asyncio.create_task(llm.status())
        first = await streams[0].next()
        process.kill()
        rest = [event for answers in await asyncio.gather(*map(read, streams[1:])) for event in answers]
        events = [*merged(first + await read(streams[0])), *rest]
        assert len(events) == 480
        died = [event for event in events if event.finish_reason == "error"]
        assert died and all("ended with exit code" in event.error for event in died)
        assert {event.finish_reason for event in events} <= {"error", "length"}
        await asyncio.gather(status, return_exceptions=True)
        assert (llm.alive, llm.num_open, llm.streams, llm.stats.running) == (False, 0, {}, 0)
        await llm.close()
        assert all(ends(each.pid) for each in family)

    run(ask())
