"""Runs the rows with their guesses, in one forward pass for the whole batch, and says which stand."""

from __future__ import annotations

from itertools import accumulate
from typing import Literal

import numpy as np
from torch import Tensor

from stages.s01_forward.outputs import SampledToken
from stages.s01_forward.sampler import sample
from stages.s02_kv_cache.kv_store import KVStore
from stages.s04_continuous_batching.engine import StepHandle
from stages.s04_continuous_batching.plan import Handle, Plan, PlannedRow, RowResult, StepResult
from stages.s04_continuous_batching.request import Request
from stages.s07_cuda_graph.device_state import DUMMY_SLOT
from stages.s07_cuda_graph.graphs import Graphs
from stages.s07_cuda_graph.runner import GraphRunner
from stages.s07_cuda_graph.steady import row_result
from stages.s07_cuda_graph.step import Step, StepOutputs
from stages.s07_cuda_graph.step_inputs import StepSize
from stages.s08_speculative.acceptance import matching
from stages.s08_speculative.guess_slots import GuessSlots
from stages.s08_speculative.verify import by_ratio, prefixes

Rule = Literal["match", "ratio"]


class SpeculativeRunner(GraphRunner):
    """most: guesses of a row at most. rule: "match", or "ratio" for guesses that were drawn and for a temperature.

    `probs`: for the ratio rule, what each request's guesses were drawn from, [k, V]; set with the plan.
    """

    def __init__(
        self, step: Step, host_store: KVStore, graphs: Graphs | None, max_num_tokens: int, most: int, rule: Rule
    ) -> None:
        super().__init__(step, host_store, graphs, max_num_tokens, queries=1 + most)
        self.slots = GuessSlots(self.state, step.shape.block_size)
        self.most, self.rule = most, rule
        self.probs: dict[Request, Tensor] = {}

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return self.step.model.config.vocab_size

    def queries(self, plan: Plan) -> int:
        """A step with guesses has room for the most of them in every row: one graph for a number of rows."""
        return 1 + self.most if plan.has_drafts else super().queries(plan)

    def pack(self, plan: Plan, slots: list[int], size: StepSize, common: int = 0) -> np.ndarray:
        """As before; rows that the device's sampler cannot verify sample nothing there."""
        packed = super().pack(plan, slots, size, common)
        if size.queries > 1:
            first = 2 * size.rows + 1  # of the sampling slots: behind the rows' slots and `cu_q`
            for row, start, end in spans(plan):
                if self.on_device(row):
                    continue
                packed[first + start : first + end] = DUMMY_SLOT
        return packed

    def on_device(self, row: PlannedRow) -> bool:
        """Does what the device samples settle a row? Penalties depend on the guesses before each place."""
        return not (row.request in self.slots.on_host or (row.drafts and row.request.generation.params.adjusts_logits))

    def handle(self, plan: Plan, slots: list[int], outputs: StepOutputs) -> StepHandle:
        """Steps with guesses are waited for: the next guesses begin where these end."""
        if not plan.has_drafts:
            return super().handle(plan, slots, outputs)
        tokens, arrived = self.bring(outputs.tokens[: plan.num_tokens])
        arrived.synchronize()
        sampled = tokens.tolist()
        results = []
        for (row, start, end), slot in zip(spans(plan), slots, strict=True):
            given = self.settle(row, outputs.logits[start:end], sampled[start:end])
            if not self.on_device(row):
                self.tell_device(row, slot, [token.token_id for token in given if token.error is None])
            results.append(RowResult(given))
        return Handle(StepResult(tuple(results)))

    def tell_device(self, row: PlannedRow, slot: int, token_ids: list[int]) -> None:
        """What the host chose, as far as the device goes on from it: the newest token, and what penalties count."""
        if not row.drafts and token_ids:
            self.state.edit("last_token", slot, token_ids[-1])
        if row.request not in self.slots.on_host:
            self.state.count_tokens(slot, token_ids)

    def settle(self, row: PlannedRow, logits: Tensor, sampled: list[int]) -> tuple[SampledToken, ...]:
        """A row's tokens: the guesses that stand and one more. logits [1 + k, V], sampled [1 + k] of its places."""
        generation, drafts = row.request.generation, row.drafts
        probs = self.probs.get(row.request)
        if drafts and probs is not None and self.rule == "ratio" and not generation.params.greedy:
            return by_ratio(logits, generation, drafts, probs[: len(drafts)])
        if self.on_device(row):
            count = matching(drafts, sampled)
            return tuple(row_result(token).tokens[0] for token in sampled[: count + 1])
        chosen = sample(logits, prefixes(generation, drafts))
        return tuple(chosen[: matching(drafts, [token.token_id for token in chosen]) + 1])


def spans(plan: Plan) -> list[tuple[PlannedRow, int, int]]:
    """Each row and which of the step's tokens are its own."""
    ends = list(accumulate(row.span.num_new for row in plan.rows))
    return [(row, end - row.span.num_new, end) for row, end in zip(plan.rows, ends, strict=True)]
