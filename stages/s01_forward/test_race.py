"""Two races make one draw: against the definition in plain Python, and against the distribution over several groups."""

import math

import pytest
import torch
from torch import Tensor

from stages.s01_forward.noise import MASK, exponential_noise
from stages.s01_forward.race import GROUP, GROUP_NUMBERS, race

INF = math.inf
SIZE = 3 * GROUP + 40  # three groups and a part of one
ROWS = 12_000


def spread(size: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(size))


def only(tokens: list[int], logits: Tensor) -> Tensor:
    return torch.full_like(logits, -INF).index_copy(0, torch.tensor(tokens), logits[tokens])


def drawn(logits: Tensor, count: int = ROWS) -> Tensor:
    """Token ids [count]: the same logits [V] at as many positions of a few seeds."""
    at = torch.arange(count)
    return race((logits - logits.max()).expand(count, -1), at % 7, at)


def chi_square(token_ids: Tensor, probs: Tensor) -> float:
    """In units of its own spread; inf for an impossible token. Those expected less than ten times are one class."""
    counts, expected = token_ids.bincount(minlength=len(probs)).double(), probs * len(token_ids)
    if bool((counts[expected == 0] > 0).any()):
        return INF
    rare = expected < 10
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    degrees = max(len(counts) - 1, 1)
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


# ---- the definition --------------------------------------------------------------------------------------------------


def by_hand(logits: list[float], seed: int, position: int) -> int:
    """In Python's integers and float64."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
        x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
        return x ^ (x >> 16)

    key = mix(mix(mix(seed & MASK) ^ (seed >> 32 & MASK)) ^ (position & MASK))

    def score(weight: float, number: int) -> float:
        u = (mix(mix(number ^ key) ^ mix(key ^ 0x9E3779B9)) + 0.5) / 2**32
        return math.log(weight) - math.log(-math.log1p(-u)) if weight else -INF

    weights = [math.exp(x - max(logits)) for x in logits]
    groups = [weights[first : first + 256] for first in range(0, len(weights), 256)]
    group = max(range(len(groups)), key=lambda g: score(sum(groups[g]), 2**31 + g))
    return 256 * group + max(range(len(groups[group])), key=lambda i: score(groups[group][i], 256 * group + i))


@pytest.mark.parametrize("size", [1, 5, 255, 256, 257, 512, 1000])
def test_equals_the_definition(size):
    """A change of it changes every seeded answer that users have seen."""
    logits = torch.stack([spread(size, scale) for scale in (0.0, 0.5, 2.0, 20.0)] * 10)
    logits[20:, : size - 1 : 3] = -INF
    seeds, positions = torch.arange(40) * 2**58 - 2**62, torch.arange(40) ** 5
    each = zip(logits.tolist(), seeds.tolist(), positions.tolist(), strict=True)
    assert race(logits, seeds, positions).tolist() == [by_hand(*one) for one in each]


def test_noise_of_groups_and_of_tokens_is_not_the_same():
    at = torch.arange(2000)
    tokens = exponential_noise(at, at, torch.arange(50))
    groups = exponential_noise(at, at, GROUP_NUMBERS + torch.arange(50))
    cells = ((1 - (-tokens).exp()) * 8).long().clamp(max=7) * 8 + ((1 - (-groups).exp()) * 8).long().clamp(max=7)
    assert abs(chi_square(cells.flatten(), torch.full((64,), 1 / 64))) < 4


# ---- the distribution ------------------------------------------------------------------------------------------------

GROUPED = {
    "flat": torch.zeros(SIZE),
    "spread": spread(SIZE),
    "peaked": spread(SIZE).index_add(0, torch.tensor([3, 255, 256, 600, 807]), torch.tensor([6.0, 5.0, 6.0, 7.0, 6.5])),
    "a heavy group": spread(SIZE).index_fill(0, torch.arange(GROUP, 2 * GROUP), 3.0),
    "many against one": only([5, *range(GROUP, 2 * GROUP)], torch.zeros(SIZE).index_fill(0, torch.tensor(5), 5.0)),
    "two against one": only([0, 1, 300], torch.zeros(SIZE)),
    "one in each group": only([9, 400, 767, 807], spread(SIZE, 1.0)),
    "one alone": only([700], torch.zeros(SIZE)),
    "groups without any": only([*range(300, 310), *range(770, 780)], spread(SIZE)),
}


@pytest.mark.parametrize("logits", GROUPED.values(), ids=GROUPED.keys())
def test_draws_follow_the_softmax(logits):
    assert abs(chi_square(drawn(logits), logits.double().softmax(0))) < 4


@pytest.mark.parametrize("size", [1, 2, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP])
def test_every_token_of_any_vocabulary_wins_equally_often(size):
    """What fills up the last group never wins."""
    assert abs(chi_square(drawn(torch.zeros(size)), torch.full((size,), 1 / size))) < 4


def test_tokens_of_neighbouring_rows_are_independent():
    """Of a flat vocabulary of two and a half groups: the groups that win at one seed and position, and at the next."""
    groups = drawn(torch.zeros(5 * GROUP // 2)) // GROUP
    probs = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    assert abs(chi_square(3 * groups[::2] + groups[1::2], probs.outer(probs).flatten())) < 4


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("a heavy group", (Tensor, "logsumexp", Tensor.amax)),  # a group races with its best token, not with the sum
        ("two against one", ("stages.s01_forward.race.GROUP_NUMBERS", 0)),  # and with the noise of a token
    ],
)
def test_chi_square_sees_a_wrong_race(name, fault, monkeypatch):
    monkeypatch.setattr(*fault)
    assert chi_square(drawn(GROUPED[name]), GROUPED[name].double().softmax(0)) > 10


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [math.nan, INF, -INF])
def test_a_row_knows_nothing_of_its_neighbours(broken):
    """Alone, among others, among broken ones and as a part of a larger tensor: the same token."""
    logits, at = torch.stack([spread(SIZE, scale / 8) for scale in range(64)]), torch.arange(64)
    together = race(logits, at, at).tolist()
    assert together == [int(race(logits[n : n + 1], at[n : n + 1], at[n : n + 1])) for n in range(64)]
    wide = torch.full((64, SIZE + 9), broken)
    wide[::2, :SIZE] = logits[::2]
    among = race(wide[:, :SIZE], at, at)
    assert among[::2].tolist() == together[::2]
    assert bool(((among >= 0) & (among < 4 * GROUP)).all())


def test_no_rows():
    nothing = torch.empty(0, dtype=torch.int64)
    assert race(torch.empty(0, 300), nothing, nothing).shape == (0,)
