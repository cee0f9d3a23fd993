"""Hugging Face's `generate` on many prompts: padded into one batch, or one after the other. Greedy, no early end."""

from collections.abc import Sequence
from typing import Any

import torch

PAD = 0  # any id will do: padding is masked


@torch.inference_mode()
def padded_generate(model: Any, prompts: Sequence[Sequence[int]], output_lens: Sequence[int]) -> list[list[int]]:
    """All prompts as one batch, padded on the left to the longest, stepped until the longest answer is complete.

    Returns each answer cut to the length that was asked for: what a row computes beyond it is the price of the batch.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    answers = _generate(model, ids, mask, max(output_lens))
    return [answer[:length] for answer, length in zip(answers, output_lens, strict=True)]


@torch.inference_mode()
def one_by_one(model: Any, prompts: Sequence[Sequence[int]], output_lens: Sequence[int]) -> list[list[int]]:
    """One `generate` per prompt: nothing is padded, nothing is shared."""
    answers = []
    for prompt, length in zip(prompts, output_lens, strict=True):
        ids = torch.tensor([list(prompt)], device=model.device)
        answers += _generate(model, ids, torch.ones_like(ids), length)
    return answers


def _generate(model: Any, ids: torch.Tensor, mask: torch.Tensor, tokens: int) -> list[list[int]]:
    """Exactly so many new tokens for each row of ids [B, T]."""
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, use_cache=True, pad_token_id=PAD,
        eos_token_id=model.config.vocab_size,  # an id that never comes: no answer ends early
    )  # fmt: skip
    return out[:, ids.shape[1] :].tolist()
