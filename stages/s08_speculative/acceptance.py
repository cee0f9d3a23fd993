"""Which guesses stand: two rules, both exact. What comes out is distributed as if nobody had guessed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def matching(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Sample and match: how many drafts are what the model itself chose in their places.

    `sampled` [k + 1] are the model's choices after 0, 1 .. k drafts. Those up to the first that differs from its draft
    were made after a true prefix, so these are the answer: token for token what plain decoding gives with the same
    noise. At temperature 0 this is greedy verification (Stern et al. 2018).
    """
    return next((place for place, draft in enumerate(drafts) if draft != sampled[place]), len(drafts))


def ratio_rule(p: Tensor, q: Tensor, drafts: Sequence[int], uniform: Sequence[float], noise: Tensor) -> list[int]:
    """Accept draft x with probability min(1, p(x) / q(x)); the first that falls is replaced by a draw from the rest.

    p [k + 1, V]: the model's distributions, after temperature and filters; q [k, V]: those the drafts were drawn from;
    uniform [k] in [0, 1); noise [k + 1, V] from Exp(1). Returns the accepted drafts and one token more: from
    max(p - q, 0), normalised, in the place of the draft that fell, or from the last p if none did.
    A draft with p(x) = 0 never stands, nor one whose q is NaN. If nothing is left of p - q, the draw is from p.
    (Leviathan, Kalman and Matias 2023; Chen et al. 2023. Both prove that each token is then distributed as p.)
    """
    for place, draft in enumerate(drafts):
        p_draft, q_draft = p[place, draft].item(), q[place, draft].item()
        if not uniform[place] * q_draft < p_draft:  # also where q is NaN: a broken draft model decides nothing
            rest = (p[place] - q[place]).clamp(min=0)
            return [*drafts[:place], draw(rest if bool(rest.sum() > 0) else p[place], noise[place])]
    return [*drafts, draw(p[len(drafts)], noise[len(drafts)])]


def draw(weights: Tensor, noise: Tensor) -> int:
    """A token by an exponential race: the argmax of w / e is token i with a probability in proportion to w_i."""
    return int(torch.argmax(weights / noise))
