"""The benchmark of guessing on a GPU, tried on a CPU: figures of a small shape, and its refusals."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from reference.bench import gpu_speculative
from reference.bench.gpu_bench import Bench
from reference.bench.gpu_guesses import Speculation, make_certain, middle
from reference.bench.gpu_logits import HuggingFace
from reference.bench.gpu_shapes import random_checkpoint
from reference.bench.gpu_verified import check_verified
from reference.bench.harness import Result

TRIAL = "--model-shape tiny --device cpu --kv-cache-mb 16 --rows 1 3 --pays-rows 1 2 --tokens 8 --loss-tokens 24"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape")
    random_checkpoint("tiny", folder, "cpu")
    return folder


@pytest.fixture
def spec(folder):
    theirs = HuggingFace(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval())
    return Speculation(Bench(gpu_speculative.parse(TRIAL.split()), folder, theirs, 0.0))


class TestVerifiedLogits:
    def test_agree(self, spec):
        count, ours, theirs = check_verified(spec, 3, 4)
        assert 3 * 2 <= count <= 3 * 7, "all but the first token of each answer, which comes with the prompt"
        assert 0 < ours < 1.5 * theirs < 0.1

    def test_a_wrong_one_in_the_place_of_a_guess_is_refused(self, spec):
        """Only places behind the first of a row are touched: plain steps never compute them."""
        step = spec.guessing.runner.step
        logits_of = step.model.logits

        def logits(hidden):
            found = logits_of(hidden)
            if len(hidden) > 3:
                found[1] *= 1.2
            return found

        step.model.logits = logits
        vars(step)["few"] = ()  # so that the model makes its logits itself
        with pytest.raises(RuntimeError, match="logits of verified steps differ"):
            check_verified(spec, 1, 4)


class TestRuns:
    def test_acceptance_is_what_was_set(self, spec):
        make_certain(spec.llm.model)
        spec.learn()
        right, wrong, plain = spec.decode(3, 4, 1.0), spec.decode(3, 4, 0.0), spec.decode(3, 0, 0.0)
        assert right.stats.acceptance_rate == 1 and wrong.stats.acceptance_rate == 0 and plain.stats is None
        assert wrong.stats.rows == 3 * 6 and right.tokens == wrong.tokens == plain.tokens == 3 * 7
        assert len(right.cycles) < len(wrong.cycles)

    def test_another_answer_is_refused(self, spec):
        spec.learn()
        spec.answers[spec.prompts[0]][3] += 1
        with pytest.raises(RuntimeError, match="token 3 of an answer is not plain decoding's"):
            spec.decode(1, 2, 0.0)

    def test_a_certain_model_follows_its_cycle(self):
        """An untied head: each token is followed by the next one."""

        class Model:
            embed_tokens, lm_head = torch.nn.Embedding(50, 64), torch.nn.Linear(64, 50)

        make_certain(Model)
        chosen = (Model.embed_tokens.weight @ Model.lm_head.weight.T).argmax(-1)
        assert chosen.tolist() == [*range(1, 50), 0]

    def test_the_first_and_last_steps_do_not_count(self):
        assert middle([*range(20)]) == [*range(4, 17)] and middle([1.0, 2.0]) == [1.0, 2.0]


def test_from_end_to_end(tmp_path):
    gpu_speculative.main([*TRIAL.split(), "--repeats", "1", "--longest-check", "17", "--out", str(tmp_path)])
    result = Result.load("s08_gpu_tiny", tmp_path)
    assert result["verify, 3 rows, k=8"].unit == "ms" and "times a plain step" in result["verify, 3 rows, k=8"].note
    assert result["acceptance 1.0"].note.startswith("18 of 18 guesses stood, 4.60 tokens of a step; 5.00 expected")
    assert result["acceptance 0.0"].note.startswith("0 of ")
    assert result["2 rows, gain"].median > 0 and result["rows at which it stops paying"].median in (0, 1, 2)
    assert "24 tokens" in result["loss, all guesses wrong"].note
    for name in ("verify", "acceptance", "rows"):
        assert (tmp_path / f"s08_gpu_tiny_{name}.svg").is_file()


def test_without_a_gpu_it_says_how_to_try_the_rest(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_speculative.main(["--model-shape", "qwen2.5-7b"])
    assert "--device cpu --model-shape tiny" in capsys.readouterr().err
