"""When guessing does not pay: a request whose guesses fall waits longer and longer before it tries again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stages.s04_continuous_batching.request import Request

WEIGHT = 0.15  # of the newest step in the running mean
NO_GUESS = 0.02  # the weight of a step for which nothing was found: it costs little, only the overlap of two steps
FIRST_PAUSE, LONGEST_PAUSE = 48, 1024  # tokens


@dataclass
class Record:
    """How a request's guesses have fared."""

    rate: float = 1.0  # accepted share, a running mean that begins with trust
    pause: int = FIRST_PAUSE
    resumes: int = 0  # from so many tokens on


class Pace:
    """Who guesses in the next step.

    max_rows: with more requests running than this, nobody does: the step is then bound by arithmetic, which verifying
    multiplies. least_rate: a request below it pauses, for twice as long each time.
    """

    def __init__(self, max_rows: int, least_rate: float) -> None:
        self.max_rows, self.least_rate = max_rows, least_rate
        self.records: dict[Request, Record] = {}

    def ready(self, running: Iterable[Request]) -> list[Request]:
        """Those of the running requests that should guess."""
        requests = list(running)
        if len(requests) > self.max_rows:
            return []
        return [request for request in requests if self.record(request).resumes <= len(request.generation.token_ids)]

    def record(self, request: Request) -> Record:
        """A request's record; a new one trusts."""
        return self.records.setdefault(request, Record())

    def note(self, request: Request, drafted: int, accepted: int, weight: float = WEIGHT) -> None:
        """A step's outcome, which moves the mean by its `weight`. Below `least_rate` a pause begins.

        It lasts `pause` tokens of the answer, and the next one twice as many, up to LONGEST_PAUSE. It ends with a fresh
        trial: the mean begins anew at least_rate + WEIGHT / 3, from where two bad steps bring it down again.
        """
        record = self.record(request)
        record.rate += weight * (accepted / drafted - record.rate)
        if record.rate < self.least_rate:
            record.resumes = len(request.generation.token_ids) + record.pause
            record.pause = min(2 * record.pause, LONGEST_PAUSE)
            record.rate = self.least_rate + WEIGHT / 3

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self.records.pop(request, None)
