"""Read later: a draw from each row's softmax by two races, first for a group of neighbouring tokens, then within it.

A race draws one of several things by their weights: the largest log w_i - log e_i wins, each e_i drawn from Exp(1). For
e_i / w_i is exponential with rate w_i, and the least of such times is that of i with probability w_i / (sum of all w).
It is the Gumbel-max trick, -log e being a Gumbel variable (Maddison, Tarlow and Minka 2014, "A* Sampling").
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from stages.s01_forward.noise import exponential_noise

GROUP = 256  # neighbouring tokens that first race as one
GROUP_NUMBERS = 2**31  # a token's noise is that of its id; a group's that of its number, counted from here on


def race(logits: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Token ids int64 [N] from fp32 logits [N, V], each row drawn by its seed and position, int64 [N].

    With W_g the sum of a group's weights, group g wins with W_g / W and then its token i with w_i / W_g: together
    w_i / W. So a row needs noise for V / GROUP + GROUP numbers, not for V. Tokens of -inf, and groups of nothing else,
    never win; a row with NaN or inf, or without any token, gets some id.
    """
    N, V = logits.shape
    size = min(GROUP, V)
    groups = pad(logits, (0, -V % size), value=float("-inf")).unflatten(1, (-1, size))  # [N, G, size]
    numbers = GROUP_NUMBERS + torch.arange(groups.shape[1], device=logits.device)  # [G]
    group = (groups.logsumexp(-1) - exponential_noise(seed, position, numbers).log()).argmax(-1)  # [N]
    tokens = group[:, None] * size + torch.arange(size, device=logits.device)  # [N, size]
    within = groups[torch.arange(N, device=logits.device), group]  # [N, size]
    winner = (within - exponential_noise(seed, position, tokens).log()).argmax(-1)  # [N]
    return group * size + winner
