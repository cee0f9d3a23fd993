"""How every slot wants its tokens chosen, as columns on the device, and what the two samplers share."""

from dataclasses import dataclass

from torch import Tensor

MOST_SEEN = 2**15 - 1  # the largest int16: the history of a token stays below it, it never wraps


@dataclass(frozen=True)
class SamplingColumns:
    """One entry per slot [S]; views of the engine's device state.

    `history` is updated by the samplers for the slots that have a penalty on, slot 0 (padding) never.
    """

    temperature: Tensor  # fp32, 0 = greedy
    top_k: Tensor  # int32, 0 = no limit
    top_p: Tensor  # fp32, 1 = off
    min_p: Tensor  # fp32, 0 = off
    repetition: Tensor  # fp32, 1 = off
    presence: Tensor  # fp32, 0 = off
    frequency: Tensor  # fp32, 0 = off
    seed_low: Tensor  # int32: the bits of the 64-bit seed's low half
    seed_high: Tensor  # int32: those of its high half
    history: Tensor  # int16 [S, V]: 2 * (times in the output) + (1 if in the prompt)


def check_rows(logits: Tensor, slots: Tensor, positions: Tensor, columns: SamplingColumns) -> None:
    """Raises ValueError where the shapes of `sample_rows`' arguments do not fit together."""
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; they must be [N, V] with V > 0 and contiguous rows")
    N, V = logits.shape
    if slots.shape != (N,) or positions.shape != (N,):
        shapes = f"{tuple(slots.shape)} and {tuple(positions.shape)}"
        raise ValueError(f"slots and positions have shapes {shapes}; the logits have {N} rows")
    if columns.history.shape[1] != V or columns.history.stride(1) != 1:
        raise ValueError(f"the history counts {columns.history.shape[1]} tokens; the logits score {V}")
