"""For checks: the warps of a program as threads of which one has the turn, and a seed that says whose it is.

What is asynchronous on a GPU happens between two turns, too: now as soon as it can, now at the last moment. Each seed
does the same every time, and none hangs: if nobody can go on, an error says who waits for what.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, Protocol

MOST_TURNS = 200_000  # of one program, some ten seconds


class Fault(Exception):
    """What a kernel must not do: on a GPU a hang, a crash or a wrong result, every time or once in a thousand times."""


class Stopped(BaseException):
    """Ends a warp because another one has failed."""


class Event(Protocol):
    """What happens at some time, without a warp's doing."""

    weight: float

    def happen(self) -> None: ...

    def writes(self, place: Any) -> bool: ...  # to this shared memory?


def always() -> bool:
    return True


class Warp(threading.Thread):
    """One warp, or several that do the same. `weight`: how readily it gets the turn."""

    def __init__(self, program: Program, name: str, work: Callable[[], Any]) -> None:
        super().__init__(name=name, daemon=True)
        self.program, self.work, self.weight = program, work, program.hurry()
        self.turn = threading.Lock()  # held, except for a moment by whoever is given the turn
        self.turn.acquire()
        self.ready: Callable[[], bool] = always
        self.waits_for: object = "its turn"
        self.done = False
        self.products: list[Any] = []  # not waited for
        self.unfenced: list[Any] = []  # written, and perhaps not yet seen by the copy engine and by products
        program.warps.append(self)

    def run(self) -> None:
        self.turn.acquire()
        try:
            if not self.program.fault:
                self.work()
                if self.products:
                    raise Fault(f"{self.name} ends with a product that it has not waited for")
                self.done = True
                self.program.pass_on(self)
        except Stopped:
            pass
        except BaseException as error:  # raised again by `Program.run`
            self.program.fail(error)

    def pause(self, ready: Callable[[], bool] = always, waits_for: object = "its turn") -> None:
        """Others may go on here. Returns when this warp has the turn again, not before it is `ready`."""
        self.ready, self.waits_for = ready, waits_for
        if self.program.pass_on(self):
            self.turn.acquire()
        if self.program.fault:
            raise Stopped


class Program:
    """One program of a grid."""

    def __init__(self, index: int, count: int, chance: random.Random) -> None:
        self.index, self.count, self.chance, self.turns = index, count, chance, 0
        self.copy_weight, self.product_weight = self.hurry(), self.hurry()
        self.warps: list[Warp] = []
        self.under_way: list[Any] = []  # events
        self.fault: BaseException | None = None

    def hurry(self) -> float:
        """Very different ones: who is far ahead or far behind shows more than fair turns do."""
        return 10 ** self.chance.uniform(-2, 0)

    def run(self, work: Callable[[], Any]) -> None:
        first = Warp(self, "the program", work)
        first.start()
        first.turn.release()
        first.join()
        for warp in self.warps[1:]:
            warp.join()
        if self.fault:
            raise self.fault

    def pass_on(self, owner: Warp) -> bool:
        """Gives the turn to somebody who can go on. Was that another than its present owner?"""
        while self.under_way or not all(warp.done for warp in self.warps):
            chosen = self.choose()
            if chosen is owner:
                return False
            if isinstance(chosen, Warp):
                chosen.turn.release()
                return True
            self.let_happen(chosen)
        return False

    def choose(self) -> Warp | Event:
        self.count_turn()
        able = [warp for warp in self.warps if not warp.done and warp.ready()] + self.under_way
        if not able:
            raise Fault(f"nobody can go on: {self.waiting()}")
        return self.chance.choices(able, [x.weight for x in able])[0]

    def count_turn(self) -> None:
        self.turns += 1
        if self.turns > MOST_TURNS:
            raise Fault(f"no end after {MOST_TURNS} turns: {self.waiting()}")

    def waiting(self) -> str:
        return "; ".join(f"{warp.name} waits for {warp.waits_for}" for warp in self.warps if not warp.done)

    def let_happen(self, event: Event) -> None:
        self.under_way.remove(event)
        event.happen()

    def fail(self, error: BaseException) -> None:
        """It ends all warps, which wait for a turn and get it now."""
        self.fault = error
        for warp in self.warps:
            warp.turn.release()
