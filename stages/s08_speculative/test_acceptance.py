"""Both rules give what the model gives: 50,000 draws at the first place, in the middle, and of the token after all."""

import math

import pytest
import torch

from stages.s01_forward.race import race
from stages.s01_forward.sampler import SamplingBatch, choose
from stages.s01_forward.sampling_params import SamplingParams
from stages.s08_speculative.acceptance import draw, matching, ratio_rule
from stages.s08_speculative.verify import After, distributions

DRAWS = 50_000
LOGITS = [2.0, 1.5, 1.0, 0.2, -1.0]
FAR = [-1.0, 0.1, 0.3, 2.0, 2.5]  # of a draft model that thinks otherwise
FIRST = [1.0, 0.0, 0.0, 0.0, 0.0]  # at a place where there is no doubt


def softmax(logits, **params) -> list[float]:
    """The distribution after temperature and filters."""
    row = After(SamplingParams(**{"temperature": 1.0, **params}), [9], [], 0, [])
    return distributions(torch.tensor([logits]), [row])[0].tolist()


def assert_drawn_from(tokens, p) -> None:
    """Chi-square at one in a million; what has no probability never comes."""
    total, counts = len(tokens), torch.tensor(tokens, dtype=torch.int64).bincount(minlength=len(p)).tolist()
    assert [count for count, each in zip(counts, p, strict=True) if each == 0] == [0] * p.count(0)
    cells = [(count, total * each) for count, each in zip(counts, p, strict=True) if each]
    assert min(expected for _, expected in cells) > 5
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    degrees = max(len(cells) - 1, 1)
    # Wilson and Hilferty 1931: the cube root of a chi-square over its degrees is nearly normal.
    limit = degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit, (counts, p)


@torch.inference_mode()
def ratio_answers(p, q, seed=0, count=DRAWS) -> tuple[list[list[int]], int]:
    """Answers by the ratio rule to drafts drawn from q [k][V]; and how many tokens of them were drafts."""
    generator = torch.Generator().manual_seed(seed)
    p, q, k = torch.tensor(p), torch.tensor(q), len(q)
    drafts = torch.stack([torch.multinomial(row, count, replacement=True, generator=generator) for row in q]).T.tolist()
    uniform = torch.rand(count, k, generator=generator).tolist()
    noise = torch.empty(count, k + 1, p.shape[-1]).exponential_(generator=generator)
    rows = [ratio_rule(p, q, drafts[i], uniform[i], each) for i, each in enumerate(noise)]
    return rows, sum(len(row) - 1 for row in rows)


P, SHARP = softmax(LOGITS), softmax(LOGITS, temperature=0.5)
NUCLEUS = softmax(LOGITS, temperature=1.3, top_p=0.8)
CASES = {
    "temperature and top-p": (NUCLEUS, softmax(FAR, temperature=1.3, top_p=0.9), DRAWS),
    "q far from p": (P, softmax(FAR), 10_000),
    "temperature": (SHARP, softmax(FAR, temperature=0.8), 10_000),
    "q one-hot": (P, [0.0, 0.0, 1.0, 0.0, 0.0], 10_000),
    "disjoint": (softmax(LOGITS, top_k=2), softmax(FAR, top_k=2), 10_000),
}


@pytest.mark.parametrize("case", CASES)
def test_ratio_rule_at_the_first_place(case):
    p, q, count = CASES[case]
    rows, accepted = ratio_answers([p, P], [q], count=count)
    assert_drawn_from([row[0] for row in rows], p)
    share = sum(min(a, b) for a, b in zip(p, q, strict=True))  # Leviathan et al. 2023, theorem 3.5
    assert accepted / count == pytest.approx(share, abs=0.02)
    assert (accepted == 0) == (case == "disjoint")


def test_ratio_rule_in_the_middle():
    """After a draft that stands for certain: what comes second, and what comes third where that stands too."""
    p, q, count = CASES["temperature and top-p"]
    rows, _ = ratio_answers([FIRST, p, SHARP], [FIRST, q], count=count)
    assert {row[0] for row in rows} == {0}
    assert_drawn_from([row[1] for row in rows], p)
    assert_drawn_from([row[2] for row in rows if len(row) == 3], SHARP)


def test_ratio_rule_when_the_draft_model_is_the_model():
    """q = p: all drafts stand, and every place is distributed as p, independently; the bonus comes from the last p."""
    rows, accepted = ratio_answers([P, NUCLEUS, SHARP], [P, NUCLEUS])
    assert accepted == 2 * DRAWS
    for place, p in enumerate((P, NUCLEUS, SHARP)):
        assert_drawn_from([row[place] for row in rows], p)
    assert_drawn_from([5 * row[0] + row[1] for row in rows], [a * b for a in P for b in NUCLEUS])


@pytest.mark.parametrize(
    ("p", "q", "draft", "uniform", "stands"),
    [
        (0.5, 0.5, 0, 1 - 2**-24, True),
        (0.25, 0.5, 0, 0.499, True),
        (0.25, 0.5, 0, 0.5, False),
        (0.0, 0.5, 0, 0.0, False),  # the model would never say it
        (0.0, 0.0, 0, 0.0, False),
        (0.5, math.nan, 0, 0.0, False),  # a draft model that is broken
    ],
)
def test_on_the_edge(p, q, draft, uniform, stands):
    rows = torch.tensor([[p, 1 - p], [1.0, 0.0]])
    answer = ratio_rule(rows, torch.tensor([[q, 1 - q]]), [draft], [uniform], torch.ones(2, 2))
    assert answer == ([0, 0] if stands else [1 if p < 1 - p or not math.isnan(q) else 0])


def test_without_drafts_it_is_a_plain_draw():
    noise = torch.tensor([[0.1, 5.0, 5.0]])
    assert ratio_rule(torch.tensor([[0.2, 0.3, 0.5]]), torch.empty(0, 3), [], [], noise) == [0]


def test_a_race_is_a_draw():
    noise = torch.empty(DRAWS, 5).exponential_(generator=torch.Generator().manual_seed(2))
    assert_drawn_from([draw(torch.tensor(NUCLEUS), each) for each in noise[:20_000]], NUCLEUS)


# ---- sample and match ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafts", "sampled", "count"),
    [
        ([], [5], 0),
        ([5], [5, 6], 1),
        ([5], [6, 7], 0),
        ([5, 6, 7], [5, 9, 7, 8], 1),  # what comes after the first that falls is worth nothing, though it is equal
        ([5, 6, 7], [5, 6, 7, 8], 3),
        ([0, 0], [0, 0, 0], 2),
    ],
)
def test_matching(drafts, sampled, count):
    assert matching(drafts, sampled) == count


@pytest.mark.parametrize(
    ("params", "draft"),
    [({"temperature": 0.5}, 0), ({"temperature": 1.3, "top_p": 0.8}, 0), ({"temperature": 1.0}, 3)],
    ids=str,
)
def test_match_rule_is_plain_sampling(params, draft):
    """Whatever is guessed: what comes first, in the middle and last are draws from the model, and those of its seed."""
    sampling, p = SamplingParams(**params), softmax(LOGITS, **params)
    places = []
    for place in range(3):
        batch = SamplingBatch.of([After(sampling, [9], [1] * place, 0, [])], torch.device("cpu"))
        wishes = (batch.temperature, batch.top_k, batch.top_p, batch.min_p)
        columns = [column.expand(DRAWS) for column in (*wishes, batch.position)]
        many = SamplingBatch(*columns[:4], seed=torch.arange(DRAWS), position=columns[4])
        places.append(choose(torch.tensor([LOGITS]).expand(DRAWS, -1), many).tolist())
    given = [row[: matching([draft, draft], row) + 1] for row in zip(*places, strict=True)]
    assert [row[0] for row in given] == places[0], "nothing but the model's own choice"
    assert_drawn_from(places[0], p)
    for place in (1, 2):
        reached = [row[place] for row in given if len(row) > place]
        assert len(reached) == pytest.approx(DRAWS * p[draft] ** place, rel=0.1)
        if len(reached) > 5000:
            assert_drawn_from(reached, p)


def agreement(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """How often each thing wins both races [n], run with the same noise for weights p and q [n]."""
    return torch.stack([1 / torch.maximum(p / p[i], q / q[i]).sum() for i in range(len(p))])


@pytest.mark.parametrize("tokens", [[0, 1, 2, 3, 4], [0, 255, 256, 400, 599]], ids=["one group", "three groups"])
def test_common_noise_agrees_as_often_as_it_should(tokens):
    """Model and draft model draw with the same noise: both races must agree, first of groups, then of tokens."""
    at, p, q = torch.tensor(tokens), torch.tensor(P).double(), torch.tensor(softmax(FAR, temperature=2.0)).double()
    logits = torch.full((2, 600), -math.inf).index_copy(1, at, torch.stack([p, q]).log().float())
    seeds = torch.arange(20_000)
    mine, guessed = (race(each.expand(20_000, -1), seeds, seeds) for each in logits)
    of_groups = [(p[at // 256 == g], q[at // 256 == g]) for g in (at // 256).unique()]
    groups = agreement(*(torch.stack([each[n].sum() for each in of_groups]) for n in (0, 1)))
    expected = sum(share * agreement(*each).sum() for share, each in zip(groups, of_groups, strict=True)).item()
    assert (mine == guessed).double().mean().item() == pytest.approx(expected, abs=0.012)
    assert expected < torch.minimum(p, q).sum()
