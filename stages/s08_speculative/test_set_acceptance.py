"""The proposer that knows the answer: right as often as it is told to, and always in the same places."""

import pytest

from stages.s01_forward.generation import Generation
from stages.s01_forward.sampling_params import SamplingParams
from stages.s04_continuous_batching.request import Request
from stages.s08_speculative.set_acceptance import SetAcceptance

ANSWERS = {(5, 6): [i % 90 for i in range(20_000)], (7,): [89] * 20_000}


def ask(prompt=(5, 6), made: int = 0) -> Request:
    request = Request(0, Generation(list(prompt), SamplingParams(), seed=0, token_limit=10**6))
    request.generation.token_ids += [0] * made
    return request


def right(proposer, prompt=(5, 6), count=20_000) -> list[bool]:
    """Which of the first guesses are right."""
    request = ask(prompt)
    tokens = proposer.propose({request: count})[request].tokens
    return [token == answer for token, answer in zip(tokens, ANSWERS[prompt], strict=False)]


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.8, 1.0])
def test_the_rate_is_kept_at_every_place(rate):
    """Within four standard deviations; and a right guess says nothing of the next."""
    hits = right(SetAcceptance(ANSWERS, rate, 90))
    spread = 4 * (rate * (1 - rate) / len(hits)) ** 0.5
    assert abs(sum(hits) / len(hits) - rate) <= spread
    after = [later for earlier, later in zip(hits, hits[1:], strict=False) if earlier]
    if after:
        assert abs(sum(after) / len(after) - rate) <= 2 * spread


def test_however_the_answer_is_cut():
    proposer = SetAcceptance(ANSWERS, 0.5, 90, seed=3)
    whole = proposer.propose({(first := ask()): 12})[first].tokens
    for made in range(12):
        request = ask(made=made)
        (draft,) = SetAcceptance(ANSWERS, 0.5, 90, seed=3).propose({request: 4}).values()
        assert draft.tokens[: 12 - made] == whole[made : made + 4]
        assert draft.probs is None


def test_seeds_and_prompts_have_places_of_their_own():
    one, other = SetAcceptance(ANSWERS, 0.5, 90, seed=1), SetAcceptance(ANSWERS, 0.5, 90, seed=2)
    assert right(one) == right(SetAcceptance(ANSWERS, 0.5, 90, seed=1))
    for hits, others in ((right(one), right(other)), (right(one), right(one, (7,)))):
        same = sum(a == b for a, b in zip(hits, others, strict=True)) / len(hits)
        assert abs(same - 0.5) < 0.02


def test_a_wrong_guess_is_another_token_of_the_vocabulary():
    request = ask((7,))
    (draft,) = SetAcceptance(ANSWERS, 0.0, 90).propose({request: 5}).values()
    assert draft.tokens == (0,) * 5


def test_at_the_end_and_for_strangers_there_is_no_guess():
    proposer = SetAcceptance({(5, 6): [1, 2, 3]}, 1.0, 90)
    last, over, stranger = ask(made=2), ask(made=3), ask((9,))
    drafts = proposer.propose({last: 4, over: 4, stranger: 4})
    assert {request: draft.tokens for request, draft in drafts.items()} == {last: (3,)}
    proposer.copy_blocks([])
    proposer.forget(last)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_bad_rate(rate):
    with pytest.raises(ValueError, match=f"{rate}.*0 and 1"):
        SetAcceptance({}, rate, 90)
