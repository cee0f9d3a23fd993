"""`stepinfer serve` and `stepinfer chat`, as typed: options, files of options, conversations."""

import functools
import io
import json
import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from typer.testing import CliRunner

from stages.cli import app
from stages.s01_forward.sampling_params import SamplingParams
from stages.s09_server import chat_client, serve, terminal_chat
from stages.s09_server.chat_client import RemoteModel
from stages.s09_server.chat_model import ChatError, LocalModel
from stages.s09_server.config import ServeConfig
from stages.s09_server.dry_run import STORY, DryLLM
from stages.s09_server.terminal_chat import Conversation, converse, printable
from tests.toy_course import ROOT


def run(*arguments: object, text: str | None = None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)


@pytest.fixture
def settings(monkeypatch):
    """What `serve` was told, instead of serving."""
    told: list[ServeConfig] = []
    monkeypatch.setattr(serve, "run_server", lambda config: told.append(config) or 0)

    def settings_of(*arguments: object) -> ServeConfig:
        result = run("serve", *arguments)
        assert result.exit_code == 0, result.output
        return told.pop()

    return settings_of


def test_help_imports_nothing_heavy():
    check = "import stages.cli, sys; print([m for m in ('torch', 'transformers', 'fastapi') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- serve -----------------------------------------------------------------------------------------------------------


def test_nothing_typed(settings):
    config = settings()
    assert (config.engine.model, config.engine.dry_run, config.host, config.port) == ("demo", False, "127.0.0.1", 8000)
    assert config.api.served_model_names == ("demo",)
    assert config.on_engine_death == "exit"
    wanted = {"device": "auto", "dtype": "auto", "swap_mb": 0, "prefix_cache": "radix", "graphs": True}
    assert config.engine.options == wanted | {"capture": "start", "common_prefix": True}


def test_names_of_vllm(settings):
    typed = "--gpu-memory-utilization 0.8 --swap-space 1.5 --no-enable-prefix-caching --enforce-eager --dtype float16"
    typed += " --max-model-len 99 --max-num-seqs 5 --max-num-batched-tokens 512 --block-size 32 --served-model-name a"
    config = settings("some/model", *typed.split(), "--served-model-name", "b", "--root-path", "/x")
    assert config.engine.options == {
        "device": "auto", "dtype": "float16", "swap_mb": 1536, "prefix_cache": "off", "graphs": False,
        "capture": "start", "memory_share": 0.8, "max_model_len": 99, "max_num_seqs": 5, "max_num_batched_tokens": 512,
        "block_size": 32, "common_prefix": True,
    }  # fmt: skip
    assert config.api.served_model_names == ("a", "b")


def test_own_names(settings):
    typed = "--kv-cache-mb 64 --speculative ngram --num-draft-tokens 3 --acceptance ratio --max-waiting 7 --dry-run"
    typed += " --request-timeout 9 --max-body-mb 1 --drain-seconds 2 --on-engine-death restart --text-process"
    typed += " --compiled --no-common-prefix"
    config = settings(*typed.split(), "--dry-run-step-ms", 4, "--prefix-cache", "chain", "--api-key", "k")
    guesses = {"speculative": "ngram", "num_draft_tokens": 3, "acceptance": "ratio"}
    assert (
        config.engine.options.items()
        >= {**guesses, "kv_cache_mb": 64, "prefix_cache": "chain", "compiled": True, "common_prefix": False}.items()
    )
    assert (config.engine.dry_run, config.engine.dry_run_step_ms) == (True, 4)
    api = config.api
    assert (api.max_waiting, api.request_timeout, api.max_body_mb, api.api_key) == (7, 9, 1, "k")
    assert (config.drain_seconds, config.on_engine_death, config.text_process) == (2, "restart", True)


def test_options_are_those_of_the_engine(settings, tiny):
    """Each name that `serve` hands on is one that `LLM` knows."""
    config = settings(
        tiny("llama"), "--dry-run", "--max-model-len", 64, "--max-num-seqs", 2, "--max-num-batched-tokens", 8,
        "--max-chunk", 4, "--kv-cache-mb", 1, "--gpu-memory-utilization", 0.5, "--block-size", 16,
    )  # fmt: skip
    llm = DryLLM(config.engine.model, **config.engine.options)
    assert (llm.max_model_len, llm.max_num_seqs, llm.max_num_batched_tokens, llm.max_chunk) == (64, 2, 8, 4)


def test_file_of_options(settings, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: some/model\nport: 1234\nmax_num_seqs: 3\nserved-model-name: [a, b]\nallowed-origins: http://x\n"
        "enable-prefix-caching: false\ndry_run: true\nspeculative: layers:2\nmax-body-mb: 2.5\n"
    )
    config = settings("--config", file, "--max-num-seqs", 4)
    assert (config.engine.model, config.port, config.engine.dry_run) == ("some/model", 1234, True)
    assert config.engine.options["max_num_seqs"] == 4  # the command line goes first
    assert config.engine.options["prefix_cache"] == "off"
    assert (config.api.served_model_names, config.api.allowed_origins) == (("a", "b"), ("http://x",))
    assert settings("other", "--config", file).engine.model == "other"
    file.write_text("no-enable-prefix-caching: true\n")
    assert settings("--config", file).engine.options["prefix_cache"] == "off"
    file.write_text("")
    assert settings("--config", file).port == 8000


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("max-modell-len: 5", "there is no option 'max-modell-len'; the nearest is 'max-model-len'"),
        ("zzz: 1", "there is no option 'zzz'"),
        ("config: x.yaml", "there is no option 'config'"),
        ("port: [1, 2]", "'port' must have one value"),
        ("port:", "'port' must have one value, not none"),
        ("port: 1\nport: 2\nPORT: 3", "there is no option 'PORT'"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "'max_num_seqs' says again"),
        ("no-enable-prefix-caching: 5", "it must be true or false"),
        ("- port", "it must hold options"),
        ("port: {a", "this is not YAML"),
        ("port: 8.5", "Invalid value for '--port'"),
        ("max-body-mb: .nan", "error: --max-body-mb is nan; it must be a finite number, above 0"),
        ("max-num-seqs: true", "Invalid value for '--max-num-seqs'"),
        ("on-engine-death: panic", "'panic' is not one of 'exit', 'restart'"),
    ],
    ids=str,
)
def test_one_line_for_a_file_that_is_wrong(content, words, settings, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    result = run("serve", "--config", file)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", 70000], "port is 70000; it must be between 0 and 65535"),
        (["--drain-seconds", -1], "error: --drain-seconds is -1; it must be a finite number, at least 0"),
        (["--max-waiting", -1], "max_waiting is -1"),
        (["--request-timeout", 0], "--request-timeout is 0; it must be a finite number, above 0"),
        (["--max-body-mb", 0], "--max-body-mb is 0"),
        (["--kv-cache-mb", "nan"], "error: --kv-cache-mb is nan; it must be a finite number, above 0"),
        (["--kv-cache-mb", "inf"], "--kv-cache-mb is inf"),
        (["--dry-run", "--dry-run-step-ms", "nan"], "--dry-run-step-ms is nan"),
        (["--gpu-memory-utilization", "nan"], "--gpu-memory-utilization is nan"),
        (["--gpu-memory-utilization", 2], "--gpu-memory-utilization is 2; it must be a finite number, above 0 and"),
        (["--swap-space", -1], "--swap-space is -1; it must be a finite number, at least 0 and at most 1024"),
        (["--swap-space", 1025], "--swap-space is 1025"),
        (["--served-model-name", ""], "a served model name is empty"),
        (["--served-model-name", "a", "--served-model-name", " "], "a served model name is empty"),
        (["--api-key", " "], "api_key is empty"),
        (["--in-process", "--text-process"], "exclude each other"),
        (["--root-path", "x"], "root_path is 'x'; it must begin with /"),
        (["--num-draft-tokens", 2], "--speculative says who does"),
        (["--trust-remote-code"], "No such option"),
        (["--config", "no/such/file.yaml"], "does not exist"),
    ],
    ids=str,
)
def test_one_line_for_a_wrong_option(options, words, settings):
    result = run("serve", *options)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output


def test_what_is_found_out_before_an_engine_starts(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "serve", None)  # nothing gets there
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = run("serve", tiny("llama"), "--port", port)
    assert (taken.exit_code, taken.stderr.count("\n")) == (2, 1)
    assert f"error: port {port} of 127.0.0.1 is in use" in taken.stderr
    missing = run("serve", tmp_path)
    assert (missing.exit_code, missing.stderr.count("\n")) == (2, 1)
    assert "is not a model folder" in missing.stderr


def test_what_the_engine_refuses_is_one_line_too(tiny):
    result = run("serve", tiny("llama"), "--dry-run", "--in-process", "--port", 0, "--block-size", 0)
    assert (result.exit_code, result.stderr) == (2, "error: block_size is 0; it must be at least 1\n")


def test_mine_without_anything_green(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPINFER_WORKSPACE", str(tmp_path))
    result = run("serve", "--mine")
    assert result.exit_code == 2
    assert "no stage of yours is green yet" in result.stderr


def test_mine_is_heard_before_any_stage_is_imported_and_in_every_process(tmp_path):
    """Of the learner's stages the green ones count; an engine's process takes the same files as this one."""
    for stage in ("s02_kv_cache", "s03_paged_kv"):
        (tmp_path / stage).mkdir()
        (tmp_path / stage / "batch.py").touch()
    where = "import importlib.util as u; print(u.find_spec('stages.s02_kv_cache.batch').origin)"
    code = f"""
import subprocess, sys
from stages.workshop import workspace
from stages.workshop.exercises import find_stage
workspace.stages_to_take = lambda asked: [find_stage("02")]
from stages.cli.engines import take_mine
take_mine(True)
{where}
subprocess.run([sys.executable, "-c", {where!r}])
"""
    environment = {**os.environ, "STEPINFER_WORKSPACE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(tmp_path / "s02_kv_cache" / "batch.py")] * 2, done.stderr
    assert done.stderr == "your code: stage 02; the shipped code: all others\n"


def test_bench_is_mounted():
    assert "--request-rate" in run("bench", "serve", "--help").stdout
    assert run("bench", "serve", "--request-rate", "many").exit_code == 2


# ---- generate --------------------------------------------------------------------------------------------------------


def test_generate_as_a_dry_run(tiny):
    result = run("generate", tiny("llama"), "Once", "--raw", "--dry-run", "--max-tokens", 5)
    assert (result.exit_code, result.stdout) == (0, story(DryLLM(tiny("llama")), 5) + "\n")
    assert run("generate", tiny("llama"), "Once", "--dry-run", "--stage", 3).exit_code == 2


# ---- chat ------------------------------------------------------------------------------------------------------------


class Echo:
    """Says what it was asked."""

    name, cut = "echo", ""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, str]]] = []

    def answer(self, messages):
        self.asked.append([(message["role"], message["content"]) for message in messages])
        if messages[-1]["content"] == "break":
            raise ChatError("broken")
        yield from messages[-1]["content"].upper()


@pytest.fixture
def talk(monkeypatch, capsys):
    """Lines from a pipe to an echo: its exit code, what was said and noted, and what it was asked."""

    def talk_of(*lines: str, system: str = ""):
        echo = Echo()
        monkeypatch.setattr(sys, "stdin", iter_stdin(lines))
        code = converse(echo, system)
        return code, capsys.readouterr(), echo.asked

    return talk_of


def iter_stdin(lines):
    return io.StringIO("".join(line + "\n" for line in lines))


def test_a_conversation_grows(talk):
    code, said, asked = talk("one", "", "  two ")
    assert (code, said.out, said.err) == (0, "ONE\nTWO\n", "")
    assert asked == [[("user", "one")], [("user", "one"), ("assistant", "ONE"), ("user", "two")]]


def test_commands(talk):
    code, said, asked = talk(
        "one", "/system You are a cat.", "two", "/reset", "/system", "three", "/what", "/help", "/exit", "four"
    )
    assert code == 0
    assert asked[1][0] == ("system", "You are a cat.")
    assert asked[2] == [("user", "three")]
    assert len(asked) == 3
    assert "There is no command /what." in said.err
    assert "/reset" in said.err


def test_a_question_that_got_no_answer_is_forgotten(talk):
    code, said, asked = talk("one", "break", "two", system="s")
    assert (code, said.out) == (1, "ONE\nTWO\n")
    assert "error: broken" in said.err
    assert asked[-1] == [("system", "s"), ("user", "one"), ("assistant", "ONE"), ("user", "two")]


def test_terminals_are_not_told_what_to_do():
    assert printable("a\x1b[2Jb\n\tc\x9b") == "a[2Jb\n\tc"
    assert printable("👩‍💻 é 漢\u00a0字") == "👩‍💻 é 漢\u00a0字"


@pytest.fixture(scope="module")
def local(tiny):
    """A dry run with room for a short conversation."""
    return DryLLM(tiny("llama"), max_model_len=100)


def story(llm, count):
    return llm.tokenizer.decode(llm.tokenizer.encode(STORY)[:count])


def test_local_model(local):
    model = LocalModel(local, SamplingParams(max_tokens=6))
    assert "".join(model.answer([{"role": "user", "content": "Hi"}])) == story(local, 6)
    assert model.cut == "cut after 6 tokens: --max-tokens"


def test_a_conversation_that_no_longer_fits(local):
    model, messages = (
        LocalModel(local, SamplingParams(max_tokens=None, ignore_eos=True)),
        [{"role": "user", "content": "Hi"}],
    )
    text = "".join(model.answer(messages))
    assert model.cut == "cut: the conversation has reached the 100 tokens that the model reads; /reset begins a new one"
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on"}]
    with pytest.raises(ChatError, match=r"has \d+ tokens, and the model reads 100; /reset begins a new one"):
        next(model.answer(messages))


def test_control_c_stops_the_answer_and_not_the_engine(local):
    model, before = LocalModel(local, SamplingParams(max_tokens=50, ignore_eos=True)), signal.getsignal(signal.SIGINT)
    stream = model.answer([{"role": "user", "content": "Hi"}])
    next(stream)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert signal.getsignal(signal.SIGINT) is before
    assert local.engine.scheduler.running == []
    assert "".join(model.answer([{"role": "user", "content": "Hi"}])).startswith(story(local, 6))


def test_a_second_control_c_does_not_break_into_a_step_either(local, monkeypatch):
    """Where blocks are out of the pool's books and in nobody's yet."""
    model, pool = LocalModel(local, SamplingParams(max_tokens=6)), local.engine.scheduler.cache.pool
    allocate = pool.allocate

    def pressed(count):
        blocks = allocate(count)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return blocks

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pool, "allocate", pressed)
        list(model.answer([{"role": "user", "content": "Hi"}]))
    assert pool.num_free == pool.num_blocks - 1
    assert "".join(model.answer([{"role": "user", "content": "Hi"}])) == story(local, 6)


def test_control_c_at_a_terminal_and_in_a_pipe(monkeypatch, capsys):
    class Interrupted(Echo):
        def answer(self, messages):
            yield "half"
            raise KeyboardInterrupt

    conversation = Conversation()
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert terminal_chat.answer(Interrupted(), conversation, "Hi")
    assert conversation.turns[-1]["content"] == "half"
    assert capsys.readouterr().err == "stopped\n"
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    with pytest.raises(KeyboardInterrupt):
        terminal_chat.answer(Interrupted(), conversation, "Hi")


def test_chat_through_a_pipe(tiny):
    result = run("chat", tiny("llama"), "--dry-run", "--max-tokens", 4, text="Hello\nAgain\n")
    told = result.stdout.splitlines()
    assert (result.exit_code, len(told)) == (0, 2)
    assert told[0] == told[1] == story(DryLLM(tiny("llama")), 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--url", "127.0.0.1:8000"], "it must begin with http:// or https://"),
        (["--url", "http://127.0.0.1:9"], "there is no server at http://127.0.0.1:9"),
        (["--url", "http://x", "--dry-run"], "--url is a server elsewhere"),
        (["--temperature", -1], "error: --temperature is -1; it must be a finite number, at least 0"),
        (["--top-p", "nan"], "error: --top-p is nan; it must be a finite number, above 0 and at most 1"),
        (["no/such/folder/here"], "neither a folder here nor a hub id"),
    ],
    ids=str,
)
def test_one_line_when_nobody_can_be_talked_to(options, words):
    result = run("chat", *options, text="Hi\n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


# ---- a server that may say anything ----------------------------------------------------------------------------------


CLIENT = httpx.Client


def remote(monkeypatch, answer, **options):
    """A `RemoteModel` whose server is a function from a request to a response."""
    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(chat_client.httpx, "Client", functools.partial(CLIENT, transport=transport))
    key, name = options.pop("key", None), options.pop("model", "m")
    return RemoteModel("http://server/v1/", key, name, SamplingParams(**options))


def stream_of(*chunks: object) -> bytes:
    return b"".join(b"data: " + (c if isinstance(c, bytes) else json.dumps(c).encode()) + b"\n\n" for c in chunks)


def delta(text, reason=None):
    return {"choices": [{"delta": {"content": text}, "finish_reason": reason}]}


def test_what_a_server_is_sent(monkeypatch):
    def answer(request):
        asked.append(request)
        return httpx.Response(200, content=stream_of(delta("a"), delta(None), delta("b", "length"), b"[DONE]"))

    asked = []
    model = remote(monkeypatch, answer, key="k", max_tokens=5, temperature=0.5, seed=3)
    assert "".join(model.answer([{"role": "user", "content": "Hi"}])) == "ab"
    assert "--max-tokens" in model.cut
    assert (str(asked[0].url), asked[0].headers["authorization"]) == ("http://server/v1/chat/completions", "Bearer k")
    assert json.loads(asked[0].content).items() >= {"model": "m", "stream": True, "max_tokens": 5, "seed": 3}.items()


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (
            httpx.Response(400, json={"error": {"message": "too long"}}),
            "400: too long; /reset begins a new conversation",
        ),
        (httpx.Response(502, text="<b>bad\ngateway"), "502: <b>bad gateway"),
        (httpx.Response(200, content=stream_of(delta("a"), {"error": {"message": "died"}})), "died"),
        (httpx.Response(200, content=stream_of(delta("a"))), "closed the connection before the answer was complete"),
    ],
    ids=str,
)
def test_servers_that_fail(response, words, monkeypatch):
    model = remote(monkeypatch, lambda request: response)
    with pytest.raises(ChatError, match=words):
        list(model.answer([{"role": "user", "content": "Hi"}]))


def test_servers_that_are_none(monkeypatch):
    with pytest.raises(ValueError, match="http://server answers 401: who are you"):
        remote(monkeypatch, lambda request: httpx.Response(401, json={"error": {"message": "who are you"}}), model=None)
    with pytest.raises(ValueError, match="lists no model"):
        remote(monkeypatch, lambda request: httpx.Response(200, text="<html>"), model=None)
