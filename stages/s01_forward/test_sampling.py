"""From logits to tokens: filters and penalties against Hugging Face's, draws against their distribution."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.s01_forward.constraint import Constraint
from stages.s01_forward.inputs import answer_seed
from stages.s01_forward.noise import exponential_noise
from stages.s01_forward.outputs import NOT_FINITE
from stages.s01_forward.sampler import (
    SamplingBatch,
    adjust,
    choose,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    prompt_logprobs,
    sample,
)
from stages.s01_forward.sampling_params import SamplingParams

NAN, INF = math.nan, math.inf
PINNED = [
    [0.6813889, 0.8891274, 0.4342012],
    [0.4732429, 0.4405134, 0.235963],
    [0.1842183, 0.4141762, 0.6122724],
    [0.1952936, 0.0436586, 0.2020076],
]  # uniform draws of four (seed, position) and three tokens, computed with Python's integers


@dataclass
class Row:
    """A sequence as the sampler sees it."""

    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_token_ids: list[int] = field(default_factory=lambda: [0])
    token_ids: list[int] = field(default_factory=list)
    seed: int = 0
    banned_token_ids: list[int] = field(default_factory=list)
    constraint: Constraint | None = None


def row(seed: int = 0, prompt: list[int] | None = None, output: list[int] | None = None, **keys: Any) -> Row:
    return Row(SamplingParams(**keys), prompt or [0], output or [], seed)


def chosen(logits: Tensor, rows: list[Row]) -> list[int]:
    return [token.token_id for token in sample(logits, rows)]


def kept(logits: Tensor) -> list[set[int]]:
    return [set(torch.isfinite(r).nonzero().flatten().tolist()) for r in logits]


def random_logits(seed: int, *shape: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """In units of its own spread: about N(0, 1) when the counts follow the probabilities."""
    expected = probs * counts.sum()
    degrees = len(probs) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


# ---- filters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probs", "p", "expected"),
    [
        ([0.6, 0.25, 0.1, 0.05], 0.8, {0, 1}),
        ([0.6, 0.25, 0.1, 0.05], 0.05, {0}),
        ([0.6, 0.25, 0.1, 0.05], 1.0, {0, 1, 2, 3}),
        ([0.5, 0.25, 0.125, 0.125], 0.5, {0}),
        ([0.5, 0.25, 0.125, 0.125], 0.75, {0, 1}),
        ([0.1, 0.05, 0.6, 0.25], 0.8, {2, 3}),
        ([0.25] * 4, 1e-30, {0}),
    ],
    ids=str,
)
def test_the_token_that_crosses_top_p_stays(probs, p, expected):
    """rasbt/reasoning-from-scratch#164."""
    assert kept(keep_top_p(torch.tensor([probs]).log(), torch.tensor([p]))) == [expected]


def test_filters_are_per_row():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(4, 1)
    assert kept(keep_top_k(logits, torch.tensor([1, 3, 2**31, 2]))) == [{0}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1}]
    assert kept(keep_top_p(logits, torch.tensor([0.1, 1.0, 0.8, 0.95]))) == [{0}, {0, 1, 2, 3}, {0, 1}, {0, 1, 2}]
    assert kept(keep_min_p(logits, torch.tensor([1.0, 0.0, 0.2, 0.05]))) == [{0}, {0, 1, 2, 3}, {0, 1}, {0, 1, 2}]


def test_equals_of_the_kth_stay():
    assert kept(keep_top_k(torch.tensor([[1.0, 2.0, 1.0, 0.0]]), torch.tensor([2]))) == [{0, 1, 2}]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([2, 7, 50]),
    temperature=st.sampled_from([0.01, 0.3, 1.0, 1.7, 20.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 49, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_distribution_of_hugging_face(seed, size, temperature, top_k, top_p, min_p):
    """Temperature, top-k, top-p, min-p in this order leave the same tokens with the same probabilities."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = random_logits(seed, 1, size)
    theirs = TemperatureLogitsWarper(temperature)(None, logits)
    theirs = TopKLogitsWarper(top_k)(None, theirs) if top_k else theirs
    theirs = TopPLogitsWarper(top_p)(None, theirs)
    theirs = MinPLogitsWarper(min_p)(None, theirs) if min_p else theirs
    probs = theirs.softmax(-1)[0]

    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    batch = SamplingBatch.of([row(**params)], logits.device)
    mine = keep_min_p(
        keep_top_p(keep_top_k(logits / batch.temperature[:, None], batch.top_k), batch.top_p), batch.min_p
    )
    torch.testing.assert_close(mine.softmax(-1)[0], probs)
    draws = chosen(logits.expand(64, size), [row(seed=s, **params) for s in range(64)])
    assert set(draws) <= set(probs.nonzero().flatten().tolist())


# ---- penalties, bias, bans -------------------------------------------------------------------------------------------


def test_repetition_counts_the_prompt():
    """Once per distinct token, and negative logits are multiplied. vllm-project/vllm#1577."""
    logits = torch.tensor([2.0, -1.0, 0.5, 1.9])
    repetition = row(prompt=[0, 0, 1], repetition_penalty=2.0)
    torch.testing.assert_close(adjust(logits, repetition), torch.tensor([1.0, -2.0, 0.5, 1.9]))
    assert chosen(logits[None], [repetition]) == [3]
    for keys in ({"presence_penalty": 1.0}, {"frequency_penalty": 1.0}):
        assert torch.equal(adjust(logits, row(prompt=[0, 0, 1], **keys)), logits), "these look at the output only"


def test_presence_counts_once_and_frequency_each_time():
    logits = torch.zeros(4)
    torch.testing.assert_close(
        adjust(logits, row(output=[1, 1, 3], presence_penalty=0.5)), torch.tensor([0.0, -0.5, 0.0, -0.5])
    )
    torch.testing.assert_close(
        adjust(logits, row(output=[1, 1, 3], frequency_penalty=0.5)), torch.tensor([0.0, -1.0, 0.0, -0.5])
    )
    assert torch.equal(logits, torch.zeros(4)), "the caller's logits are left alone"


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    prompt=st.lists(st.integers(0, 19), min_size=1, max_size=12),
    output=st.lists(st.integers(0, 19), max_size=12),
    repetition=st.sampled_from([0.5, 1.0, 1.3, 2.0]),
    bias=st.dictionaries(st.integers(0, 19), st.floats(-50, 50, width=32), max_size=4),
    min_tokens=st.integers(0, 14),
)
def test_processors_of_hugging_face(seed, prompt, output, repetition, bias, min_tokens):
    """Bias, repetition penalty and the ban on end tokens, in Hugging Face's order."""
    from transformers import (
        LogitsProcessorList,
        MinNewTokensLengthLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
    )

    ids, logits = torch.tensor([prompt + output]), random_logits(seed, 1, 20)
    theirs = LogitsProcessorList()
    if bias:
        theirs.append(SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]))
    if repetition != 1.0:
        theirs.append(RepetitionPenaltyLogitsProcessor(repetition))
    theirs.append(MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, [3, 7], device="cpu"))
    mine = row(prompt=prompt, output=output, repetition_penalty=repetition, logit_bias=bias, min_tokens=min_tokens)
    mine.banned_token_ids = [3, 7]
    torch.testing.assert_close(adjust(logits[0], mine), theirs(ids, logits.clone())[0])


def test_nothing_to_ban():
    assert torch.equal(adjust(torch.zeros(4), row(min_tokens=3)), torch.zeros(4))


def test_neighbours_with_histories_of_other_lengths():
    """No padding counts as history. huggingface/text-generation-inference#1765."""
    logits = random_logits(0, 4, 30)
    rows = [
        row(prompt=[5, 6], output=[1, 1], frequency_penalty=1.0, temperature=1.0, seed=1),
        row(prompt=list(range(9)), output=[2], frequency_penalty=1.0, repetition_penalty=1.5),
        row(prompt=[3], temperature=0.8, top_k=4, seed=2),
        row(prompt=[4, 4, 4], output=[0] * 7, presence_penalty=2.0, temperature=2.0, top_p=0.7, seed=3),
    ]
    assert chosen(logits, rows) == [chosen(logits[i : i + 1], [r])[0] for i, r in enumerate(rows)]
    assert chosen(logits.flip(0), rows[::-1]) == chosen(logits, rows)[::-1]


def test_a_history_is_not_filled_up_with_id_0():
    """A longer neighbour does not penalise the natural answer. huggingface/text-generation-inference#1765."""
    logits = torch.tensor([[3.0, 2.5, 0.0, 0.0]] * 3)
    rows = [row(output=[2], frequency_penalty=1.0), row(output=[3, 3, 3], frequency_penalty=1.0), row(output=[1] * 5)]
    assert chosen(logits, rows) == [0, 0, 0]


# ---- numbers at the edge ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-39, 5e-324, 0.0])
def test_tiny_temperatures(dtype, temperature):
    """Token 0 each time, and the neighbour draws as if alone. vllm-project/vllm#1623."""
    logits = torch.tensor([[12.0, 11.5, 3.0]] * 2, dtype=dtype)
    for seed in range(20):
        warm = row(temperature=1.0, seed=seed)
        assert chosen(logits, [row(temperature=temperature, seed=seed), warm]) == [0, *chosen(logits[1:], [warm])]


def test_smallest_temperature_that_draws():
    """fp16 logits at the end of their range: the quotient must not overflow."""
    logits = torch.tensor([[65504.0, 65500.0, -65504.0]], dtype=torch.float16)
    assert {chosen(logits, [row(temperature=2e-5, seed=s)])[0] for s in range(20)} <= {0, 1}
    assert chosen(torch.tensor([[1e38, 3e38, -3e38]]), [row(temperature=2e-5, seed=1)]) == [1]


def test_largest_temperature_draws_evenly_and_keeps_bans():
    logits = torch.tensor([[50.0, -50.0, -INF]])
    draws = [chosen(logits, [row(temperature=1e6, seed=s)])[0] for s in range(200)]
    assert 60 < draws.count(0) < 140
    assert 2 not in draws


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_fail_alone(temperature):
    """NaN, +inf or nothing but -inf is an error of that row; one finite logit is enough. vllm-project/vllm#1623."""
    logits = torch.tensor([[1.0, 2.0, 0.0], [1.0, NAN, 0.0], [INF, 0.0, 0.0], [-INF] * 3, [-INF, 0.5, -INF]])
    rows = [row(temperature=temperature, seed=i, logprobs=1) for i in range(5)]
    tokens = sample(logits, rows)
    assert [token.error is not None for token in tokens] == [False, True, True, True, False]
    assert tokens[0].token_id == chosen(logits[:1], rows[:1])[0]
    assert tokens[4].token_id == 1
    assert tokens[4].logprob.logprob == 0.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_of_several_groups(temperature):
    """What breaks one group of tokens breaks its row, and groups whose tokens are all banned break nothing."""
    logits = random_logits(8, 5, 700)
    logits[1, 699], logits[2, 300], logits[3] = NAN, INF, -INF
    logits[4, :690] = -INF
    rows = [row(temperature=temperature, seed=i) for i in range(5)]
    tokens = sample(logits, rows)
    assert [token.error is not None for token in tokens] == [False, True, True, True, False]
    assert tokens[0].token_id == chosen(logits[:1], rows[:1])[0]
    assert tokens[4].token_id >= 690


def test_a_row_with_every_token_banned_fails():
    """Rather than give a token that was forbidden."""
    everything = row(min_tokens=2, repetition_penalty=1.1)
    everything.banned_token_ids = [0, 1, 2]
    tokens = sample(torch.zeros(2, 3), [everything, row()])
    assert tokens[0].error is not None
    assert tokens[1].error is None


@dataclass
class Only:
    """Allows these tokens, whatever came before."""

    token_ids: list[int]
    error: str | None = None

    def allowed(self) -> Tensor:
        return torch.zeros(6, dtype=torch.bool).index_fill(0, torch.tensor(self.token_ids).long(), True)

    def accept(self, token_id: int) -> bool:
        return False

    def after(self, token_ids: Sequence[int]) -> "Only":
        return self


class TestConstraint:
    @pytest.mark.parametrize("keys", [{}, {"temperature": 5.0}, {"logit_bias": {0: 100.0}, "repetition_penalty": 9.0}])
    def test_only_what_is_allowed(self, keys):
        """And the neighbours choose as they would alone."""
        logits = random_logits(3, 40, 6)
        free = [row(seed=i, temperature=1.0) for i in range(20)]
        bound = [row(seed=i, output=[0, 3], **keys) for i in range(20)]
        for each in bound:
            each.constraint = Only([2, 3])
        tokens = chosen(logits, [*free, *bound])
        assert tokens[:20] == chosen(logits[:20], free)
        assert set(tokens[20:]) == {2, 3}

    def test_greedy_takes_the_best_of_the_allowed(self):
        bound = row()
        bound.constraint = Only([1, 4])
        assert chosen(torch.tensor([[9.0, 2.0, 9.0, 9.0, 3.0, 9.0]]), [bound]) == [4]

    @pytest.mark.parametrize(("allowed", "token"), [([1, 5], 1), ([5], 5)])
    def test_an_end_before_min_tokens(self, allowed, token):
        """Not while something else is allowed; but rather that than what is not allowed."""
        bound = row(min_tokens=3)
        bound.banned_token_ids, bound.constraint = [5], Only(allowed)
        assert chosen(torch.tensor([[9.0, 1.0, 9.0, 9.0, 9.0, 9.0]]), [bound]) == [token]

    def test_nothing_is_allowed(self):
        """Its own words, if it has some; the neighbour is not touched."""
        silent, telling = row(), row(temperature=1.0)
        silent.constraint, telling.constraint = Only([]), Only([], "too deep")
        tokens = sample(torch.zeros(3, 6), [silent, row(), telling])
        assert [token.error for token in tokens] == [NOT_FINITE, None, "too deep"]


# ---- randomness ------------------------------------------------------------------------------------------------------


def noise(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    return exponential_noise(*torch.broadcast_tensors(seeds, positions), torch.arange(size))


def test_draws_follow_the_softmax():
    """30,000 draws at three temperatures; the race is exact, not an approximation."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -3.0, 1.5]])
    for temperature in (0.7, 1.0, 3.0):
        batch = SamplingBatch.of([row(seed=s, temperature=temperature) for s in range(10_000)], logits.device)
        counts = choose(logits.expand(10_000, 6), batch).bincount(minlength=6)
        assert chi_square(counts, (logits[0] / temperature).softmax(-1)) < 4


def test_filtered_draws_follow_what_is_left():
    """Target logits 2, 1, 0, -1 at temperature 0.5 with top-k 2: 0.8808 and 0.1192."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    batch = SamplingBatch.of([row(seed=s, temperature=0.5, top_k=2) for s in range(10_000)], logits.device)
    counts = choose(logits.expand(10_000, 4), batch).bincount(minlength=4)
    assert counts[2:].sum() == 0
    assert counts[0].item() / 10_000 == pytest.approx(0.8808, abs=0.013)


def test_noise_is_exponential():
    """Moments, and the share below each of 20 quantiles, of a million draws."""
    draws = noise(torch.arange(100), torch.tensor(7), 10_000).flatten().double()
    assert draws.min() > 0
    assert torch.isfinite(draws).all()
    assert draws.mean().item() == pytest.approx(1.0, abs=0.004)
    assert draws.var().item() == pytest.approx(1.0, abs=0.01)
    counts = ((1 - (-draws).exp()) * 20).long().clamp(max=19).bincount(minlength=20)
    assert chi_square(counts, torch.full((20,), 0.05, dtype=torch.float64)) < 4


@pytest.mark.parametrize("what", ["seeds", "positions", "high seeds", "tokens", "answers"])
def test_neighbouring_draws_are_independent(what):
    """A table of 8 x 8 quantiles of pairs one apart: seeds, positions, the seed's high half, token ids, answers."""
    count, at = 2000, torch.arange(2000)
    if what == "seeds":
        first, second = noise(at, torch.tensor(5), 50), noise(at + 1, torch.tensor(5), 50)
    elif what == "positions":
        first, second = noise(torch.tensor(3), at, 50), noise(torch.tensor(3), at + 1, 50)
    elif what == "high seeds":
        first, second = noise(at, torch.tensor(5), 50), noise(at + 2**32, torch.tensor(5), 50)
    elif what == "tokens":
        both = noise(at, torch.tensor(5), 51)
        first, second = both[:, :-1], both[:, 1:]
    else:
        seeds = [torch.tensor([answer_seed(s, index) for s in range(count)]) for index in (0, 1)]
        first, second = (noise(s, torch.tensor(5), 50) for s in seeds)
    cells = ((1 - (-first).exp()) * 8).long().clamp(max=7) * 8 + ((1 - (-second).exp()) * 8).long().clamp(max=7)
    assert chi_square(cells.flatten().bincount(minlength=64), torch.full((64,), 1 / 64)) < 4


def test_no_row_is_a_shift_of_another():
    """Sets of values of 300 rows hardly overlap: no two rows walk the same stream."""
    rows = noise(torch.arange(300), torch.tensor(9), 200)
    assert len(rows.flatten().unique()) > 0.99 * rows.numel()


def test_each_step_draws_anew():
    """Uniform logits over 1,000 tokens: distinct, repeatable, another seed differs. vllm-project/vllm-metal#50."""

    def run(seed: int, start: int = 0, output: list[int] | None = None) -> list[int]:
        output = list(output or [])
        for _ in range(start, 20):
            output += chosen(torch.zeros(1, 1000), [row(seed=seed, output=output, temperature=1.0)])
        return output

    first = run(1)
    assert len(set(first)) >= 18
    assert run(1) == first
    assert run(2) != first
    assert run(1, start=7, output=first[:7]) == first, "a request that was stopped goes on, it does not start again"


def test_the_draw_does_not_depend_on_the_machine():
    """Pinned values: a change of the noise changes every seeded answer that users have seen."""
    seeds, positions = torch.tensor([0, 1, -1, 2**63 - 1]), torch.tensor([0, 7, 7, 2**40])
    uniform = 1 - (-exponential_noise(seeds, positions, torch.arange(3)).double()).exp()
    expected = torch.tensor(PINNED, dtype=torch.float64)
    torch.testing.assert_close(uniform, expected, atol=1e-6, rtol=0)


def test_seeds_of_answers():
    seeds = [answer_seed(s, i) for s in (0, 1, 2**64 - 1, -(2**63)) for i in range(128)]
    assert all(-(2**63) <= s < 2**63 for s in seeds)
    assert len(set(seeds)) == len(seeds)
    assert answer_seed(5, 0) == 5
    assert answer_seed(-5, 0) == -5


# ---- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_rank_and_alternatives():
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    (token,) = sample(logits, [row(logprobs=2, logit_bias={3: 90.0})])
    expected = logits[0].log_softmax(-1)
    assert token.token_id == 3
    assert token.logprob.rank == 4
    assert token.logprob.logprob == pytest.approx(expected[3].item())
    assert [i for i, _ in token.logprob.top] == [1, 2]
    assert [v for _, v in token.logprob.top] == pytest.approx(expected[[1, 2]].tolist())
    (all_of_them,) = sample(logits, [row(logprobs=20)])
    assert len(all_of_them.logprob.top) == 4, "no more than there are tokens"
    assert sample(logits, [row()])[0].logprob is None


def test_prompt_logprobs_are_shifted_by_one():
    """Entry i is log P(token i | tokens before it): row i - 1 of the logits. vllm-project/vllm#5846."""
    logits, prompt = random_logits(1, 5, 9), [3, 1, 4, 1, 5]
    entries = prompt_logprobs(logits, prompt, SamplingParams(prompt_logprobs=2))
    assert entries[0] is None
    assert [e.token_id for e in entries[1:]] == prompt[1:]
    for i in range(1, 5):
        assert entries[i].logprob == pytest.approx(logits[i - 1].log_softmax(-1)[prompt[i]].item())
        assert entries[i].top[0][0] == logits[i - 1].argmax().item()


def test_what_the_caller_does_with_its_lists_later_changes_nothing():
    stop, ids, bias = ["a"], [3], {4: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append(5)
    ids.append("x")
    bias[6] = float("nan")
    assert (list(params.stop), list(params.stop_token_ids), dict(params.logit_bias)) == (["a"], [3], {4: 1.0})
