"""The engine's process: `python -m stages.s09_server.engine_process`, started by `link.ChildLink`."""

from __future__ import annotations

import gc
import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from stages.s01_forward.frontend import BaseLLM
from stages.s04_continuous_batching.engine import Engine
from stages.s09_server.constraint import Grammars
from stages.s09_server.engine_loop import EngineLoop
from stages.s09_server.link import ParentLink
from stages.s09_server.messages import AskStatus, Dead, EngineInfo, Ready, Status, Stop, decode_to_engine, encode

Receive = Callable[[bool], bytes | None]  # the next frame; whether to wait for one
Send = Callable[[bytes], object]


class EngineSettings(msgspec.Struct, frozen=True):
    """model: a folder, a hub id or "demo". options: keywords of `LLM`. dry_run: no weights.

    Raises ValueError for NaN and infinity: JSON has none, and what came instead, null, would be the default.
    """

    model: str = "demo"
    options: dict[str, Any] = {}
    dry_run: bool = False
    dry_run_step_ms: float = 0.0

    def __post_init__(self) -> None:
        for name, value in {**self.options, "dry_run_step_ms": self.dry_run_step_ms}.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} is {value}; it must be a finite number")


def make_llm(settings: EngineSettings) -> Any:
    """The engine of stage 08, or one without weights."""
    if settings.dry_run:
        from stages.s09_server.dry_run import DryLLM

        return DryLLM(settings.model, step_ms=settings.dry_run_step_ms, **settings.options)
    from stages.s08_speculative.llm import LLM

    return LLM(settings.model, progress=sys.stderr.isatty(), **settings.options)


def info_of(settings: EngineSettings, llm: BaseLLM, engine: Engine) -> EngineInfo:
    """What the API must know of the engine."""
    scheduler = engine.scheduler
    return EngineInfo(
        model=settings.model,
        folder=str(llm.folder),
        vocab_size=llm.config.vocab_size,
        max_model_len=llm.max_model_len,
        eos_token_ids=sorted(llm.requests.eos_token_ids),
        num_blocks=scheduler.cache.pool.num_blocks - 1,
        block_size=scheduler.cache.block_size,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        dtype=str(llm.dtype).removeprefix("torch."),
        device=str(llm.device),
        speculative=settings.options.get("speculative"),
    )


def run_engine(settings: EngineSettings, receive: Receive, send: Send, *, alone: bool = False) -> int:
    """Make the engine, then serve until told to stop. What goes wrong is said before it ends; returns an exit code.

    alone: the process is the engine's.
    """
    log = logging.getLogger("stepinfer.engine")
    try:
        llm = make_llm(settings)
        eos = llm.requests.eos_token_ids
        grammars = None if settings.dry_run else Grammars(llm.tokenizer, llm.config.vocab_size, eos)
        loop, info = EngineLoop(llm.engine, eos, grammars), info_of(settings, llm, llm.engine)
    except (ValueError, TypeError, OSError) as error:  # the model or an option is wrong
        send(encode(Dead(str(error), fault=False)))
        return 2
    except Exception as error:
        log.exception("the engine does not start")
        send(encode(Dead(f"{type(error).__name__}: {error}", fault=True)))
        return 1
    send(encode(Ready(info)))
    if alone:
        gc.collect()
        gc.freeze()  # weights, caches, books: they need not be looked at again and again
    try:
        serve(loop, receive, send)
    except Exception as error:
        log.exception("the engine ends")
        send(encode(Dead(f"{type(error).__name__}: {error}", fault=True)))
        return 1
    return 0


def serve(loop: EngineLoop, receive: Receive, send: Send) -> None:
    """Take what has come, step, tell; when there is nothing to do, wait for somebody to ask."""
    while True:
        frame = receive(not loop.has_work)
        while frame is not None:
            message = decode_to_engine(frame)
            if isinstance(message, Stop):
                return
            if isinstance(message, AskStatus):
                send(encode(Status(status_of(loop))))
            else:
                loop.take(message)
            frame = receive(False)
        if loop.has_work:
            send(encode(loop.step()))


def status_of(loop: EngineLoop) -> dict[str, object]:
    """What a status page shows. It is for looking on: a mistake there must not end what it looks at."""
    try:
        return loop.status()
    except Exception:
        logging.getLogger("stepinfer.engine").exception("the status could not be told")
        return {}


def main() -> int:
    """Called by the parent, and ended by it."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s engine: %(message)s")
    link = ParentLink()
    code = run_engine(msgspec.json.decode(link.settings, type=EngineSettings), link.receive, link.send, alone=True)
    link.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
