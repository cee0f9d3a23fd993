"""What the figures of the prefix cache rest on, and a quick run from end to end."""

import pytest

from reference.bench.harness import Result
from stages.s06_prefix_cache import bench
from stages.s06_prefix_cache.bench import INDEXES, index_costs


@pytest.mark.parametrize("kind", INDEXES)
def test_costs_are_of_prompts_that_find_their_prefix(kind):
    costs = index_costs(INDEXES[kind], prefix=48, count=5, own=32)
    assert {what: len(seconds) for what, seconds in costs.items()} == {"look-up": 4, "publish": 4}


def test_quick_run(tmp_path):
    bench.main(["--quick", "--out", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "s06_chat.json",
        "s06_chat.svg",
        "s06_index.json",
        "s06_prefix.json",
        "s06_prefix.svg",
    ]
    prefix, chat = Result.load("s06_prefix", tmp_path), Result.load("s06_chat", tmp_path)
    for length in (16, 64):
        notes = [prefix[f"{length} shared, {kind}"].note for kind in bench.KINDS]
        assert notes[0].startswith("0 of") and notes[1:] == [f"{length} of {length + 8} prompt tokens found"] * 2
    # Turns of 20, 48 and 76 tokens; found are whole blocks of all but the newest token of what went before.
    assert chat["hit rate, chain"].note == chat["hit rate, radix"].note == "64 of 144 prompt tokens"
    assert chat["hit rate, off"].median == 0
