"""Looking back: the longest match first, of these the latest; the same whether the index grew or was built at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.s01_forward.generation import Generation
from stages.s01_forward.sampling_params import SamplingParams
from stages.s04_continuous_batching.request import Request
from stages.s08_speculative.ngram import NgramIndex, NgramProposer

few_tokens = st.lists(st.integers(0, 2), max_size=60)


def ask(prompt, made=()) -> Request:
    """A request with this prompt, to which these tokens were answered."""
    request = Request(0, Generation(list(prompt), SamplingParams(), seed=0, token_limit=99))
    request.generation.token_ids += made
    request.sequence.token_ids += made
    return request


def built(tokens, sizes) -> NgramIndex:
    index = NgramIndex(sizes)
    index.grow(tokens)
    return index


def searched(tokens, sizes, count):
    """By brute force: the longest ending that stood somewhere before, at its last place."""
    for size in sizes:
        for place in range(len(tokens) - 1, size - 1, -1):
            if size < len(tokens) and tokens[place - size : place] == tokens[-size:]:
                coming = tokens[place:]
                return tuple(coming[number % len(coming)] for number in range(count))
    return ()


@pytest.mark.parametrize(
    ("tokens", "sizes", "expected"),
    [
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [3, 2], (9, 2, 3)),  # three tokens, though two of them stood later
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [2], (8, 1, 2)),  # of two places the later
        ([1, 2, 5, 1, 2, 6, 1, 2], [2], (6, 1, 2)),
        ([7, 7, 7, 7], [3, 2], (7, 7, 7)),  # it overlaps its own ending, and goes on
        ([5, 1, 2, 1, 2], [2], (1, 2, 1)),  # round in a circle of two
        ([1, 2, 3, 1], [2], ()),  # one token would be known, two are not
        ([1, 2, 3, 1], [2, 1], (2, 3, 1)),
        ([1, 2], [2], ()),  # the ending itself is no earlier place
        ([4], [2, 1], ()),
        ([], [2, 1], ()),
    ],
)
def test_what_followed(tokens, sizes, expected):
    index = built(tokens, sizes)
    assert index.following(tokens, 3) == expected
    assert index.following(tokens, 1) == expected[:1]


@settings(max_examples=300, deadline=None)
@given(few_tokens, st.integers(1, 4), st.integers(0, 3), st.integers(1, 8), st.lists(st.integers(1, 5)))
def test_grown_step_by_step_or_built_at_once(tokens, smallest, more, count, pieces):
    """At every length: the index of a list that grew by pieces is that of the whole, and finds what a search finds."""
    sizes = range(smallest + more, smallest - 1, -1)
    grown, end = NgramIndex(sizes), 0
    for piece in [*pieces, len(tokens)]:
        end = min(end + piece, len(tokens))
        grown.grow(tokens[:end])
        assert grown == built(tokens[:end], sizes)
        assert grown.following(tokens[:end], count) == searched(tokens[:end], sizes, count)


def test_to_grow_by_nothing_changes_nothing():
    index = built([1, 2, 1, 2], [2])
    before = dict(index.ends)
    index.grow([1, 2, 1, 2])
    assert (index.ends, index.seen) == (before, 4)


def test_memory_is_linear():
    """One entry per token and length, even where no n-gram comes twice; where all are the same, one per length."""
    assert len(built(list(range(5000)), range(4, 1, -1)).ends) <= 3 * 5000
    assert len(built([5] * 5000, range(4, 1, -1)).ends) == 3


def test_a_step_costs_what_is_new():
    """Of a long list only the new tokens are looked at."""

    class Counting(list):
        slices = 0

        def __getitem__(self, key):
            Counting.slices += isinstance(key, slice)
            return super().__getitem__(key)

    tokens = Counting(range(10_000))
    index = built(tokens, range(4, 1, -1))
    Counting.slices = 0
    tokens.append(5)
    index.grow(tokens)
    assert Counting.slices == 3


def test_prompt_and_output_are_one_text():
    """Found in the prompt, in the output, and across the seam; the output grows between two calls."""
    proposer, request = NgramProposer(largest=3, smallest=2), ask([1, 2, 3, 4], [1, 2])
    assert proposer.propose({request: 3})[request].tokens == (3, 4, 1)
    request.sequence.token_ids += [3, 9, 4, 1, 2]  # (4, 1, 2) stood across the seam
    assert proposer.propose({request: 3})[request].tokens == (3, 9, 4)
    request.sequence.token_ids += [3, 9, 8, 7, 9, 8]  # in the output alone
    assert proposer.propose({request: 1})[request].tokens == (7,)


def test_who_finds_nothing_is_left_out_and_nothing_is_mixed_up():
    proposer, one, other = NgramProposer(largest=3, smallest=2), ask([1, 2, 3, 1, 2]), ask([1, 2, 9, 8, 7])
    drafts = proposer.propose({one: 2, other: 2})
    assert {request: draft.tokens for request, draft in drafts.items()} == {one: (3, 1)}
    assert drafts[one].probs is None


def test_nothing_is_kept_of_who_has_ended():
    proposer, request = NgramProposer(largest=3, smallest=2), ask([1, 2, 3, 1, 2])
    proposer.propose({request: 2})
    proposer.copy_blocks([(1, 2)])
    proposer.forget(request)
    proposer.forget(request)
    assert not proposer.indexes


@pytest.mark.parametrize("bounds", [(2, 3), (0, 0), (3, 0), (4, -1)], ids=str)
def test_bad_sizes(bounds):
    with pytest.raises(ValueError, match=f"{bounds[1]} to {bounds[0]}"):
        NgramProposer(*bounds)
