"""Token ids as they come from a caller: those of plain prompts are told at once from those that must be looked at."""

import enum

import numpy as np
import pytest
import torch

from stages.s01_forward.inputs import RequestBuilder, are_plain_ids


class Id(enum.IntEnum):
    BOS = 1


@pytest.mark.parametrize("ids", [[0], [1, 0], [9, 5, 2], (3, 9), [7] * 5000], ids=lambda ids: str(ids)[:20])
def test_plain_ids(ids):
    assert are_plain_ids(ids, 10)


@pytest.mark.parametrize(
    "one",
    [
        10,
        -1,
        2**31,
        2**32,
        2**32 + 5,
        2**70,
        True,
        False,
        1.0,
        "6",
        None,
        [6],
        np.int64(5),
        np.bool_(True),
        torch.tensor(5),
    ],
    ids=repr,
)
@pytest.mark.parametrize("others", [[], [5, 6], [0, 1]], ids=str)
def test_ids_that_are_not_plain(one, others):
    """Wherever it stands; and whoever asks is told which one it is."""
    for ids in ([one, *others], [*others, one]):
        assert not are_plain_ids(ids, 10)
        with pytest.raises((TypeError, ValueError), match="prompt 0"):
            RequestBuilder(10, 99, frozenset(), None).build([ids], None)


def test_an_int_of_another_name_is_an_int():
    (request,) = RequestBuilder(10, 99, frozenset(), None).build([[Id.BOS, 5]], None)
    assert request.prompt_token_ids == [1, 5]
