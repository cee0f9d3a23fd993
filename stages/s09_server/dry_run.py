"""A dry run: the real scheduler, cache and API, and no weights. To try out a server, and to measure what it costs.

Every answer tells the same story, token by token, to its EOS.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stages.s01_forward.config_json import parse_dtype
from stages.s01_forward.model import Model
from stages.s01_forward.outputs import SampledToken, TokenLogprob
from stages.s01_forward.sampling_params import check_float
from stages.s04_continuous_batching.engine import Engine
from stages.s04_continuous_batching.plan import Plan, PlannedRow, RowResult, StepResult
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s07_cuda_graph.ahead_scheduler import AheadScheduler
from stages.s07_cuda_graph.overlap_engine import OverlapEngine
from stages.s07_cuda_graph.steady import GroupPlan, group_result
from stages.s08_speculative.llm import LLM as SpeculativeLLM

STORY = "This is a dry run: the scheduler and the API are real, the model is not. "
SURE, NEVER = 0.0, -100.0  # log-probabilities


class DryLLM(SpeculativeLLM):
    """step_ms: how long a step is to take; the next one is planned meanwhile, as on a GPU."""

    def __init__(self, *args: Any, step_ms: float = 0.0, **options: Any) -> None:
        check_float("dry_run_step_ms", step_ms, 0.0)
        if options.get("speculative") is not None:
            raise ValueError(f"speculative is {options['speculative']!r}; a dry run has no model whose tokens to guess")
        self.step_ms = step_ms
        super().__init__(*args, **options)

    def make_model(self, dtype: str, progress: bool) -> Model:
        """The sizes of a model."""
        wanted = "float32" if self.config.dtype is None else str(self.config.dtype).removeprefix("torch.")
        return Model(self.config, device="meta", dtype=parse_dtype(wanted if dtype == "auto" else dtype), ops=self.ops)

    def build_engine(self, num_blocks: int, block_size: int, swap_mb: float) -> Engine:
        """The books of the cache without its memory, and a runner that needs neither."""
        scheduler = self.make_scheduler(self.make_cache(num_blocks, block_size), SwapSpace(0))
        assert isinstance(scheduler, AheadScheduler)
        story = self.tokenizer.encode(STORY) if self.tokenizer else [self.config.vocab_size - 1]
        ends = sorted(self.requests.eos_token_ids)[:1]
        return OverlapEngine(scheduler, DryRunner(story + ends, self.step_ms / 1000), ahead=int(self.overlap))


@dataclass(frozen=True)
class DryHandle:
    """A step that is done when its time has come."""

    result: StepResult
    due: float  # by `time.perf_counter`

    def wait(self) -> StepResult:
        """The step's result; returns when it is there."""
        time.sleep(max(0.0, self.due - time.perf_counter()))
        return self.result


class DryRunner:
    """Tells the story: the token at a place follows from the place alone."""

    def __init__(self, story: Sequence[int], step_seconds: float) -> None:
        self.story, self.step_seconds, self.free_at = story, step_seconds, 0.0

    def execute(self, plan: Plan) -> DryHandle:
        """A step takes its time, one after the other."""
        self.free_at = max(self.free_at, time.perf_counter()) + (self.step_seconds if plan.rows else 0)
        return DryHandle(self.result(plan), self.free_at)

    def result(self, plan: Plan) -> StepResult:
        """The next word for each row."""
        if isinstance(plan, GroupPlan):
            places = zip(plan.lengths, plan.group.members, strict=True)
            return group_result([self.token(length - member.request.prompt_len) for length, member in places])
        return StepResult(tuple(self.row(row) for row in plan.rows))

    def row(self, row: PlannedRow) -> RowResult:
        """A word, if the row samples, and its scores, if they are asked for."""
        request, tokens = row.request, tuple[SampledToken, ...]()
        if row.samples and request.generation.token_limit > 0:
            tokens = (self.sampled(row.span.end - request.prompt_len, request.generation.params.logprobs),)
        scores = tuple[TokenLogprob, ...]()
        if request.needs_prompt_logits:
            first = max(row.span.start + 1, len(request.prompt_logprobs))
            following = request.sequence.token_ids[first : min(row.span.end + 1, request.prompt_len)]
            count = request.generation.params.prompt_logprobs or 0
            scores = tuple(self.score(token_id, count) for token_id in following)
        return RowResult(tokens, scores)

    def token(self, place: int) -> int:
        """The token at a place of any answer."""
        return self.story[place % len(self.story)]

    def sampled(self, place: int, count: int | None) -> SampledToken:
        """The token, with its score."""
        token_id = self.token(place)
        return SampledToken(token_id, None if count is None else self.score(token_id, count))

    def score(self, token_id: int, count: int) -> TokenLogprob:
        """It could not have been another."""
        others = [(other, NEVER) for other in range(count) if other != token_id]
        return TokenLogprob(token_id, SURE, 1, ((token_id, SURE), *others)[:count])
