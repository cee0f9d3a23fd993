"""The benchmark of the host's work before a first step, with few requests."""

import pytest

from reference.bench import first_step
from reference.bench.harness import Result


def test_first_step(tmp_path):
    """Of a prompt of 2,112 tokens 131 blocks of 16 are found; the first step has room for three whole ones."""
    first_step.main(f"--requests 3 --repeats 1 --name trial --out {tmp_path}".split())
    result = Result.load("trial", tmp_path)
    for label, note in {
        "radix, found": "6288 of 6336 tokens found, 3 rows",
        "chain, found": "6288 of 6336 tokens found, 3 rows",
        "radix, not found": "0 of 6336 tokens found, 3 rows",
        "chain, not found": "0 of 6336 tokens found, 3 rows",
    }.items():
        parts = [result[f"{label}: {part}"] for part in first_step.PARTS]
        assert all(part.median > 0 and part.note == note for part in parts)
        assert sum(part.median for part in parts) == pytest.approx(result[f"{label}: all"].median)
    assert len(result.measurements) == 4 * (1 + len(first_step.PARTS))


@pytest.mark.parametrize(
    ("options", "error"),
    [("--requests 0", "got 0 and 30"), ("--requests 65", "got 65 and 30"), ("--repeats 0", "64 and 0")],
)
def test_first_step_wants_requests(options, error, capsys):
    with pytest.raises(SystemExit):
        first_step.main(options.split())
    assert error in capsys.readouterr().err
