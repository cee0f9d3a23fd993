"""The benchmark runs on a tiny model and writes what it promises; its figures are not judged here."""

from random import Random

import pytest

from reference.bench.harness import Result
from stages.s04_continuous_batching import bench
from stages.s04_continuous_batching.ragged_load import lengths, ragged_load
from stages.s04_continuous_batching.scheduler_cost import step_costs


def test_the_ragged_load_is_as_agreed():
    load = ragged_load(49_000)
    assert (len(load.prompts), sum(map(len, load.prompts)), load.output_tokens) == (16, 2560, 1152)
    assert all(20 <= len(prompt) <= 300 for prompt in load.prompts)
    assert all(16 <= count <= 128 for count in load.output_lens)
    assert len({len(prompt) for prompt in load.prompts}) > 8 and load == ragged_load(49_000)
    assert lengths(Random(0), 3, 5, 5, 15) == [5, 5, 5]
    with pytest.raises(ValueError, match="3 numbers from 5 to 6 cannot have the sum 19"):
        lengths(Random(0), 3, 5, 6, 19)


def test_a_steps_cost_is_that_of_decodes_alone():
    costs = step_costs(rows=5, steps=7)
    assert {name: len(seconds) for name, seconds in costs.items()} == {
        "schedule": 7,
        "update": 7,
        "schedule and update": 7,
        "tensors": 7,
    }
    both = zip(costs["schedule"], costs["update"], costs["schedule and update"], strict=True)
    assert all(a > 0 and b > 0 and total == pytest.approx(a + b) for a, b, total in both)


def test_quick_runs(tmp_path):
    for part in ("scheduler", "concurrency", "swap"):
        bench.main(["--quick", "--only", part, "--out", str(tmp_path)])
    bench.main(["--quick", "--only", "ragged", "--dtypes", "float32", "--out", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "s04_concurrency.json",
        "s04_concurrency.svg",
        "s04_ragged.json",
        "s04_ragged.svg",
        "s04_scheduler.json",
        "s04_swap.json",
    ]
    for each in Result.load("s04_ragged", tmp_path).measurements:
        assert each.note.endswith("4 of 4 answers as HF generate, one by one"), each.name
    swapped = Result.load("s04_swap", tmp_path)
    again, kept = (swapped[f"whole load, {way}"].note for way in ("computed again", "to the host and back"))
    assert not again.startswith("0 preemptions") and kept.split(",")[0] == again.split(",")[0]
    assert "476 tokens computed" in kept, "320 + 160 less one per answer: nothing is computed twice"
