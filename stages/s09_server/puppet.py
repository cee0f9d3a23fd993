"""For checks of the API: an engine that says what a check tells it to, in streams as the real one's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.s01_forward.inputs import PromptRequest, RequestBuilder
from stages.s01_forward.tokenizer import Tokenizer
from stages.s09_server.answer_stream import AnswerStream, EngineDied
from stages.s09_server.messages import AnswerEvent, EngineInfo, EngineStats

VOCAB, LENGTH, BLOCKS, BLOCK_SIZE = 512, 256, 64, 16


class Puppet:
    """Stands in for `AsyncLLM`.

    script: keywords of the events that every new stream tells, each after the one before was taken. asked: what was
    opened, with its grammar. streams: all that were opened, in their order.
    """

    def __init__(self, tokenizer: Tokenizer | None, *script: dict[str, Any], max_num_seqs: int = 2) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.info = EngineInfo(
            "puppet", "nowhere", VOCAB, LENGTH, [2], BLOCKS, BLOCK_SIZE, max_num_seqs, 512, "float32", "cpu"
        )
        self.requests = RequestBuilder(VOCAB, LENGTH, frozenset({2}), tokenizer)
        self.stats = EngineStats(kv_blocks=BLOCKS)
        self.alive = True
        self.death: str | None = None
        self.asked: list[tuple[Sequence[PromptRequest], str | None]] = []
        self.streams: list[AnswerStream] = []

    @classmethod
    def of(cls, folder: Path, *script: dict[str, Any]) -> Puppet:
        """With a folder's tokenizer."""
        return cls(Tokenizer(folder), *script)

    def open(self, requests: Sequence[PromptRequest], *, grammar: str | None = None) -> AnswerStream:
        """As `AsyncLLM.open`."""
        if self.death is not None:
            raise EngineDied(self.death)
        first, count = 1000 * len(self.streams), sum(len(request.generations) for request in requests)
        stream = AnswerStream(range(first, first + count), lambda stream: None)
        self.streams.append(stream)
        self.asked.append((requests, grammar))
        if self.script:
            self.telling = asyncio.create_task(self.tell(stream))
        return stream

    async def tell(self, stream: AnswerStream) -> None:
        """The script."""
        for keywords in self.script:
            self.say(stream=stream, **keywords)
            while stream.pending:
                await asyncio.sleep(0)

    def say(self, text: str = "", answer: int = 0, *, stream: AnswerStream | None = None, **more: Any) -> None:
        """One event, of a stream that was opened; of the newest, if none is named. It has one token unless told."""
        stream = stream or self.streams[-1]
        stream.put(AnswerEvent(stream.numbers.start, answer, more.pop("token_ids", [7]), text, **more))

    def die(self, why: str) -> None:
        """As `AsyncLLM` does when the engine has gone: whatever is open ends."""
        self.alive, self.death = False, why
        for stream in self.streams:
            for event in stream.unfinished(why):
                stream.put(event)

    @property
    def num_open(self) -> int:
        """Answers that have not ended."""
        return sum(stream.left for stream in self.streams)
