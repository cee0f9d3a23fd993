"""The engine's side of the messages: requests in, one `Step` out for each step. Knows nothing of sockets and text."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from stages.s01_forward.outputs import TokenLogprob
from stages.s04_continuous_batching.engine import Engine, Events
from stages.s04_continuous_batching.request import Request
from stages.s09_server.answers import generations_of
from stages.s09_server.constraint import GrammarConstraint, Grammars
from stages.s09_server.messages import Abort, Add, Begun, EngineStats, Step, ToEngine
from stages.s09_server.status import Watch

MAX_FAILURES = 3  # steps one after the other: then it is not the requests' fault
MESSAGE_SECONDS = 0.02  # that a message may lie unread while nothing but a grammar is waited for

log = logging.getLogger("stepinfer.engine")


@dataclass
class Compiling:
    """A message whose grammar is on its way. `unwanted`: those of its answers that nobody waits for any more."""

    message: Add
    grammar: Future[GrammarConstraint]
    unwanted: set[int] = field(default_factory=set)


class EngineLoop:
    """Takes messages and steps the engine. An error in a step ends the requests of that step, and the loop goes on.

    eos_token_ids: of the model. Text is the other side's affair, stop strings too: here answers are token ids.
    grammars: None: a dry run, whose answers follow nothing but their story.
    """

    def __init__(self, engine: Engine, eos_token_ids: Collection[int], grammars: Grammars | None = None) -> None:
        self.engine, self.eos_token_ids, self.grammars = engine, eos_token_ids, grammars
        self.watch = Watch(engine)
        self.compiling: list[Compiling] = []
        self.requests: dict[int, Request] = {}  # by the number of their answer
        self.not_begun: dict[int, Request] = {}  # of them, those that nothing was told of
        self.tokenless: list[int] = []  # of them, those that want their prompt scored and no token
        self.scored: dict[int, int] = {}  # of those who want log-probabilities: how many were told
        self.refused: dict[int, str] = {}
        self.untold: Events = []
        self.news = False  # does the other side not know yet what an abort has freed?
        self.steps = self.tokens = self.failures = self.failed_steps = 0

    @property
    def has_work(self) -> bool:
        """Is there anything to step for, or to tell?"""
        return self.engine.has_work or self.news or bool(self.refused or self.compiling or self.untold)

    def take(self, message: ToEngine) -> None:
        """Do what a message asks for; the next step counts with it."""
        if isinstance(message, Add):
            if message.grammar is None or self.grammars is None:
                self.add(message)
            else:
                self.compiling.append(Compiling(message, self.grammars.compile(message.grammar)))
        elif isinstance(message, Abort):
            self.abort(message.answers)
            for entry in self.compiling:
                entry.unwanted.update(message.answers)

    def abort(self, answers: Iterable[int]) -> None:
        """Give up those that the engine has."""
        for answer in answers:
            if request := self.forget(answer):
                self.engine.abort(request)
                self.news = True

    def add_compiled(self) -> None:
        """Queue those whose grammar is there. With nothing else to do, wait for one, but no longer than a message may.

        A grammar that is none ends its answers.
        """
        if not self.engine.has_work and not self.refused and not self.news:
            wait([entry.grammar for entry in self.compiling], MESSAGE_SECONDS, return_when=FIRST_COMPLETED)
        ready = [entry for entry in self.compiling if entry.grammar.done()]
        self.compiling = [entry for entry in self.compiling if entry not in ready]
        for entry in ready:
            error = entry.grammar.exception()  # whatever it is: a panic of the library's is no Exception
            if error is None:
                self.add(entry.message, entry.grammar.result())
                self.abort(entry.unwanted)
            else:
                self.refused.update(dict.fromkeys(entry.message.answers, f"the grammar cannot be followed: {error}"))

    def add(self, message: Add, grammar: GrammarConstraint | None = None) -> None:
        """Queue the answers to one prompt; the first computes the prompt, the others share it."""
        sibling: Request | None = None
        for answer, generation in zip(message.answers, generations_of(message, self.eos_token_ids, None), strict=True):
            generation.constraint = grammar.after(()) if grammar else None
            try:
                request = self.engine.add_request(generation, priority=message.params.priority, sibling=sibling)
            except ValueError as error:  # it could never run
                self.refused[answer] = str(error)
                continue
            sibling = sibling or request
            self.requests[answer] = self.not_begun[answer] = request
            if message.params.logprobs is not None:
                self.scored[answer] = 0
            if message.token_limit == 0:
                self.tokenless.append(answer)

    def step(self) -> Step:
        """One step of the engine, if it has work, and what there is to tell.

        An error that is raised here does not take the step's events with it: the next call tells them.
        """
        if self.compiling:
            self.add_compiled()
        if self.engine.has_work:
            try:
                events = self.engine.step()
            except BaseException as error:  # an interrupt, too, ends the requests of its step
                self.untold += self.engine.failed
                if not isinstance(error, Exception):
                    raise
                self.failures += 1
                self.failed_steps += 1
                log.exception("a step failed; its requests end with it")
                if self.failures >= MAX_FAILURES or "CUDA error" in str(error):  # of which no process recovers
                    raise
            else:
                self.untold += events
                if events or self.tokenless:  # else nothing is known yet: the step may still be under way, and fail
                    self.failures = 0
            self.steps += 1
        self.news = False
        events, self.untold = self.untold, []
        return self.report(events)

    def report(self, events: Events) -> Step:
        """Events as columns, and the news of those that begin or end."""
        answers, tokens, errors = list[int](), list[int](), self.refused
        scored, begun, complete = dict[int, TokenLogprob](), list[Begun](), list[int]()
        self.refused = {}
        for request, (first, index, token, _, finish_reason) in events:
            answer = first + index
            if answer in self.not_begun:
                begun.append(self.begin(answer))
            if finish_reason == "error":
                errors[answer] = request.generation.error or "the request failed"
            else:
                if answer in self.scored:
                    scored[len(tokens)] = request.generation.logprobs[self.scored[answer]]
                    self.scored[answer] += 1
                if finish_reason == "stop" and request.generation.stop_reason is None:
                    complete.append(len(tokens))
                answers.append(answer)
                tokens.append(token)
            if finish_reason is not None:
                self.forget(answer)
        for answer in [number for number in self.tokenless if self.not_begun[number].state == "finished"]:
            begun.append(self.begin(answer))
            self.forget(answer)
        self.tokens += len(tokens)
        return Step(answers, tokens, scored, begun, errors, self.stats(), complete)

    def begin(self, answer: int) -> Begun:
        """What is known of an answer once its prompt has been computed."""
        request = self.not_begun.pop(answer)
        wanted = request.generation.params.prompt_logprobs is not None and request.generation.index == 0
        scores = request.prompt_logprobs if wanted and not request.needs_prompt_logits else None
        return Begun(answer, request.num_cached_tokens, scores)

    def forget(self, answer: int) -> Request | None:
        """Nothing is kept of an answer that has ended."""
        self.not_begun.pop(answer, None)
        self.scored.pop(answer, None)
        if answer in self.tokenless:
            self.tokenless.remove(answer)
        return self.requests.pop(answer, None)

    def status(self) -> dict[str, object]:
        """What a status page shows."""
        return self.watch.status()

    def stats(self) -> EngineStats:
        """What can be counted at no cost."""
        scheduler, cache = self.engine.scheduler, self.engine.scheduler.cache
        guesses = getattr(self.engine, "stats", None)  # stage 08's engine guesses
        total = cache.pool.num_blocks - 1  # without the dummy
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_blocks_used=total - cache.pool.num_free,
            kv_blocks=total,
            preemptions=scheduler.num_preemptions,
            queried_tokens=getattr(cache, "queried_tokens", 0),  # there may be no prefix cache
            hit_tokens=getattr(cache, "hit_tokens", 0),
            drafted=guesses.drafted if guesses else 0,
            accepted=guesses.accepted if guesses else 0,
            steps=self.steps,
            tokens=self.tokens,
            failed_steps=self.failed_steps,
        )
