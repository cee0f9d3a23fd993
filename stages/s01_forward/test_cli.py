"""`stepinfer generate` and `stepinfer download`, as typed."""

import math
import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from stages.cli import app
from stages.s01_forward.llm import LLM
from stages.s01_forward.sampling_params import MAX_TEMPERATURE, SamplingParams
from tests.contract import byte_ids
from tests.scripted import edited, scripted


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_answer_to_a_chat(tiny):
    folder = tiny("llama")
    result = run("generate", folder, "Hello", "--stage", 1, "--max-tokens", 6)
    expected = LLM(folder).chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=6)).text
    assert (result.exit_code, result.stdout) == (0, f"{expected}\n")
    assert "llama ready in" in result.stderr
    assert " tokens/s" in result.stderr


def test_raw_text_and_sampling(tiny):
    options = ["--raw", "--max-tokens", 8, "--temperature", 1.5, "--top-k", 40, "--top-p", 0.9, "--seed", 3]
    result = run("generate", tiny("llama"), "Once", "--stage", 1, *options)
    params = SamplingParams(max_tokens=8, temperature=1.5, top_k=40, top_p=0.9, seed=3)
    assert result.stdout == LLM(tiny("llama")).generate("Once", params)[0].text + "\n"


def test_several_prompts_in_order(tiny):
    llm, params = LLM(tiny("llama")), SamplingParams(max_tokens=4)
    result = run("generate", tiny("llama"), "One", "Two", "--stage", 1, "--raw", "--max-tokens", 4)
    assert result.stdout == "".join(output.text + "\n" for output in llm.generate(["One", "Two"], params))


def test_stop_may_be_repeated(tiny, tmp_path):
    folder = scripted(tiny("qwen2"), tmp_path / "m", [byte_ids("#abcdef")])
    result = run("generate", folder, "#", "--stage", 1, "--raw", "--stop", "de", "--stop", "xyz")
    assert result.stdout == "abc\n"


def test_latest_stage_is_the_default(tiny):
    result = run("generate", tiny("llama"), "Once", "--raw", "--max-tokens", 3)
    assert (result.exit_code, result.stdout) == (
        0,
        LLM(tiny("llama")).generate("Once", SamplingParams(max_tokens=3))[0].text + "\n",
    )


def around(weights):
    """After "c" comes "a" again."""
    a, c = byte_ids("ac")
    weights["lm_head.weight"][a] = 4.0 * weights["model.embed_tokens.weight"][c]


@pytest.mark.parametrize("guesser", ["ngram", "layers:1"])
def test_guessing_changes_no_text(guesser, tiny, tmp_path):
    """The model goes round, so every guess stands; the step that computes the prompt, and the first ones, have none."""
    folder = edited(scripted(tiny("qwen2"), tmp_path / "once", [byte_ids("#abc")]), tmp_path / "around", around)
    options = ["--raw", "--max-tokens", 48]
    plain = run("generate", folder, "#", *options)
    result = run("generate", folder, "#", *options, "--speculative", guesser, "--num-draft-tokens", 3)
    assert (result.exit_code, result.stdout) == (0, "abc" * 16 + "\n") == (0, plain.stdout)
    told = re.search(r"(\d+) of (\d+) guesses stood, 3\.[89] tokens from each step with guesses\n", result.stderr)
    assert told and 30 <= int(told[1]) == int(told[2]) <= 35
    assert "guesses" not in plain.stderr


def test_guessing_by_the_ratio_rule(tiny):
    options = ["--raw", "--max-tokens", 12, "--temperature", 0.8, "--seed", 5]
    guess = ["--speculative", "layers:1", "--acceptance", "ratio"]
    first, second = (run("generate", tiny("qwen3"), "Once", *options, *guess) for _ in range(2))
    assert first.exit_code == 0
    assert first.stdout == second.stdout
    assert "guesses stood" in first.stderr


def test_no_guesses_asked_for_is_no_guessing(tiny):
    options = ["--raw", "--max-tokens", 3]
    result = run("generate", tiny("llama"), "Once", *options, "--speculative", "ngram", "--num-draft-tokens", 0)
    assert (result.exit_code, result.stdout) == (0, run("generate", tiny("llama"), "Once", *options).stdout)
    assert "guesses" not in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-tokens", 0], "max_tokens is 0; it must be at least 1"),
        (["--temperature", -1], "--temperature is -1; it must be a finite number, at least 0 and at most 1000000"),
        (["--temperature", "nan"], "--temperature is nan"),
        (["--temperature", "inf"], "--temperature is inf"),
        (["--top-p", 1.5], "--top-p is 1.5; it must be a finite number, above 0 and at most 1"),
        (["--top-p", 0], "--top-p is 0"),
        (["--stage", 77], "no engine of stage 77; there are 1"),
        (["--device", "gpu"], "device 'gpu' is not supported"),
        (["--dtype", "int8"], "int8"),
        (["--stop", ""], "stop"),
        (["--kv-cache-mb", 5, "--stage", 1], "the engine of stage 1 has no KV cache: no --kv-cache-mb before stage 2"),
        (["--speculative", "ngram", "--stage", 7], "the engine of stage 7 does not guess: no --speculative"),
        (["--num-draft-tokens", 3, "--stage", 1], "the engine of stage 1 does not guess: no --num-draft-tokens"),
        (["--num-draft-tokens", 3], "--speculative says who does"),
        (["--acceptance", "ratio"], "--speculative says who does"),
        (["--speculative", "ngram", "--num-draft-tokens", -1], "num_draft_tokens is -1"),
        (["--speculative", "ngram", "--acceptance", "all"], "'all' is not one of"),
        (["--speculative", "layers:99"], "a draft of 99 layers"),
    ],
    ids=str,
)
def test_one_line_for_a_wrong_value(options, words, tiny):
    result = run("generate", tiny("llama"), "Once", *options)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_limits_of_options_are_those_of_requests(tiny):
    """They stand in two places; a limit itself is taken by both, and no more by either."""
    options = ["generate", tiny("llama"), "Once", "--raw", "--stage", 1, "--max-tokens", 1, "--top-p", 1]
    assert run(*options, "--temperature", MAX_TEMPERATURE).exit_code == 0
    above = math.nextafter(MAX_TEMPERATURE, math.inf)
    assert "error: --temperature is" in run(*options, "--temperature", above).stderr


def test_no_such_model(tmp_path):
    result = run("generate", tmp_path, "Once", "--stage", 1)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is not a model folder" in result.stderr


def test_an_answer_that_breaks_is_an_error(tiny, tmp_path):
    folder = edited(tiny("qwen2"), tmp_path / "m", lambda w: w["model.norm.weight"].fill_(float("nan")))
    result = run("generate", folder, "Once", "--stage", 1)
    assert result.exit_code == 2
    assert "no usable logits after 0 tokens" in result.stderr


def test_our_own_faults_keep_their_traceback(tiny, monkeypatch):
    monkeypatch.setattr(LLM, "run", lambda self, requests: 1 / 0)
    result = run("generate", tiny("llama"), "Once", "--stage", 1)
    assert isinstance(result.exception, ZeroDivisionError)


def test_download_says_where(tiny):
    result = run("download", tiny("llama"))
    assert (result.exit_code, result.stdout.strip()) == (0, str(tiny("llama")))


def test_as_a_process_whose_output_is_not_unicode(tiny, tmp_path):
    """Emoji on a console that cannot show them are replaced, and the answer goes on."""
    folder = scripted(
        tiny("qwen2"), tmp_path / "m", [byte_ids("#a😀b"), [2]], {"generation_config.json": {"eos_token_id": 2}}
    )
    arguments = ["generate", str(folder), "#", "--stage", "1", "--raw", "--max-tokens", "6"]
    done = subprocess.run(
        [sys.executable, "-m", "stages.cli", *arguments],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "cp1252"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode("cp1252").splitlines() == ["a?b"]
