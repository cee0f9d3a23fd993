"""What the figures of this stage rest on, and a quick run from end to end."""

import pytest

from reference.bench.harness import Result
from stages.s08_speculative import bench
from stages.s08_speculative.bench import Bench


@pytest.fixture(scope="module")
def engines(request):
    return Bench(request.getfixturevalue("tiny")("llama"), (1,), most=4, max_model_len=128)


def test_every_kind_gives_the_ids_of_plain_decoding_and_tells_what_stood(engines):
    prompt = [5, 6, 7, 8] * 5
    plain = engines.run("off", prompt, 20)
    assert plain.stats is None and len(plain.token_ids) == len(plain.times) == 20
    with engines.without_pauses("1 layers"):
        layers = engines.run("1 layers", prompt, 20, 4)
    with engines.always_wrong(prompt, plain.token_ids):
        wrong = engines.run("n-gram", prompt, 20, 2)
    assert layers.token_ids == wrong.token_ids == plain.token_ids
    assert layers.stats.drafted > 0 and (wrong.stats.accepted, wrong.stats.acceptance_rate) == (0, 0)
    assert wrong.note.startswith("0 of ") and wrong.stats.drafted > 0
    assert wrong.seconds() > wrong.seconds(10) > 0


def test_another_answer_is_refused(engines):
    prompt = [9, 8, 7]
    engines.run("off", prompt, 6)
    engines.plain[(*prompt, 6)][2] += 1
    with pytest.raises(RuntimeError, match="not that of plain decoding"):
        engines.run("n-gram", prompt, 6, 2)


def test_quick_run(tmp_path):
    bench.main(["--quick", "--out", str(tmp_path)])
    names = ["s08_cpu.json", "s08_cpu.svg", "s08_cpu_acceptance.svg"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    result = Result.load("s08_cpu", tmp_path)
    assert result["repeat, n-gram, k=0"].note == "plain decoding"
    for name in ("repeat, n-gram", "open, n-gram", "open, 1 layers"):
        assert result[f"{name}, k=2"].median > 0 and 0 <= result[f"{name}, k=2, acceptance"].median <= 100
    assert "0 of " in result["open, all guesses wrong, loss"].note
