"""The benchmark's own arithmetic, and the peers that it starts; its figures are not judged here."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter, dequantize, quantize

from reference.baselines.demo_gguf import unquantised
from reference.baselines.servers import LLAMA_SERVER, free_port, llama_server, serving, transformers_serve
from reference.bench.harness import Measurement, Result
from stages.s09_server.bench_dry_run import DryLoad, busiest, engine_seconds, one_run
from stages.s09_server.bench_load import WHAT, Contender, RatedLoad, figures, judge, series_of
from stages.s09_server.bench_load import one_run as one_rate
from stages.s09_server.load_prompts import Lengths
from stages.s09_server.load_target import Target
from stages.s09_server.scripted_server import Script, ScriptedServer, answer, text

LOAD = RatedLoad({20.0: 3, 40.0: 4}, Lengths(3, 5))


def server_of(script):
    listed = b'{"data": [{"id": "m"}]}'
    json = b"Content-Type: application/json\r\n"
    return ScriptedServer(lambda body: Script([(0.0, listed)], headers=json) if "path" in body else script(body))


def test_busiest_functions():
    stacks = [
        "main (a/b.py:1);send.<locals>.chunk (site-packages/x/sse.py:9) 6",
        "main (a/b.py:1);send.<locals>.chunk (site-packages/x/sse.py:7) 2",
        "main (a/b.py:3) 2",
    ]
    assert busiest(stacks) == [("chunk (sse.py)", 0.8), ("main (b.py)", 0.2)]


def test_engine_alone_tells_every_token(tiny):
    assert engine_seconds(str(tiny("llama")), DryLoad(3, 7, 1), 0.0, 1) > 0


def test_a_dry_run_that_loses_tokens_is_no_result():
    with server_of(lambda body: answer(2)) as server:
        assert len(one_run(Target(server.url), DryLoad(2, 2), 1, 3).traces) == 6
        with pytest.raises(RuntimeError, match="4 tokens in 2 answers"):
            one_run(Target(server.url), DryLoad(2, 3), 1)


def test_rates_of_a_contender():
    result = Result("x", "")
    with server_of(lambda body: answer(body["max_tokens"], first=0.02)) as server:
        contender = Contender("StepInfer", [], int(server.url.rpartition(":")[2]), {"whole": True})
        for rate, count in LOAD.rates.items():
            result.measurements += figures("StepInfer", rate, count, one_rate(contender, LOAD, rate, count))
    assert all(body["whole"] for body in server.bodies if "path" not in body)
    series = series_of(result, WHAT["ttft"], LOAD.rates)
    assert list(series) == ["StepInfer"] and len(series["StepInfer"]) == 2
    assert all(0.02 <= each.low <= each.median <= each.high for each in series["StepInfer"])


def test_a_contender_whose_answers_are_short_is_no_result():
    with server_of(lambda body: Script([(0.0, text(" a", "stop"))])) as server:
        contender = Contender("x", [], int(server.url.rpartition(":")[2]))
        with pytest.raises(RuntimeError, match=r"x: answers of \[1\] tokens"):
            one_rate(contender, LOAD, 20.0, 3)


def test_verdict():
    result = Result("x", "")
    for name, factor in (("StepInfer", 1.0), ("other", 2.0), ("third", 0.25)):
        for what in WHAT.values():
            for rate in LOAD.rates:
                result.measurements.append(Measurement.single(f"{what}, {rate:g} requests/s, {name}", factor, "s"))
    judge(result, LOAD)
    assert "time to first token, 2.0, 2.0 times shorter than with other at 20, 40 requests/s" in result.wins
    assert "inter-token latency, 4.0, 4.0 times longer than with third at 20, 40 requests/s" in result.loses
    assert "third" not in result.wins and "other" not in result.loses


def test_server_that_ends_says_its_last_words():
    command = [sys.executable, "-c", "print('no weights here'); raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match="no weights here"), serving(command, free_port()):
        pass


def test_server_has_ended_after_the_block():
    port = free_port()
    code = (
        "import http.server as h\n"
        "class Ready(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        f"h.HTTPServer(('127.0.0.1', {port}), Ready).serve_forever()"
    )
    with serving([sys.executable, "-c", code], port) as process:
        assert process.poll() is None
    assert process.poll() is not None


def test_commands(monkeypatch):
    plain = transformers_serve(Path("model"), 81)
    assert plain[-4:] == ["--host", "127.0.0.1", "--port", "81"] and "--continuous-batching" not in plain
    assert "--continuous-batching" in transformers_serve(Path("model"), 81, continuous_batching=True)
    monkeypatch.setenv(LLAMA_SERVER, "my-server")
    command = llama_server(Path("m.gguf"), 82, threads=3, slots=4, context=100)
    assert command[:3] == ["my-server", "--model", "m.gguf"] and command[command.index("--ctx-size") + 1] == "400"
    monkeypatch.delenv(LLAMA_SERVER)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match=LLAMA_SERVER):
        llama_server(Path("m.gguf"), 82, threads=3)


@pytest.mark.parametrize("stored", ["f32", "bf16"])
def test_unquantised_weights(tmp_path, stored):
    """Rounded as torch rounds, to bfloat16; metadata comes along."""
    source, weights = GGUFWriter(tmp_path / "q8.gguf", "llama"), np.random.default_rng(0).normal(size=(8, 64))
    source.add_array("tokenizer.ggml.tokens", ["a", "é"])
    source.add_block_count(1)
    source.add_tensor("w", quantize(weights.astype(np.float32), Kind.Q8_0), raw_dtype=Kind.Q8_0)
    source.add_tensor("norm", weights[0].astype(np.float32))
    source.write_header_to_file()
    source.write_kv_data_to_file()
    source.write_tensors_to_file()
    source.close()
    read = GGUFReader(unquantised(tmp_path / "q8.gguf", tmp_path / "plain.gguf", stored))
    assert read.fields["tokenizer.ggml.tokens"].contents() == ["a", "é"]
    assert read.fields["llama.block_count"].contents() == 1
    found = {each.name: each for each in read.tensors}
    assert found["w"].tensor_type == (Kind.F32 if stored == "f32" else Kind.BF16)
    assert found["norm"].tensor_type == Kind.F32
    for before in GGUFReader(tmp_path / "q8.gguf").tensors:
        rounded = torch.tensor(dequantize(before.data, before.tensor_type)).to(torch.bfloat16).float().numpy()
        after = found[before.name]
        assert np.array_equal(dequantize(after.data, after.tensor_type), rounded)
