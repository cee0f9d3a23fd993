"""What is done when the engine dies: nothing, or another one is launched."""

from __future__ import annotations

import asyncio
import logging
import time

from stages.s09_server.answer_stream import EngineDied
from stages.s09_server.async_llm import AsyncLLM
from stages.s09_server.config import OnEngineDeath

TICK = 0.05  # seconds between two looks at the engine
BACKOFF_SECONDS = 0.5  # before another engine is launched; doubled each time
MAX_RESTARTS = 5  # engines in a row that do not live
LIVED_SECONDS = 60.0  # an engine that served so long does not count as one of the row

log = logging.getLogger("stepinfer.server")


async def watch_engine(llm: AsyncLLM, on_death: OnEngineDeath) -> str:
    """Returns when there is no engine any more, and none to come: why."""
    in_a_row = 0
    while True:
        began = time.monotonic()
        while llm.alive:
            await asyncio.sleep(TICK)
        why = f"the engine died: {llm.death}"
        if on_death == "exit":
            return why
        in_a_row = 0 if time.monotonic() - began > LIVED_SECONDS else in_a_row
        while not llm.alive:
            if in_a_row == MAX_RESTARTS:
                return f"{why}; {MAX_RESTARTS} engines in a row did not live"
            seconds = BACKOFF_SECONDS * 2**in_a_row
            in_a_row += 1
            log.error("%s; another one is launched in %g s", why, seconds)
            await asyncio.sleep(seconds)
            try:
                await llm.launch()
            except EngineDied as error:
                why = f"the engine does not start: {error}"
        log.info("the engine is back")
