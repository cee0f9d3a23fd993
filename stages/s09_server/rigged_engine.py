"""For checks: an engine process without an engine. It starts at once, and does what the name of its model says."""

from __future__ import annotations

import os
import re
import sys
import time

import msgspec

from stages.s09_server.link import ParentLink
from stages.s09_server.messages import (
    Abort,
    Add,
    Dead,
    EngineInfo,
    EngineStats,
    Ready,
    Status,
    Step,
    decode_to_engine,
    encode,
)

LENGTH = 4096
GARBAGE = b"\xc1 is no MessagePack"


class Rigged(msgspec.Struct):
    """Of `EngineSettings`, what is needed here."""

    model: str


def ready() -> bytes:
    """As an engine says it; there is no such folder, so there is no tokenizer."""
    return encode(Ready(EngineInfo("rigged", "nowhere", 512, LENGTH, [0], 9, 16, 8, 64, "float32", "cpu")))


def step(number: int, token: int) -> bytes:
    """One token for one answer."""
    return encode(Step([number], [token], {}, [], {}, EngineStats(running=1, tokens=token)))


def serve(link: ParentLink) -> None:
    """Every answer counts: 1, 2, 3, ... One that wants no more than 9 tokens has them at once, others never end."""
    while True:
        frame = link.receive(True)
        assert frame is not None
        message = decode_to_engine(frame)
        if isinstance(message, Add):
            for number in message.answers:
                for token in range(1, min(message.token_limit, 9) + 1):
                    link.send(step(number, token))
        elif isinstance(message, Abort):
            link.send(encode(Step([], [], {}, [], {}, EngineStats())))
        else:
            link.send(encode(Status({"pid": os.getpid()})))


def main() -> None:
    """What becomes of it."""
    link = ParentLink()
    what = msgspec.json.decode(link.settings, type=Rigged).model
    if what == "leaves":
        os._exit(3)
    if what == "says why":
        link.send(encode(Dead("there is no such model", fault=False)))
        link.close()
        sys.exit(2)
    if what == "never ready":
        time.sleep(600)
    if what == "ready late":
        time.sleep(0.3)
    link.send(ready())
    if what == "ready and gone":
        link.close()
        sys.exit(5)
    if what == "ready and dead":
        link.send(encode(Dead("out of memory", fault=True)))
        time.sleep(600)
    if what == "hangs":
        re.match(r"(a|a)*b", "a" * 27)  # for ten seconds, and no other thread has a turn
    if what == "babbles":
        link.receive(True)
        link.send(GARBAGE)
    serve(link)


if __name__ == "__main__":
    main()
