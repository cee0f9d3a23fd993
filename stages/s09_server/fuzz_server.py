"""`python -m stages.s09_server.fuzz_server`: random requests through both sides of a server, without model or sockets.

One world after the other: an engine with a pool of random size, which may plan ahead, guess, and fail; `AsyncLLM`
before it, perhaps with the text process between them; all messages as bytes, some of which are late. What every answer
must be is known from a single run, and from the definition of a stop string.
"""

from __future__ import annotations

import codecs
import logging
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from stages.s01_forward.inputs import PromptRequest, RequestBuilder
from stages.s01_forward.sampling_params import SamplingParams
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.engine import Engine
from stages.s04_continuous_batching.fake_runner import EOS, VOCAB, FakeRunner, single_run
from stages.s04_continuous_batching.fuzz_scheduler import main
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Scheduler
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s06_prefix_cache.prefix_cache import PrefixCache
from stages.s07_cuda_graph.ahead_scheduler import AheadScheduler
from stages.s07_cuda_graph.fuzz_ahead import LateRunner
from stages.s07_cuda_graph.overlap_engine import OverlapEngine
from stages.s07_cuda_graph.steady_scheduler import SteadyScheduler
from stages.s08_speculative.fuzz_speculative import Knowing, QuickPace, VerifyingRunner
from stages.s08_speculative.speculative_engine import SpeculativeEngine
from stages.s08_speculative.speculative_scheduler import SpeculativeScheduler
from stages.s09_server.answer_stream import AnswerStream
from stages.s09_server.async_llm import AsyncLLM
from stages.s09_server.engine_loop import EngineLoop
from stages.s09_server.engine_process import EngineSettings
from stages.s09_server.messages import (
    Abort,
    AnswerEvent,
    AskStatus,
    Dead,
    EngineInfo,
    Status,
    decode_to_engine,
    encode,
)
from stages.s09_server.text_process import TextRelay

PIECES = ["a", "b", "ab", " ", "\n", "é", "漢", "😀", "e\u0301"]


class Letters:
    """A tokenizer: each token is a few bytes of a text, which may begin and end within a character."""

    eos_token_ids = frozenset([EOS])

    def __init__(self, rng: random.Random) -> None:
        text = "".join(rng.choices(PIECES, k=3 * VOCAB)).encode()
        cuts = sorted(rng.sample(range(len(text)), VOCAB))
        self.tokens = [b"", *(text[a:b] for a, b in zip(cuts, cuts[1:], strict=False))]

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


@dataclass
class Expected:
    """What an answer must be, and what was told of it."""

    tokens: list[int]
    text: str
    reason: str
    pieces: list[bytes]
    told: list[int] = field(default_factory=list)
    told_text: str = ""
    ended: AnswerEvent | None = None


@dataclass
class Reader:
    """Somebody with a stream. `left`: it was aborted."""

    stream: AnswerStream
    expected: list[Expected]
    left: bool = False


class ServerFuzz:
    """`done`: how often each thing happened."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.done: Counter[str] = Counter()

    def run(self, steps: int) -> Counter[str]:
        """At least so many steps. Raises AssertionError or RuntimeError at the first fault."""
        log = logging.getLogger("stepinfer.engine")
        log.disabled = True  # steps are meant to fail
        try:
            while self.done["step"] < steps:
                self.begin()
                for _ in range(min(self.rng.randint(20, 300), max(1, steps - self.done["step"]))):
                    self.turn()
                self.drain()
        finally:
            log.disabled = False
        return self.done

    # ---- a world and its end -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Two sides, and the wires between them."""
        rng = self.rng
        self.tokenizer = Letters(rng)
        self.to_engine, self.to_api = deque[bytes](), deque[bytes]()
        self.llm = AsyncLLM(EngineSettings(), in_process=False, text_process=rng.random() < 0.4)
        self.relay = TextRelay(self.to_api.append, self.to_engine.append)
        send = self.relay.from_api if self.llm.text_process else self.to_engine.append
        self.llm.link = cast(Any, SimpleNamespace(send=send))
        self.llm.asked, self.llm.ready = deque(), cast(Any, SimpleNamespace(done=lambda: True))
        self.llm.tokenizer = self.relay.tokenizer = cast(Any, self.tokenizer)
        self.begin_engine()
        self.arrivals, self.fault_rate = rng.choice((0.05, 0.3, 0.8)), rng.choice((0.0, 0.0, 0.01, 0.1, 0.6))
        self.lag, self.leaving = rng.choice((0.0, 0.3, 0.8)), rng.choice((0.0, 0.05, 0.3))
        self.readers: list[Reader] = []
        self.numbers = 0  # that were used up
        self.done["world"] += 1

    def begin_engine(self) -> None:
        """A new one, or one that takes the place of another."""
        rng = self.rng
        num_blocks, size, seqs = rng.randint(2, 30), rng.choice((1, 2, 4, 8)), rng.randint(1, 12)
        self.longest = (num_blocks - 1) * size
        budget = max(seqs, rng.choice((self.longest, rng.randint(1, 2 * self.longest))))
        self.loop = EngineLoop(self.make_engine(num_blocks, size, seqs, budget), [EOS])
        length = self.longest + 2  # so that some could never run
        self.llm.info = self.relay.info = EngineInfo(
            "", "", VOCAB, length, [EOS], num_blocks - 1, size, seqs, budget, "", ""
        )
        self.llm.requests = RequestBuilder(VOCAB, length, frozenset([EOS]), cast(Any, self.tokenizer))
        self.llm.alive, self.llm.death = True, None

    def make_engine(self, num_blocks: int, size: int, seqs: int, budget: int) -> Engine:
        """Of stage 04, 07 or 08."""
        rng, kind = self.rng, self.rng.choice(("plain", "ahead", "steady", "guessing", "guessing"))
        cache = PagedCache(num_blocks, size) if kind == "plain" else PrefixCache(num_blocks, size)
        swap = SwapSpace(rng.choice((0, rng.randint(1, num_blocks))))
        self.done[f"{kind} engine"] += 1
        if kind == "plain":
            self.runner = FakeRunner(cache, swap.num_blocks, lambda plan: None)
            return Engine(Scheduler(cache, swap, seqs, budget), self.runner)
        cut = rng.choice((None, 1, rng.randint(1, budget)))
        if kind == "guessing":
            self.runner = VerifyingRunner(cache, swap.num_blocks, lambda plan: None, most=rng.randint(1, 6))
            scheduler = SpeculativeScheduler(cache, swap, seqs, budget, cut)
            proposer, pace = Knowing(rng, rng.choice(Knowing.kinds)), QuickPace(16, 0.3)
            return SpeculativeEngine(scheduler, cast(Any, self.runner), proposer, pace, rng.choice((0, 1)))
        self.runner = LateRunner(cache, swap.num_blocks, lambda plan: None)
        ahead = (AheadScheduler if kind == "ahead" else SteadyScheduler)(cache, swap, seqs, budget, cut)
        return OverlapEngine(ahead, self.runner, rng.choice((0, 1, 1)))

    def drain(self) -> None:
        """Nobody new, and nobody late: everything ends, and nothing is kept."""
        self.lag, self.fault_rate, left = 0.0, 0.0, 20_000
        while self.loop.has_work or self.to_engine or self.to_api:
            assert left > 0, "it does not come to an end"
            left -= 1
            self.pump()
        for reader in self.readers:
            self.read(reader)
            assert reader.left or all(answer.ended for answer in reader.expected), "an answer without an end"
        loop, llm, cache = self.loop, self.llm, self.loop.engine.scheduler.cache
        assert not any((loop.requests, loop.not_begun, loop.tokenless, loop.scored, loop.refused))
        assert not any((llm.streams, llm.answers.open, self.relay.answers.open, llm.num_open))
        assert cache.pool.num_free == cache.pool.num_blocks - 1
        assert (llm.stats.running, llm.stats.waiting, llm.stats.kv_blocks_used) == (0, 0, 0), "it was not told"

    # ---- what happens ------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """People come, read and go; messages arrive; the engine makes a step."""
        rng = self.rng
        while rng.random() < self.arrivals and self.llm.num_open < 16:
            self.arrive()
        for reader in self.readers:
            if rng.random() < self.leaving / 4:
                self.leave(reader)
            elif rng.random() < 0.5:
                self.read(reader)
        if rng.random() < 0.02:
            self.llm.send(rng.choice((Abort([self.numbers + 7, -1]), AskStatus())))
        self.pump()
        self.readers = [reader for reader in self.readers if reader.stream.left or reader.stream.pending]

    def arrive(self) -> None:
        """One to three prompts, one to three answers to each."""
        rng = self.rng
        prompts, params = [], []
        for _ in range(rng.choice((1, 1, 3))):
            length = rng.randint(1, rng.choice((self.longest, min(6, self.longest))))
            limit = rng.choice((0, 1, rng.randint(1, 8), None))
            stop = ["".join(rng.choices(PIECES, k=rng.randint(1, 3))) for _ in range(rng.choice((0, 0, 1, 3)))]
            scored = 0 if limit == 0 or rng.random() < 0.1 else None
            prompts.append(rng.choices(range(VOCAB), k=length))
            n, seed = rng.choice((1, 1, 3)), rng.getrandbits(63)  # a world is its seed's alone
            params.append(SamplingParams(max_tokens=limit, n=n, seed=seed, stop=stop, prompt_logprobs=scored))
        requests = self.llm.requests.build(prompts, params)
        expected = [self.expect(request, index) for request in requests for index in range(request.params.n)]
        stream = self.llm.open(requests)
        assert stream.numbers == range(self.numbers, self.numbers + len(expected)), "a number is used twice"
        self.numbers += len(expected)
        self.readers.append(Reader(stream, expected))
        self.done["answer"] += len(expected)

    def expect(self, request: PromptRequest, index: int) -> Expected:
        """From a single run; and cut where the first token completes a stop string."""
        tokens, reason = single_run(Request(-1, request.generations[index]))
        pieces = [self.tokenizer.token_bytes(token) for token in tokens]
        for count in range(1, len(tokens) + 1) if request.params.stop else ():
            text = decoded(pieces[:count], final=False)
            if found := [text.index(stop) for stop in request.params.stop if stop in text]:
                return Expected(tokens[:count], text[: min(found)], "stop string", pieces)
        return Expected(tokens, decoded(pieces), reason, pieces)

    def leave(self, reader: Reader) -> None:
        """Once or twice, in the middle or after the end: nothing is heard any more."""
        for _ in range(self.rng.randint(1, 2)):
            reader.stream.abort()
        self.done["abort"] += not reader.left
        reader.left = True
        assert news(reader.stream) == []

    # ---- the wires ---------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """What has arrived is taken; the rest is late. One step, if there is work."""
        while self.to_engine and self.rng.random() >= self.lag:
            message = decode_to_engine(self.to_engine.popleft())
            if isinstance(message, AskStatus):
                self.to_api.append(encode(Status(self.loop.status())))
            else:
                self.loop.take(message)
        if self.loop.has_work:
            self.step()
        while self.to_api and self.rng.random() >= self.lag:
            frame = self.to_api.popleft()
            self.llm.receive(frame)
            if self.llm.death is not None:
                self.bury()
                return

    def step(self) -> None:
        """It may fail when it starts or when its tokens are read; at the third time in a row the engine gives up."""
        fails = self.rng.random() < self.fault_rate
        runner = cast(Any, self.runner)
        runner.fail_at = self.rng.choice(("start", "copied", "written", None)) if fails else None
        runner.fail_late = fails and runner.fail_at is None
        sent: deque[bytes] | Any = self.to_api
        tell = self.relay.from_engine if self.llm.text_process else sent.append
        try:
            tell(encode(self.loop.step()))
        except MemoryError as error:
            self.done["engine that gave up"] += 1
            tell(encode(Dead(str(error), fault=True)))
            self.loop = EngineLoop(self.loop.engine, [EOS])
        self.loop.engine.scheduler.cache.pool.check()
        self.done["step"] += 1
        self.done["failed step"] += fails

    def bury(self) -> None:
        """All who were there have heard of it; another engine takes over, and what the first still said is gone."""
        for reader in self.readers:
            self.read(reader)
            assert reader.left or all(answer.ended for answer in reader.expected)
        assert not self.llm.streams and not self.llm.answers.open
        self.relay.answers.open.clear()  # its process ends with the engine's
        self.to_engine.clear()
        self.to_api.clear()
        self.begin_engine()

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def read(self, reader: Reader) -> None:
        """All news of one reader: each belongs to one of its answers, which has not ended."""
        if not reader.stream.pending:
            return
        events = news(reader.stream)
        assert len({event.answer for event in events}) == len(events), "news of one answer come merged"
        for event in events:
            assert not reader.left, "news of an answer that was aborted"
            answer = reader.expected[event.answer]
            assert answer.ended is None, "news after the end"
            answer.told += event.token_ids
            answer.told_text += event.text
            if event.finish_reason is not None:
                answer.ended = event
                self.check(answer, event)

    def check(self, answer: Expected, event: AnswerEvent) -> None:
        """An answer that has ended is what it must be; one that failed is how that begins."""
        told, failed = answer.told, event.finish_reason == "error"
        assert told == answer.tokens[: len(told)]
        if failed and event.error != "no token can be chosen":
            text = decoded(answer.pieces[: len(told)])
            assert text.startswith(answer.told_text) if self.llm.death else text == answer.told_text
            self.done["answer that failed"] += 1
            return
        assert (told, answer.told_text) == (answer.tokens, answer.text)
        assert event.finish_reason == ("stop" if answer.reason == "stop string" else answer.reason)
        assert isinstance(event.stop_reason, str) == (answer.reason == "stop string")
        self.done[answer.reason] += 1


def decoded(pieces: Sequence[bytes], final: bool = True) -> str:
    """What is no character is replaced. Not `final`: an end that may yet become one is left out."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(b"".join(pieces), final)


def news(stream: AnswerStream) -> list[AnswerEvent]:
    """What `next` gives, without an event loop: there is something, or nothing will come."""
    waiting = stream.next()
    try:
        waiting.send(None)
    except StopIteration as told:
        return cast(list[AnswerEvent], told.value)
    raise AssertionError("it waits")


if __name__ == "__main__":
    main(cast(Any, ServerFuzz))
