"""`stepinfer bench serve` as it is typed: what it sends, shows, saves and refuses."""

import json

import pytest
from typer.testing import CliRunner

from stages.s09_server.bench_serve import app
from stages.s09_server.scripted_server import Script, ScriptedServer, answer

JSON = b"Content-Type: application/json\r\n"


def bench(*arguments):
    return CliRunner().invoke(app, ["serve", *map(str, arguments)], env={"COLUMNS": "160"})


def server_of(script, models=("m1", "m2")):
    listed = json.dumps({"data": [{"id": name} for name in models]}).encode()
    return ScriptedServer(lambda body: Script([(0.0, listed)], headers=JSON) if "path" in body else script(body))


def test_what_is_sent_and_saved(tmp_path):
    out = tmp_path / "load.json"
    with server_of(lambda body: answer(body["max_tokens"])) as server:
        given = ("--num-prompts", 5, "--random-input-len", 7, "--random-output-len", 4, "--api-key", "Secret-1")
        more = ("--ignore-eos", "--extra-body", '{"top_k": 3}', "--goodput", "ttft:5000", "--goodput", "itl:5000")
        result = bench("--base-url", server.url, *given, *more, "--percentiles", "50,99.9", "--save-result", out)
    assert result.exit_code == 0, result.output
    assert set(server.keys) == {"bearer secret-1"}
    assert server.bodies[0] == {"path": "/v1/models"}
    trial, *asked = server.bodies[1:]
    assert len(asked) == 5 and trial["prompt"] not in [body["prompt"] for body in asked]
    for body in asked:
        assert len(body["prompt"].split()) == 7
        assert {key: body[key] for key in body if key != "prompt"} == {
            "model": "m1", "max_tokens": 4, "temperature": 0.0, "stream": True, "top_k": 3, "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
    saved = json.loads(out.read_text(encoding="utf-8"))
    assert "Secret" not in out.read_text(encoding="utf-8")
    assert (saved["completed"], saved["failed"], saved["output_tokens"]) == (5, 0, 20)
    assert saved["request_goodput"] == pytest.approx(5 / saved["duration_s"])
    assert set(saved["latency_ms"]["ttft"]) == {"mean", "p50", "p99.9", "longest", "count"}
    assert [len(each["itl"]) for each in saved["requests"]] == [3] * 5
    assert (saved["settings"]["model"], saved["settings"]["request_rate"]) == ("m1", "inf")
    for words in ("Completed requests", "Output tokens/s", "Goodput", "TTFT", "p99.9"):
        assert words in result.output


def test_chat_and_dataset(tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "Hi"}\n{"messages": [{"role": "system", "content": "x"}]}\n', encoding="utf-8")
    with server_of(lambda body: answer(2)) as server:
        result = bench(
            *("--base-url", f"{server.url}/v1", "--endpoint", "/v1/chat/completions", "--model", "mine"),
            *("--dataset-path", path, "--num-warmups", 0, "--max-concurrency", 1, "--request-rate", 50),
        )
    assert result.exit_code == 0, result.output
    assert [body["messages"] for body in server.bodies] == [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "x"}],
    ]
    assert {body["model"] for body in server.bodies} == {"mine"}


def test_failures_are_shown_and_told_by_the_exit_code():
    """A server's words are shown as they are: they are no markup."""
    busy = Script([(0.0, b"[/red] queue [bold]full")], 503, JSON)

    def script(body):
        return busy if next(turn) == 2 else answer(1)

    turn = iter(range(10))
    with server_of(script) as server:
        result = bench("--url", server.url, "--num-prompts", 3)
    assert result.exit_code == 1
    assert "HTTP 503" in result.output and "[/red] queue [bold]full" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "given, told",
    [
        (("--base-url", "localhost:8000"), "got 'localhost:8000'"),
        (("--request-rate", "0"), "error: --request-rate is 0; it must be a number above 0, or inf"),
        (("--request-rate", "nan"), "--request-rate is nan"),
        (("--random-range-ratio", "1"), "--random-range-ratio is 1; it must be a finite number, at least 0 and below"),
        (("--random-range-ratio", "nan"), "--random-range-ratio is nan"),
        (("--temperature", "-1"), "--temperature is -1; it must be a finite number, at least 0"),
        (("--temperature", "inf"), "--temperature is inf"),
        (("--timeout", "0"), "--timeout is 0; it must be a finite number, above 0"),
        (("--timeout", "nan"), "--timeout is nan"),
        (("--goodput", "ttft"), "got 'ttft'"),
        (("--goodput", "itl:inf"), "got 'itl:inf'"),
        (("--percentiles", "50;99"), "got '50;99'"),
        (("--extra-body", "[1]"), "got '[1]'"),
        (("--extra-body", '{"n": 2}'), "must not set n"),
        (("--random-input-len", "0"), "prompt=0"),
        (("--save-result", "no/such/folder/x.json"), "there is no folder"),
        (("--base-url", "http://127.0.0.1:9"), "no answer from http://127.0.0.1:9/v1/models"),
    ],
)
def test_bad_options(given, told):
    result = bench(*given)
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_server_without_models_or_that_refuses():
    with server_of(lambda body: answer(1), models=()) as server:
        assert "lists no model" in bench("--base-url", server.url).output
    with server_of(lambda body: Script([(0.0, b"who are you?")], 401, JSON)) as server:
        result = bench("--base-url", server.url)
    assert result.exit_code == 2 and "HTTP 401: who are you?" in result.output
