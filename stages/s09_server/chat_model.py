"""A model in this process, to talk to."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from stages.s01_forward.frontend import BaseLLM
from stages.s01_forward.sampling_params import SamplingParams
from stages.s01_forward.tokenizer import Message

FULL = "cut: the conversation has reached the {} tokens that the model reads; /reset begins a new one"


class ChatError(Exception):
    """The answer cannot be given; the text says why, and what to do."""


class ChatModel(Protocol):
    """Who answers. `cut`: why the newest answer broke off, and what to do; empty if it did not."""

    name: str
    cut: str

    def answer(self, messages: Sequence[Message]) -> Generator[str]:
        """The next answer of a conversation, piece by piece. Raises ChatError; KeyboardInterrupt for Ctrl-C."""


@dataclass
class LocalModel:
    """An `LLM` of any stage. Raises ValueError for a model that cannot chat."""

    llm: BaseLLM
    params: SamplingParams

    def __post_init__(self) -> None:
        self.name, self.cut = self.llm.folder.name, ""
        self.llm.chat_ids([{"role": "user", "content": "Hello"}])

    def answer(self, messages: Sequence[Message]) -> Generator[str]:
        """Ctrl-C is heard between two tokens, so that the engine's books stay in order."""
        self.cut = ""
        try:
            ids = self.llm.chat_ids(messages)
        except ValueError as error:
            raise ChatError(str(error)) from None
        limit = self.llm.max_model_len
        if len(ids) >= limit:
            raise ChatError(
                f"the conversation has {len(ids)} tokens, and the model reads {limit}; /reset begins a new one"
            )
        told = 0
        stream = self.llm.stream([ids], self.params)
        with interrupts() as interrupted, contextlib.closing(stream):  # type: ignore[type-var]  # it is a generator
            for event in stream:
                if event.finish_reason == "error":
                    raise ChatError(f"the model gave no usable logits after {told} tokens")
                told += 1
                yield event.text
                if interrupted.is_set():
                    raise KeyboardInterrupt
                if event.finish_reason == "length":
                    full = len(ids) + told >= limit
                    self.cut = FULL.format(limit) if full else f"cut after {told} tokens: --max-tokens"


class interrupts:
    """While this is open, Ctrl-C sets the event and does nothing else, however often it comes.

    `LLM.step` holds back the first one itself. But who waits presses it again, and a second one would break into the
    step, and the conversation goes on with the engine that it left.
    """

    def __init__(self) -> None:
        self.event = threading.Event()

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C."""
        self.event.set()

    def __enter__(self) -> threading.Event:
        self.before = None
        if threading.current_thread() is threading.main_thread():  # no other thread hears signals
            self.before = signal.signal(signal.SIGINT, self.hear)
        return self.event

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)
