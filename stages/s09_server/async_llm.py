"""asyncio's face of the engine: queue requests, await what becomes of them. Everything here runs in one event loop."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from stages.s01_forward.inputs import Prompt, PromptRequest, RequestBuilder
from stages.s01_forward.sampling_params import SamplingParams
from stages.s01_forward.tokenizer import Tokenizer, tokenizer_of
from stages.s09_server.answer_stream import CLOSING, STARTING, AnswerStream, EngineDied
from stages.s09_server.answers import Answers, add_message
from stages.s09_server.engine_process import EngineSettings
from stages.s09_server.loop_link import LoopLink
from stages.s09_server.messages import (
    Abort,
    AnswerEvent,
    AskStatus,
    Dead,
    EngineInfo,
    EngineStats,
    FromEngine,
    Ready,
    Step,
    Texts,
    ToEngine,
    decode_from_engine,
    encode,
)

TOKENIZERS = "transformers.models.auto.tokenization_auto"  # what reads them; seconds to import

log = logging.getLogger("stepinfer.api")


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """A folder's tokenizer, if it has one. Another thread may still be importing what is needed: then wait for it.

    transformers puts another module in its own place when it has been imported; who asks that one for something before
    gets the first, which has nothing. A module inside it is not to be had before.
    """
    importlib.import_module(TOKENIZERS)
    return tokenizer_of(folder)


class AsyncLLM:
    """An engine in another process, for many users at once. Made by `AsyncLLM.start`.

    alive: False from the engine's death on; `death` says why, and is None again while another one is launched.
    stats: what the newest step told.
    """

    link: LoopLink
    info: EngineInfo
    tokenizer: Tokenizer | None
    requests: RequestBuilder

    def __init__(self, settings: EngineSettings, in_process: bool, text_process: bool) -> None:
        self.settings, self.in_process, self.text_process = settings, in_process, text_process
        self.answers = Answers()  # used unless there is a text process
        self.streams: dict[int, AnswerStream] = {}
        self.next_number = 0
        self.stats = EngineStats()
        self.alive = False
        self.death: str | None = "no engine was started"

    @classmethod
    async def start(cls, settings: EngineSettings, *, in_process: bool = False, text_process: bool = False) -> AsyncLLM:
        """Returns when the engine takes requests. Raises EngineDied, with the engine's own words, if it never will.

        in_process: in a thread of this process, to debug it. text_process: tokens become text in a third process.
        """
        self = cls(settings, in_process, text_process)
        await self.launch()
        return self

    async def launch(self) -> None:
        """Start an engine; also another one, after the first has died."""
        if hasattr(self, "link"):
            await self.close("another engine is started")
        self.alive, self.death, self.stats = False, None, EngineStats()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked: deque[asyncio.Future[dict[str, Any]]] = deque()
        self.link = LoopLink(
            self.settings,
            self.receive,
            lambda why: self.died(EngineDied(why)),
            in_process=self.in_process,
            text_process=self.text_process,
        )
        try:
            await self.ready
            await self.prepare()
            self.check_alive()  # meanwhile it may have died
        except BaseException as error:
            await self.close(str(error))
            raise

    async def prepare(self) -> None:
        """What requests are made with."""
        if not hasattr(self, "tokenizer"):
            self.tokenizer = await asyncio.to_thread(load_tokenizer, Path(self.info.folder))
        eos, length = frozenset(self.info.eos_token_ids), self.info.max_model_len
        self.requests = RequestBuilder(self.info.vocab_size, length, eos, self.tokenizer)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def open(self, requests: Sequence[PromptRequest], *, grammar: str | None = None) -> AnswerStream:
        """Queue prompts; all their answers come in one stream.

        Raises EngineDied if there is no engine, and ValueError for text that cannot be sent: half a surrogate pair.
        """
        self.check_alive()
        first = number = self.next_number
        answers, frames = Answers(), list[bytes]()
        for request in requests:
            message = add_message(request, number, first, grammar)
            frames.append(encode(message if self.text_process else answers.add(message, request.generations)))
            number += len(request.generations)
        # Nothing has happened until here, where nothing can go wrong any more.
        self.next_number = number
        self.answers.open |= answers.open
        stream = AnswerStream(range(first, number), self.forget)
        if stream.left:
            self.streams[first] = stream
        for frame in frames:
            self.link.send(frame)
        return stream

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[AnswerEvent]:
        """The answers to one prompt, as they grow. Raises ValueError or TypeError for what cannot be asked."""
        stream = self.open(self.requests.build([prompt], params))
        try:
            while events := await stream.next():
                for event in events:
                    yield event
        finally:
            stream.abort()

    @property
    def num_open(self) -> int:
        """Answers that have not ended."""
        return sum(stream.left for stream in self.streams.values())

    async def status(self) -> dict[str, Any]:
        """What a status page shows, from the engine itself, between two steps."""
        self.check_alive()
        told: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.asked.append(told)
        self.send(AskStatus())
        return await told

    def check_alive(self) -> None:
        """Raises EngineDied if there is no engine, or none yet."""
        if not self.alive:
            raise EngineDied(self.death or STARTING)

    async def close(self, why: str = CLOSING) -> None:
        """End what is open, and the engine."""
        self.died(EngineDied(why))
        await self.link.close()

    # ---- news --------------------------------------------------------------------------------------------------------

    def send(self, message: ToEngine) -> None:
        """To the engine."""
        self.link.send(encode(message))

    def receive(self, frame: bytes) -> None:
        """A message of the engine's. One that is not understood is its end: somebody would wait for it for ever."""
        if self.death is not None:  # it has been given up
            return
        try:
            self.take(decode_from_engine(frame))
        except Exception as error:
            log.exception("a message of the engine is not understood")
            self.died(EngineDied(f"a message of the engine is not understood: {error}"))

    def take(self, message: FromEngine) -> None:
        """Do what it says."""
        if isinstance(message, Step):
            events, surplus = self.answers.take(message)
            if surplus:
                self.send(Abort(surplus))
            self.deliver(events, message.stats)
        elif isinstance(message, Texts):
            self.deliver(message.events, message.stats)
        elif isinstance(message, Ready):
            self.info, self.alive = message.info, True
            self.ready.set_result(None)
        elif isinstance(message, Dead):
            self.died(EngineDied(message.error, message.fault))
        elif self.asked:
            told = self.asked.popleft()
            if not told.done():
                told.set_result(message.status)

    def deliver(self, events: Sequence[AnswerEvent], stats: EngineStats) -> None:
        """News to the streams that they concern."""
        self.stats = stats
        for event in events:
            stream = self.streams.get(event.stream)
            if stream is not None:
                stream.put(event)

    def died(self, error: EngineDied) -> None:
        """Whoever waits for the engine is told that it will not come back. Only the first reason counts."""
        if self.death is not None:
            return
        self.alive, self.death = False, str(error)
        self.stats = structs.replace(self.stats, running=0, waiting=0, kv_blocks_used=0)
        if not self.ready.done():
            self.ready.set_exception(error)
        for told in self.asked:
            if not told.done():
                told.set_exception(error)
        self.asked.clear()
        for stream in list(self.streams.values()):
            for event in stream.unfinished(str(error)):
                stream.put(event)
        self.answers.open.clear()

    def forget(self, stream: AnswerStream) -> None:
        """Nobody reads it any more; what of it is open is not wanted."""
        if self.streams.get(stream.numbers.start) is not stream:
            return
        del self.streams[stream.numbers.start]
        if stream.left and self.alive:
            numbers = list(stream.numbers)
            self.send(Abort(numbers if self.text_process else self.answers.drop(numbers)))
