"""`LLM`, the naive way: one sequence at a time, and the whole sequence again for every new token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stages.s01_forward.context import NoCache
from stages.s01_forward.frontend import BaseLLM
from stages.s01_forward.inputs import PromptRequest
from stages.s01_forward.model import Model
from stages.s01_forward.outputs import TokenEvent
from stages.s01_forward.sampler import sample


class LLM(BaseLLM):
    """Recomputes everything at each step. Slow, and right: what all later stages are held against."""

    def run(self, requests: Sequence[PromptRequest]) -> Iterator[TokenEvent]:
        for request in requests:
            score_prompt(self.model, request)
            for generation in request.generations:
                while generation.finish_reason is None:
                    hidden = hidden_states(self.model, request.prompt_token_ids + generation.token_ids)
                    logits = self.model.logits(hidden[-1:])  # [1, V]: the last token's state predicts the next
                    event = generation.append(sample(logits, [generation])[0])
                    request.note_time()
                    yield event


@torch.inference_mode()
def hidden_states(model: Model, token_ids: Sequence[int]) -> Tensor:
    """The whole sequence of T tokens in one forward pass without a cache -> hidden [T, H]."""
    ids = torch.tensor(token_ids, device=model.cos.device)  # [T]
    return model(ids, torch.arange(len(token_ids), device=ids.device), NoCache(model.ops))


def score_prompt(model: Model, request: PromptRequest) -> None:
    """Fill in the request's `prompt_logprobs`, if it wants them: row t of the logits [T, V] scores token t + 1."""
    if request.params.prompt_logprobs is not None:
        request.score(model.logits(hidden_states(model, request.prompt_token_ids)))
