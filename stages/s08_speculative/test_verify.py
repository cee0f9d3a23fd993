"""What guesses are held against is what stage 01 draws from; and the ratio rule through the whole engine."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from stages.s01_forward.generation import Generation
from stages.s01_forward.outputs import NOT_FINITE
from stages.s01_forward.sampler import SamplingBatch, choose, sample
from stages.s01_forward.sampling_params import SamplingParams
from stages.s04_continuous_batching.request import Request
from stages.s06_prefix_cache.llm import LLM as Plain
from stages.s08_speculative.draft_model import DraftModelProposer
from stages.s08_speculative.proposer import Draft
from stages.s08_speculative.test_acceptance import assert_drawn_from
from stages.s08_speculative.test_engine import all_free, engine
from stages.s08_speculative.verify import by_ratio, distributions, prefixes

DRAWS = 50_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, -0.3, -1.0, 1.5])
BANNED = [5]


def generation(made=(), *, seed=0, **keys) -> Generation:
    params = SamplingParams(max_tokens=None, ignore_eos=False, **{"temperature": 1.0, **keys})
    gen = Generation([0, 3], params, seed=seed, token_limit=50, eos_token_ids=BANNED)
    gen.token_ids += made
    return gen


def draws(logits, row) -> list[int]:
    """Stage 01's sampler on these logits [V], once for each of many seeds."""
    one = SamplingBatch.of([row], torch.device("cpu"))
    columns = [c.expand(DRAWS) for c in (one.temperature, one.top_k, one.top_p, one.min_p)]
    batch = SamplingBatch(*columns, seed=torch.arange(DRAWS), position=one.position.expand(DRAWS))
    return choose(logits.expand(DRAWS, -1), batch).tolist()


def by_hand(logits, prompt, made, params, banned) -> list[float]:
    """Bias, bans and penalties in plain Python, from the definition."""
    values = logits.tolist()
    for token_id, bias in params.logit_bias.items():
        values[token_id] += bias
    if len(made) < params.min_tokens:
        for token_id in banned:
            values[token_id] = -math.inf
    for token_id in {*prompt, *made}:
        r = params.repetition_penalty
        values[token_id] = values[token_id] / r if values[token_id] > 0 else values[token_id] * r
    for token_id in set(made):
        values[token_id] -= params.presence_penalty + params.frequency_penalty * made.count(token_id)
    return values


@pytest.mark.parametrize(
    "keys",
    [
        {"temperature": 0.5},
        {"temperature": 1.5, "top_k": 3},
        {"temperature": 1.2, "top_p": 0.7},
        {"min_p": 0.3},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.5},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {4: 2.0}},
        {"min_tokens": 3, "repetition_penalty": 0.7},
    ],
    ids=str,
)
def test_distributions_are_what_the_sampler_draws_from(keys):
    """At every place, with the guesses before it counted: twice the same guess is penalised twice."""
    gen, drafts = generation([1], **keys), [0, 0, 4]
    rows = prefixes(gen, drafts)
    assert [row.token_ids for row in rows] == [[1], [1, 0], [1, 0, 0], [1, 0, 0, 4]]
    p = distributions(LOGITS.expand(4, -1), rows)
    assert p.sum(-1).tolist() == pytest.approx([1.0] * 4)
    for row, each in zip(rows, p, strict=True):
        adjusted = torch.tensor(by_hand(LOGITS, [0, 3], row.token_ids, gen.params, BANNED))
        if row in (rows[0], rows[2]):
            assert_drawn_from(draws(adjusted, row), each.tolist())
        assert (each == 0).tolist() == (
            distributions(adjusted[None], prefixes(generation(**{**keys, **OFF}), []))[0] == 0
        ).tolist()
    assert gen.token_ids == [1]


OFF: dict[str, Any] = {
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {}, "min_tokens": 0
}  # fmt: skip


def test_the_published_example():
    """vllm-project/vllm#10198: filters and temperature hold for accepted tokens, too."""
    gen = generation(temperature=0.5, top_k=2)
    (p,) = distributions(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), prefixes(gen, []))
    assert p.tolist() == pytest.approx([0.8808, 0.1192, 0.0, 0.0], abs=1e-4)


@pytest.mark.parametrize("temperature", [1e-4, 1e-39, 0.0])
def test_next_to_nothing_of_temperature(temperature):
    """Finite, and all on the largest logit."""
    (p,) = distributions(torch.tensor([[12.0, 11.5, 3.0]]), prefixes(generation(temperature=temperature), []))
    assert p.tolist() == [1.0, 0.0, 0.0]


def test_a_guess_of_another_generation_is_not_kept():
    """`prefixes` shares nothing that grows."""
    gen = generation([1])
    first, _ = prefixes(gen, [2], salt=7)
    gen.token_ids.append(9)
    assert (first.token_ids, first.seed) == ([1], gen.seed ^ 7)


# ---- the ratio rule for one request ----------------------------------------------------------------------------------


def test_by_ratio_scores_what_it_gives():
    """Log-probabilities are the model's, before temperature and penalties, for guesses that stand as for the last."""
    gen = generation(temperature=0.3, logprobs=2, repetition_penalty=2.0)
    logits = torch.stack([LOGITS, LOGITS.flip(0), LOGITS * 2])
    given = by_ratio(logits, gen, [1, 4], torch.zeros(2, 6))  # q of 0: guesses that stand
    assert [token.token_id for token in given[:2]] == [1, 4]
    for token, row in zip(given, logits, strict=True):
        plain = sample(row[None], [generation(temperature=0.0, logprobs=2)])[0].logprob
        assert token.logprob.token_id == token.token_id
        assert token.logprob.logprob == pytest.approx(row.log_softmax(-1)[token.token_id].item())
        assert token.logprob.top == plain.top


@pytest.mark.parametrize("broken", [0, 1, 2, None])
def test_by_ratio_where_the_model_breaks(broken):
    """An error in the place that broke, if it is reached; what stood before is kept."""
    logits = LOGITS.repeat(3, 1)
    if broken is not None:
        logits[broken:] = float("nan")
    given = by_ratio(logits, generation(), [1, 2], torch.zeros(2, 6))
    assert len(given) == (3 if broken is None else broken + 1)
    assert [token.token_id for token in given[:broken]][:2] == [1, 2][:broken]
    assert given[-1].error == (None if broken is None else NOT_FINITE)
    sharp = torch.full((2, 6), 1e9)  # q so large that no guess stands
    assert by_ratio(logits, generation(), [1, 2], sharp)[0].error == (NOT_FINITE if broken == 0 else None)


def test_by_ratio_is_the_same_again():
    """Draws hang on seed and place alone."""
    q = torch.full((2, 6), 1 / 6)
    logits = LOGITS.repeat(3, 1)
    answers = [by_ratio(logits, generation(seed=seed), [1, 2], q) for seed in (*range(40), *range(40))]
    assert answers[:40] == answers[40:]
    assert len({tuple(token.token_id for token in answer) for answer in answers}) > 4


@pytest.mark.parametrize(
    ("logits", "others", "keys"),
    [
        ([2.0, 1.0, 0.0, -1.0], [0.5, 2.0, 1.0, 0.0], {"temperature": 0.5, "top_k": 2}),
        ([1.0, 0.8, 0.6, 1.2], [-3.0, 2.0, 0.0, 1.0], {"frequency_penalty": 0.5}),
    ],
    ids=["filtered", "penalised"],
)
def test_by_ratio_draws_from_the_model(logits, others, keys):
    """A draft model's guesses, drawn with the request's own noise; 2,500 seeds. What is drawn in place of a guess that
    fell has nothing to do with how that was drawn. The first case: 0.8808 to 0.1192, vllm-project/vllm#10198."""
    absent: Any = None
    proposer = DraftModelProposer(absent, absent, absent, absent, absent, drawn=True)
    params = SamplingParams(**{"max_tokens": None, "temperature": 1.0, **keys})
    gens = [Generation([0], params, seed=seed * 2_654_435_761, token_limit=50) for seed in range(2500)]
    requests = [Request(number, gen) for number, gen in enumerate(gens)]
    first, bonus = [], []
    with torch.inference_mode():
        rows = torch.tensor(others).expand(2500, -1)
        guesses, probs = proposer.choose(rows, requests, dict.fromkeys(requests, []))
        for gen, guess, q in zip(gens, guesses, probs, strict=True):
            given = [token.token_id for token in by_ratio(torch.tensor([logits] * 2), gen, [guess], q[None])]
            first.append(given[0])
            bonus += [given[:2]] if len(given) == 2 else []
    p = distributions(torch.tensor([logits]), prefixes(gens[0], []))[0].tolist()
    assert_drawn_from(first, p)
    assert 250 < len(bonus) < 2250
    for token in {each[0] for each in bonus}:
        after = distributions(torch.tensor([logits] * 2), prefixes(gens[0], [token]))[1].tolist()
        if sum(each[0] == token for each in bonus) > 300:
            assert_drawn_from([each[1] for each in bonus if each[0] == token], after)


# ---- through the engine ----------------------------------------------------------------------------------------------


class FromAnother:
    """Guesses drawn from a distribution [V] that has little to do with the model's, over tokens that it may say."""

    def __init__(self, tokens: list[int], weights: list[float]) -> None:
        self.q = torch.zeros(512)
        self.q[tokens] = torch.tensor(weights)
        self.generator = torch.Generator().manual_seed(5)

    def propose(self, wanted: Any) -> dict[Any, Draft]:
        drafts = torch.multinomial(self.q, 2 * len(wanted), replacement=True, generator=self.generator).view(-1, 2)
        return {
            request: Draft(tuple(tokens[:count]), self.q.repeat(count, 1))
            for (request, count), tokens in zip(wanted.items(), drafts.tolist(), strict=True)
        }

    def copy_blocks(self, pairs: Any) -> None:
        pass

    def forget(self, request: Any) -> None:
        pass


def expected_pairs(folder, prompt, params) -> dict[tuple[int, int, int], float]:
    """Probabilities of the first three tokens, from the model's own log-probabilities, one step at a time."""
    llm = engine(folder, cls=Plain)
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for made, share in joint.items():
            ask = SamplingParams(max_tokens=1, logprobs=20, ignore_eos=True)
            (output,) = llm.generate([[*prompt, *made]], ask)
            logits = torch.full((512,), -1e9)
            for token, value in output.outputs[0].logprobs[0].top:
                logits[token] = value
            gen = Generation(list(prompt), params, seed=0, token_limit=9)
            gen.token_ids += made
            p = distributions(logits[None], prefixes(gen, []))[0]
            for token in p.nonzero()[:, 0].tolist():
                longer[*made, token] = share * p[token].item()
        joint = longer
    return joint


def chi_square(counts: dict, expected: dict, total: int) -> None:
    """As `assert_drawn_from`, with the rare ones taken together."""
    assert set(counts) <= set(expected), "what has no probability never comes"
    names = sorted(expected, key=expected.get)
    rare = [name for name in names if expected[name] * total < 8]
    cells = [[name] for name in names if name not in rare] + ([rare] if rare else [])
    tokens = [number for number, cell in enumerate(cells) for name in cell for _ in range(counts.get(name, 0))]
    assert len(tokens) == total
    assert_drawn_from(tokens, [sum(expected[name] for name in cell) for cell in cells])


@pytest.mark.parametrize("who", ["another distribution", "a draft of two layers"])
def test_the_ratio_rule_through_the_engine(who, tiny):
    """Three tokens of 640 answers, with temperature, top-k and penalties on what was said and guessed: their joint
    distribution is that of plain sampling."""
    prompt = [5, 6, 7, 8]
    params = SamplingParams(
        max_tokens=4, temperature=3.0, top_k=3, presence_penalty=1.5, repetition_penalty=1.1, n=64, ignore_eos=True
    )
    expected = expected_pairs(tiny("qwen2"), prompt, params)
    assert len(expected) > 20
    llm = engine(
        tiny("qwen2"), blocks=400, acceptance="ratio", num_draft_tokens=2, speculative="layers:2", max_num_seqs=64,
        speculative_max_rows=64,
    )  # fmt: skip
    if who == "another distribution":
        likely = sorted({name[1] for name in expected}, key=lambda t: -sum(v for n, v in expected.items() if n[1] == t))
        llm.engine.proposer = FromAnother(likely[:6], [0.1, 0.3, 0.1, 0.2, 0.1, 0.2])
    else:
        assert isinstance(llm.engine.proposer, DraftModelProposer)
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(10):
        for answer in llm.generate([prompt], replace(params, seed=seed))[0].outputs:
            name = tuple(answer.token_ids[:3])
            counts[name] = counts.get(name, 0) + 1
    chi_square(counts, expected, 10 * 64)
    stats = llm.engine.stats
    assert 0.05 < stats.acceptance_rate < 0.95
    assert all_free(llm)


def test_ratio_rule_of_greedy_and_looked_up_guesses_is_plain_decoding(tiny):
    """Without a temperature there is nothing to draw; without a q nothing to divide by."""
    prompts = [[5, 6, 7] * 5, [9, 8] * 3]
    greedy = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1, logit_bias={5: 50.0, 9: 50.0})
    warm = SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True, logit_bias={5: 50.0, 9: 50.0})
    for speculative, params in (("layers:2", greedy), ("ngram", warm), ("ngram", greedy)):
        expected = engine(tiny("qwen2"), cls=Plain).generate(prompts, params)
        llm = engine(tiny("qwen2"), speculative=speculative, acceptance="ratio")
        llm.engine.proposer.sizes = range(3, 0, -1)  # of the n-grams: one token will do
        assert [o.token_ids for o in llm.generate(prompts, params)] == [o.token_ids for o in expected]
        assert llm.engine.stats.drafted > 0


def test_ratio_answers_have_their_scores(tiny):
    """Each token's log-probability is what the model says after those before it."""
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=5, logprobs=2, ignore_eos=True)
    llm = engine(tiny("qwen2"), speculative="layers:2", acceptance="ratio")
    (output,) = llm.generate([[5, 6, 7]], params)
    score = SamplingParams(max_tokens=0, prompt_logprobs=2)
    (whole,) = engine(tiny("qwen2"), cls=Plain).generate([[5, 6, 7, *output.token_ids]], score)
    assert len(output.outputs[0].logprobs) == 10
    for mine, other in zip(output.outputs[0].logprobs, whole.prompt_logprobs[3:], strict=True):
        assert (mine.token_id, mine.rank) == (other.token_id, other.rank)
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert llm.engine.stats.accepted > 0
