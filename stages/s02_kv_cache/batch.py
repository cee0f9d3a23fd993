"""Several sequences as one flat row of tokens, and who is waiting for the answer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.s01_forward.generation import Generation
from stages.s01_forward.inputs import PromptRequest
from stages.s02_kv_cache.sequence import NewTokens, Sequence


@dataclass(frozen=True)
class Batch:
    """What R sequences compute in this step: T tokens in all, each sequence's new ones side by side."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    cu_q: list[int]  # [R + 1]: row r computes tokens cu_q[r] .. cu_q[r + 1] - 1 of the T
    seq_lens: list[int]  # [R]: keys that each row attends to, the new ones included

    @classmethod
    def of(cls, sequences: Rows[NewTokens], device: torch.device) -> Batch:
        """The new tokens of each sequence. Prefill and decode differ in nothing but how many there are."""
        ids = [token_id for seq in sequences for token_id in seq.token_ids[seq.num_kv : seq.num_tokens]]
        positions = [position for seq in sequences for position in range(seq.num_kv, seq.num_tokens)]
        return cls(
            input_ids=torch.tensor(ids, device=device),
            positions=torch.tensor(positions, device=device),
            cu_q=list(itertools.accumulate((seq.num_new for seq in sequences), initial=0)),
            seq_lens=[seq.num_tokens for seq in sequences],
        )

    @property
    def last_tokens(self) -> list[int]:
        """[R]: where each row's newest token stands among the T; its hidden state predicts the next one."""
        return [end - 1 for end in self.cu_q[1:]]


@dataclass(frozen=True)
class Row:
    """An answer in the making and the sequence that is computed for it."""

    request: PromptRequest
    generation: Generation
    sequence: Sequence
