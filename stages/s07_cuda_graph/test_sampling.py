"""Sampling on the device: the torch version against stage 01, the kernels in Triton's interpreter against torch."""

import copy
import dataclasses
import importlib.util
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.s01_forward.sampler import sample
from stages.s01_forward.sampling_params import SamplingParams
from stages.s07_cuda_graph import sample_torch
from stages.s07_cuda_graph.beforehand import beforehand
from stages.s07_cuda_graph.interpreted import run_filter, run_sample
from stages.s07_cuda_graph.sample_torch import keep, penalise, sample_rows
from stages.s07_cuda_graph.sampling_cases import (
    Case,
    Row,
    chi_square,
    draws_case,
    make_case,
    make_columns,
    probabilities,
)
from stages.s07_cuda_graph.sampling_columns import SamplingColumns

pytest_plugins = ["stages.s07_cuda_graph.beforehand"]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton has no package here")
both_ways = pytest.mark.parametrize("way", ["torch", pytest.param("kernel", marks=needs_triton)])
NAN, INF = torch.nan, torch.inf


def run_torch(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """The token ids [N], and history [S, V] and logits [N, V] afterwards."""
    case = copy.deepcopy(case)
    return sample_rows(*case.inputs), case.columns.history, case.logits


def run_all(way: str, *cases: Case) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [(run_torch if way == "torch" else run_sample)(case) for case in cases]


def spread(vocab_size: int) -> Tensor:
    return 2 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))


# ---- against stage 01 and torch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 130, 1000])
def test_torch_version_equals_stage_01(vocab_size, dtype):
    """Token for token, over every mixture of parameters and every kind of logits, broken ones included."""
    case = make_case(200, vocab_size, 0, dtype)
    expected = [token.token_id for token in sample(case.logits, case.rows)]
    token_ids, history, _ = run_torch(case)
    assert token_ids.tolist() == expected
    assert token_ids.dtype == torch.int32
    assert 5 < expected.count(-1) < 50
    for row, slot, token_id in zip(case.rows, case.slots.tolist(), expected, strict=True):
        if token_id >= 0 and row.params.adjusts_logits:
            row.token_ids.append(token_id)
        assert history[slot].tolist() == [
            2 * row.token_ids.count(n) + (n in row.prompt_token_ids) for n in range(vocab_size)
        ]


def test_torch_version_never_looks_from_the_host(monkeypatch):
    """As on a GPU, where no work is skipped: the same tokens. Tensors without data raise where a value is looked at."""
    case = make_case(200, 130, 0)
    expected = run_torch(case)[0].tolist()
    columns = {name: column.to("meta") for name, column in vars(case.columns).items()}
    inputs = (tensor.to("meta") for tensor in (case.logits, case.slots, case.positions))
    assert sample_rows(*inputs, SamplingColumns(**columns)).shape == (200,)
    monkeypatch.setattr(sample_torch, "needed", lambda flag: True)
    assert run_torch(case)[0].tolist() == expected


def mixture(vocab_size: int, count: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return partial(run_sample, tile=512, chunk=512), make_case(count, vocab_size, 1, dtype)


@needs_triton
@beforehand(mixture)
@pytest.mark.parametrize(
    ("vocab_size", "count", "dtype"),
    [(7, 9, torch.float16), (130, 12, torch.bfloat16), (257, 12, torch.float32), (1000, 24, torch.bfloat16)],
)
def test_kernels_equal_torch(answer, vocab_size, count, dtype):
    token_ids, history, _ = answer
    expected, expected_history, _ = run_torch(make_case(count, vocab_size, 1, dtype))
    assert token_ids.tolist() == expected.tolist()
    assert torch.equal(history, expected_history)


def filters() -> Case:
    """A row for each kind of filter, with ties at every cut."""
    wishes = [
        {"top_k": 1}, {"top_k": 3}, {"top_k": 40}, {"top_p": 0.9}, {"top_p": 0.3}, {"top_p": 1e-30}, {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.95}, {"top_k": 3, "top_p": 0.7, "min_p": 0.3}, {"top_p": 0.999, "temperature": 3.0},
        {"top_k": 2, "frequency_penalty": 0.5}, {"top_p": 0.5, "repetition_penalty": 1.5},
    ]  # fmt: skip
    rows = [Row(SamplingParams(**({"temperature": 1.0} | wish)), [4, 5], [5, 6, 6]) for wish in wishes]
    logits = torch.stack([(spread(300 + n)[:300] * (1 + n % 3)).round() / 4 for n in range(len(rows))])
    logits[1, ::2] = -INF
    logits[3:5] = 0.0  # all equal: the first 90 % and 30 %
    slots = torch.arange(1, len(rows) + 1, dtype=torch.int32)
    return Case(rows, logits, slots, slots.long(), make_columns(rows, slots, 300))


@needs_triton
@beforehand(lambda candidates: (partial(run_filter, candidates=candidates), filters()))
@pytest.mark.parametrize("candidates", [2, 64, 512], ids="room for {}".format)
def test_the_filter_keeps_what_a_stable_sort_keeps(answer, candidates):
    """The whole set of each row; with room for all logits, for some, and for hardly any."""
    (floors, limits), case = answer, filters()
    at = case.slots.long()
    adjusted = penalise(case.logits, at, case.columns)
    temperature = case.columns.temperature[at][:, None]
    kept = keep((adjusted - adjusted.amax(-1, keepdim=True)) / temperature, at, case.columns) > -INF
    tokens = torch.arange(300)
    stays = (adjusted > floors[:, None]) | ((adjusted == floors[:, None]) & (tokens < limits[:, None]))
    assert torch.equal(stays & (adjusted > -INF), kept)
    assert kept.sum(-1)[3:5].tolist() == [270, 90]


# ---- isolation -------------------------------------------------------------------------------------------------------


CHOSEN = [0, 6, 3, 5, 1]  # of eight rows


def neighbours() -> tuple[Case, Case]:
    """Eight rows; and some of them in other places, with broken neighbours and among padding."""
    case, pad = make_case(8, 600, 3), torch.zeros(3, dtype=torch.int32)
    padded = dataclasses.replace(
        case,
        logits=torch.cat([torch.full((1, 600), NAN), case.logits[CHOSEN], spread(1200).view(2, 600)]),
        slots=torch.cat([pad[:1], case.slots[CHOSEN], pad[1:]]),
        positions=torch.cat([pad[:1], case.positions[CHOSEN], pad[1:]]),
    )
    return case, padded


@beforehand(lambda way: (run_all, way, *neighbours()))
@both_ways
def test_a_row_knows_nothing_of_its_neighbours(answer, way):
    """The same token; slot 0 and the logits stay as they are."""
    (token_ids, _, logits), (again, history, _) = answer
    case, _ = neighbours()
    torch.testing.assert_close(logits, case.logits, rtol=0, atol=0, equal_nan=True)
    assert again[0] == -1
    assert again[1:6].tolist() == token_ids[CHOSEN].tolist()
    assert torch.equal(history[0], case.columns.history[0])


def narrow_and_wide() -> tuple[Case, Case]:
    case = make_case(4, 130, 4)
    wide = torch.full((4, 150), INF)
    wide[:, :130] = case.logits
    return case, dataclasses.replace(case, logits=wide[:, :130], positions=case.positions.int())


@beforehand(lambda way: (run_all, way, *narrow_and_wide()))
@both_ways
def test_the_logits_may_be_a_part_of_a_larger_tensor(answer, way):
    (narrow, *_), (wide, *_) = answer
    assert wide.tolist() == narrow.tolist()


def test_no_rows_and_shapes_that_do_not_fit():
    case = make_case(4, 7, 0)
    logits, slots, positions, columns = case.inputs
    assert sample_rows(logits[:0], slots[:0], positions[:0], columns).shape == (0,)
    with pytest.raises(ValueError, match=r"shapes \(3,\) and \(4,\); the logits have 4 rows"):
        sample_rows(logits, slots[:3], positions, columns)
    with pytest.raises(ValueError, match="the history counts 7 tokens; the logits score 6"):
        sample_rows(logits[:, :6], slots, positions, columns)
    with pytest.raises(ValueError, match="must be \\[N, V\\]"):
        sample_rows(logits[0], slots, positions, columns)


# ---- history and broken rows -----------------------------------------------------------------------------------------


def nearly_full() -> Case:
    """Counts around the largest that there is, and one row without a penalty."""
    params = [SamplingParams(presence_penalty=0.5)] * 5 + [SamplingParams(temperature=1.0)]
    slots = torch.arange(1, 7, dtype=torch.int32)
    columns = make_columns([Row(p) for p in params], slots, 3)
    columns.history[1:, 2] = torch.tensor([0, 1, 2**15 - 3, 2**15 - 2, 2**15 - 1, 0])
    logits = torch.tensor([[-1e5, -1e5, 1e5]]).repeat(6, 1)
    return Case([], logits, slots, slots.long(), columns)


@beforehand(lambda way: (run_all, way, nearly_full()))
@both_ways
def test_the_history_saturates(answer, way):
    """Counts end at the largest int16 with their prompt bit kept; without a penalty nothing is counted."""
    [(token_ids, history, _)] = answer
    assert token_ids.tolist() == [2] * 6
    assert history[1:, 2].tolist() == [2, 3, 2**15 - 1, 2**15 - 2, 2**15 - 1, 0]


def choiceless(temperature: float) -> Case:
    """NaN or inf anywhere, or nothing but -inf; the last row has one token to choose."""
    logits = torch.full((5, 300), -1.0)
    logits[0, 299], logits[1, 3], logits[2], logits[4, 0] = NAN, INF, -INF, -INF
    logits[4, 257] = 80.0
    rows = [Row(SamplingParams(temperature=temperature, top_k=2, frequency_penalty=1.0)) for _ in range(5)]
    slots = torch.arange(1, 6, dtype=torch.int32)
    return Case(rows, logits, slots, slots.long(), make_columns(rows, slots, 300))


@beforehand(lambda way, temperature: (run_all, way, choiceless(temperature)))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@both_ways
def test_rows_without_a_choice(answer, way, temperature):
    """-1, and nothing is counted; the row in between gets its token."""
    [(token_ids, history, _)] = answer
    before = choiceless(temperature).columns.history
    assert token_ids[[0, 1, 2, 4]].tolist() == [-1, -1, -1, 257]
    assert torch.equal(history[1:4], before[1:4])


# ---- distribution ----------------------------------------------------------------------------------------------------

WISHES = {
    "temperature": SamplingParams(temperature=1.3),
    "top-k": SamplingParams(temperature=0.8, top_k=5),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8),
    "min-p": SamplingParams(temperature=1.5, min_p=0.1),
    "all": SamplingParams(temperature=1.2, top_k=20, top_p=0.9, min_p=0.03),
}


@pytest.mark.parametrize(("vocab_size", "count"), [(40, 50_000), (600, 10_000)])
@pytest.mark.parametrize("params", WISHES.values(), ids=WISHES.keys())
def test_draws_follow_the_distribution(params, vocab_size, count):
    """One position each, against the definition in float64; from one group of tokens, and from three."""
    logits = spread(vocab_size)
    token_ids, *_ = run_torch(draws_case(logits, count, params))
    assert abs(chi_square(token_ids, probabilities(logits, params))) < 4


def test_chi_square_sees_a_wrong_distribution():
    logits = spread(40)
    token_ids, *_ = run_torch(draws_case(logits, 50_000, SamplingParams(temperature=1.05)))
    assert chi_square(token_ids, probabilities(logits, SamplingParams(temperature=1.0))) > 10


def scattered() -> Tensor:
    """14 tokens in three groups of a vocabulary of 600."""
    return torch.full((600,), -INF).index_copy(0, 43 * torch.arange(14), spread(14))


def draws() -> Case:
    return draws_case(scattered(), 40, SamplingParams(temperature=1.0))


@needs_triton
@beforehand(lambda: (partial(run_sample, tile=128), draws()))
def test_draws_of_the_kernels(answer):
    """As many as the interpreter has time for: the same tokens as torch's."""
    token_ids = answer[0]
    assert token_ids.tolist() == run_torch(draws())[0].tolist()
    assert abs(chi_square(token_ids, probabilities(scattered(), SamplingParams(temperature=1.0)))) < 4


def test_ties_win_equally_often_at_the_lowest_temperature():
    """Logits of 30 over a temperature of 1e-5 are 3e6, next to which the noise would drown."""
    logits = torch.tensor([30.0, 29.0, 30.0, 30.0])
    params = SamplingParams(temperature=1e-5)
    token_ids, *_ = run_torch(draws_case(logits, 30_000, params))
    assert abs(chi_square(token_ids, torch.tensor([1, 0, 1, 1]).double() / 3)) < 4


def ties() -> Case:
    """Of the first and the last token, which are in two groups."""
    logits = torch.zeros(300).index_fill(0, torch.tensor([0, 299]), 30.0).index_fill(0, torch.tensor([1, 298]), 29.0)
    return draws_case(logits, 30, SamplingParams(temperature=1e-5))


@needs_triton
@beforehand(lambda: (partial(run_sample, tile=128), ties()))
def test_ties_across_groups(answer):
    """Whichever group is luckier wins: their scores are compared with their digits kept."""
    token_ids = answer[0]
    assert token_ids.tolist() == run_torch(ties())[0].tolist()
    assert set(token_ids.tolist()) == {0, 299}
