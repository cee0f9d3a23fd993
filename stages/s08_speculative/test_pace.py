"""Who guesses: trust at first, pauses that grow, nobody in a crowd."""

import pytest

from stages.s01_forward.generation import Generation
from stages.s01_forward.sampling_params import SamplingParams
from stages.s04_continuous_batching.request import Request
from stages.s08_speculative.pace import FIRST_PAUSE, LONGEST_PAUSE, NO_GUESS, Pace


def ask() -> Request:
    return Request(0, Generation([5], SamplingParams(), seed=0, token_limit=10**6))


def trials(pace: Pace, request: Request, tokens: int, drafted: int = 4, accepted: int = 0) -> list[int]:
    """Steps with this outcome, of one token each; how many tokens there were when it guessed."""
    guessed = []
    for count in range(tokens):
        if pace.ready([request]):
            pace.note(request, drafted, accepted)
            guessed.append(count)
        request.generation.token_ids.append(7)
    return guessed


def test_who_is_new_is_trusted():
    pace, requests = Pace(4, 0.2), [ask() for _ in range(4)]
    assert pace.ready(requests) == requests
    assert pace.ready(iter(requests)) == requests


def test_a_crowd_does_not_guess():
    pace, requests = Pace(3, 0.2), [ask() for _ in range(4)]
    assert pace.ready(requests) == []
    assert pace.ready(requests[:3]) == requests[:3]


def test_pauses_double_up_to_the_longest():
    """After the first bad time a trial is two bad steps; between trials lie 48, 96 .. 1,024 tokens."""
    guessed = trials(Pace(4, 0.2), ask(), 9000)
    gaps = [later - earlier for earlier, later in zip(guessed, guessed[1:], strict=False) if later - earlier > 1]
    expected = [min(FIRST_PAUSE << i, LONGEST_PAUSE) for i in range(len(gaps))]
    assert gaps == expected
    assert len(gaps) > 8
    runs = [len(run) for run in in_a_row(guessed)]
    assert runs[0] == 10, "0.85 ** 10 is the first power below 0.2"
    assert set(runs[1:-1]) == {2}, "0.25 * 0.85 ** 2 is the first of these below 0.2"


def in_a_row(places: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_who_fares_well_never_pauses(accepted):
    assert len(trials(Pace(4, 0.2), ask(), 500, accepted=accepted)) == 500


def test_without_a_least_rate_nobody_pauses():
    assert len(trials(Pace(4, 0.0), ask(), 500)) == 500


def test_a_trial_that_goes_well_ends_the_pauses():
    pace, request = Pace(4, 0.2), ask()
    trials(pace, request, 10 + FIRST_PAUSE)
    assert len(trials(pace, request, 200, accepted=3)) >= 199
    assert pace.record(request).rate == pytest.approx(0.75, abs=0.01)


def test_each_has_a_record_of_its_own():
    pace, bad, good = Pace(4, 0.2), ask(), ask()
    trials(pace, bad, 12)
    assert pace.ready([bad, good]) == [good]
    pace.forget(bad)
    pace.forget(bad)
    assert bad not in pace.records
    assert pace.ready([bad]) == [bad]


def test_a_step_for_which_nothing_was_found_weighs_little():
    """0.98 ** 80 is the first power below 0.2."""
    pace, request, steps = Pace(4, 0.2), ask(), 0
    while steps < 1000 and pace.ready([request]):
        pace.note(request, 1, 0, weight=NO_GUESS)
        steps += 1
    assert steps == 80


def test_in_the_long_run_little_is_lost():
    """Of 4,000 steps in which no guess stands, at most 1 in 100 guesses."""
    assert len(trials(Pace(4, 0.2), ask(), 4000)) <= 0.01 * 4000
