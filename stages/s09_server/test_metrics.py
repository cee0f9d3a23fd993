"""What Prometheus reads: it can be parsed, and the numbers are those of what happened."""

import asyncio

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stages.s01_forward.tokenizer import Tokenizer
from stages.s09_server.api import ApiSettings, make_app
from stages.s09_server.messages import EngineStats
from stages.s09_server.metrics import Histogram, Metrics
from stages.s09_server.puppet import Puppet

ASK = {"model": "m", "prompt": "abc", "n": 2}


@pytest.fixture(scope="module")
def tokenizer(tiny) -> Tokenizer:
    return Tokenizer(tiny("qwen2"))


def samples(page: bytes | str) -> dict[tuple[str, ...], float]:
    """Values by name and labels, without the label that all have."""
    text = page if isinstance(page, str) else page.decode()
    values = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith("."), family.name
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "m"
            values[sample.name.removeprefix("stepinfer_"), *labels.values()] = sample.value
    return values


class TestHistogram:
    def test_a_bound_belongs_to_its_bucket(self):
        histogram = Histogram((1.0, 2.0))
        for value in (0.0, 1.0, 1.5, 2.0, 2.5, 100.0):
            histogram.observe(value)
        assert histogram.buckets() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 6.0)]
        assert histogram.sum == 107.0

    def test_many_at_once(self):
        histogram = Histogram((1.0,))
        histogram.observe(0.5, 3)
        assert (histogram.buckets(), histogram.sum) == ([("1.0", 3.0), ("+Inf", 3.0)], 1.5)


class TestEngine:
    STATS = EngineStats(
        running=3, waiting=2, kv_blocks_used=16, kv_blocks=64, preemptions=5, queried_tokens=100, hit_tokens=40,
        drafted=20, accepted=8, steps=9, tokens=11, failed_steps=1,
    )  # fmt: skip

    def test_as_the_engine_counts(self):
        values = samples(Metrics("m", lambda: self.STATS).text())
        expected = {
            "num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.25,
            "num_preemptions_total": 5, "prefix_cache_queries_total": 100, "prefix_cache_hits_total": 40,
            "spec_decode_num_draft_tokens_total": 20, "spec_decode_num_accepted_tokens_total": 8,
            "engine_steps_total": 9, "engine_failed_steps_total": 1,
        }  # fmt: skip
        for name, value in expected.items():
            assert values[name,] == value, name

    def test_before_the_first_step(self):
        assert samples(Metrics("m", EngineStats).text())["kv_cache_usage_perc",] == 0.0

    def test_names_of_vllm(self):
        """Those that a dashboard for vLLM reads, with our prefix for its own."""
        page = Metrics("m", EngineStats).text().decode()
        for name, kind in [
            ("num_requests_running", "gauge"), ("num_requests_waiting", "gauge"), ("kv_cache_usage_perc", "gauge"),
            ("prompt_tokens_total", "counter"), ("generation_tokens_total", "counter"),
            ("num_preemptions_total", "counter"), ("request_success_total", "counter"),
            ("time_to_first_token_seconds", "histogram"), ("inter_token_latency_seconds", "histogram"),
            ("e2e_request_latency_seconds", "histogram"),
        ]:  # fmt: skip
            assert f"# TYPE stepinfer_{name} {kind}\n" in page

    def test_two_servers_do_not_share(self):
        one, other = Metrics("m", EngineStats), Metrics("m", EngineStats)
        one.prompt_tokens += 5
        assert samples(other.text())["prompt_tokens_total",] == 0


class TestRequests:
    def scenario(self, puppet: Puppet, *bodies: dict) -> dict:
        """The metrics after these requests, one after the other."""

        async def go():
            transport = httpx.ASGITransport(make_app(puppet, ApiSettings(("m",))), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://puppet") as client:
                for body in bodies:
                    await client.post("/v1/completions", json=body)
                page = await client.get("/metrics")
                assert page.headers["content-type"].startswith("text/plain; version=")
                return samples(page.text)

        return asyncio.run(go())

    def test_tokens_latencies_and_ends(self, tokenizer):
        """Two answers of 4 and 3 tokens; one came with two of them at once."""
        script = [
            {"text": "a"}, {"text": "a", "answer": 1}, {"text": "b", "token_ids": [7, 8]}, {"text": "b", "answer": 1},
            {"text": "c", "finish_reason": "stop"}, {"text": "c", "answer": 1, "finish_reason": "length"},
        ]  # fmt: skip
        values = self.scenario(Puppet(tokenizer, *script), ASK, ASK | {"stream": True})
        assert values["prompt_tokens_total",] == 2 * 3
        assert values["generation_tokens_total",] == 2 * 7
        assert values["time_to_first_token_seconds_count",] == 2 * 2
        assert values["inter_token_latency_seconds_count",] == 2 * (3 + 2)
        assert values["e2e_request_latency_seconds_count",] == 2 * 2
        assert values["request_success_total", "stop"] == values["request_success_total", "length"] == 2
        assert values["request_success_total", "abort"] == 0
        assert values["http_responses_total", "200"] == 2
        for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
            assert values[f"{name}_seconds_bucket", "+Inf"] == values[f"{name}_seconds_count",]
            assert values[f"{name}_seconds_sum",] > 0

    def test_refusals_and_errors(self, tokenizer):
        script = [{"text": "a"}, {"finish_reason": "error", "error": "why"}]
        bad = [ASK | {"n": 0}, ASK | {"model": "other"}]
        values = self.scenario(Puppet(tokenizer, *script), *bad, ASK, ASK | {"stream": True})
        assert values["http_responses_total", "400"] == values["http_responses_total", "404"] == 1
        assert values["http_responses_total", "500"] == 1
        assert values["http_responses_total", "200"] == 1  # of the stream: its status was sent before
        assert values["request_success_total", "error"] == 2
        assert values["request_success_total", "abort"] == 2  # the other answers of both
