"""What Hugging Face makes of logits: its own processors in its own order, to compare a sampler with."""

from collections.abc import Sequence

import torch


def processed_logits(
    logits: torch.Tensor,
    ids: Sequence[int] = (),
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> torch.Tensor:
    """Logits [V] after repetition penalty, temperature, top-k, top-p and min-p, in this order; what is cut is -inf.

    Args:
        logits: fp32 [V] of one position.
        ids: Prompt and generated ids, which the repetition penalty looks at.
        temperature: Above 0. The other arguments are off at their defaults, as in `generate`.
    """
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = LogitsProcessorList()
    if repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    if temperature != 1.0:
        processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        processors.append(MinPLogitsWarper(min_p))
    return processors(torch.tensor([list(ids)]).long(), logits.float()[None].clone())[0]  # type: ignore[arg-type]


def probabilities(logits: torch.Tensor, ids: Sequence[int] = (), **settings: float) -> torch.Tensor:
    """Distribution [V] from which `generate(do_sample=True)` draws; arguments as in `processed_logits`."""
    return processed_logits(logits, ids, **settings).softmax(-1)  # type: ignore[arg-type]
