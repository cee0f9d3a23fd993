"""A process between the API and the engine that does nothing but turn tokens into text. An option, `--text-process`.

It takes the work of `Answers` off the API's loop, at the price of one more hop for every message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import zmq

from stages.s01_forward.tokenizer import Tokenizer, tokenizer_of
from stages.s09_server.answers import Answers, generations_of
from stages.s09_server.children import ENGINE
from stages.s09_server.link import ChildLink, ParentLink
from stages.s09_server.messages import (
    Abort,
    Add,
    Dead,
    EngineInfo,
    Ready,
    Step,
    Texts,
    decode_from_engine,
    decode_to_engine,
    encode,
)

MAILBOX = "inproc://from-engine"
Send = Callable[[bytes], object]


class TextRelay:
    """Hears both sides; answers have their text here, and stop strings end them here."""

    def __init__(self, to_api: Send, to_engine: Send) -> None:
        self.to_api, self.to_engine, self.answers = to_api, to_engine, Answers()
        self.info: EngineInfo | None = None
        self.tokenizer: Tokenizer | None = None

    def from_api(self, frame: bytes) -> None:
        """Passed on, but for what the engine need not know."""
        message = decode_to_engine(frame)
        if isinstance(message, Add):
            assert self.info is not None
            generations = generations_of(message, frozenset(self.info.eos_token_ids), self.tokenizer)
            self.to_engine(encode(self.answers.add(message, generations)))
        elif isinstance(message, Abort):
            self.to_engine(encode(Abort(self.answers.drop(message.answers))))
        else:
            self.to_engine(frame)

    def from_engine(self, frame: bytes) -> None:
        """Passed on, tokens as text."""
        message = decode_from_engine(frame)
        if isinstance(message, Step):
            events, surplus = self.answers.take(message)
            if surplus:
                self.to_engine(encode(Abort(surplus)))
            frame = encode(Texts(events, message.stats))
        elif isinstance(message, Ready):
            self.info = message.info
            self.tokenizer = tokenizer_of(Path(message.info.folder))
        self.to_api(frame)


def main() -> None:
    """Called by the API. When that is gone, or closes this process's stdin, it ends, and so does the engine's."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s text: %(message)s")
    parent = ParentLink()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    mailbox, pen = context.socket(zmq.PULL), context.socket(zmq.PUSH)  # the pen is for the thread of the engine's link
    for socket in (mailbox, pen):
        socket.set_hwm(0)
    mailbox.bind(MAILBOX)
    pen.connect(MAILBOX)
    engine = ChildLink(
        ENGINE,
        parent.settings,  # as they are
        pen.send,
        lambda why: pen.send(encode(Dead(why, fault=True))),
    )
    relay, poller = TextRelay(parent.send, engine.send), zmq.Poller()
    poller.register(parent.socket, zmq.POLLIN)
    poller.register(mailbox, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if mailbox in ready:
            relay.from_engine(mailbox.recv())
        if parent.socket in ready:
            relay.from_api(parent.socket.recv())


if __name__ == "__main__":
    main()
