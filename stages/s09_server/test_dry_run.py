"""A dry run is all of the engine but the model: scheduler, cache, limits, times."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages.s01_forward.sampling_params import SamplingParams
from stages.s08_speculative.llm import LLM
from stages.s09_server import dry_run
from stages.s09_server.dry_run import STORY, DryLLM


def all_free(llm: DryLLM) -> bool:
    while llm.engine.has_work:
        llm.engine.step()
    pool = llm.engine.scheduler.cache.pool
    pool.check()
    return pool.num_free == pool.num_blocks - 1


@pytest.fixture
def dry(tiny) -> Any:
    return lambda **options: DryLLM(tiny("qwen2"), device="cpu", **options)


def test_every_answer_tells_the_story(dry):
    """To its EOS; on and on, if that is ignored; over and over, whatever the prompt."""
    llm = dry()
    params = SamplingParams(max_tokens=None)
    outputs = llm.generate(["Hello", [5, 6, 7], [9] * 200], params)
    assert [(output.text, output.finish_reason) for output in outputs] == [(STORY, "stop")] * 3
    story = outputs[0].token_ids
    long = llm.generate([[5]], SamplingParams(max_tokens=2 * len(story) + 3, ignore_eos=True))[0]
    assert long.token_ids == story + story + story[:3]
    assert all_free(llm)


def test_a_model_without_a_tokenizer(tiny, tmp_path):
    for file in Path(tiny("qwen2")).iterdir():
        if "token" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    llm = DryLLM(tmp_path, device="cpu")
    (output,) = llm.generate([[5]], SamplingParams(max_tokens=20))
    assert (output.text, set(output.token_ids) - llm.requests.eos_token_ids) == ("", {511})


def test_scores(dry):
    """Each token is certain; whoever asks for others gets them."""
    params = SamplingParams(max_tokens=5, logprobs=3, prompt_logprobs=1)
    (output,) = dry().generate([[5, 6, 7]], params)
    for score, token in zip(output.outputs[0].logprobs, output.token_ids, strict=True):
        assert (score.token_id, score.logprob, score.rank, len(score.top)) == (token, 0.0, 1, 3)
        assert score.top[0] == (token, 0.0) and len(dict(score.top)) == 3
    assert [score and score.token_id for score in output.prompt_logprobs] == [None, 6, 7]
    (output,) = dry().generate([[5, 6, 7]], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert (output.token_ids, len(output.prompt_logprobs)) == ([], 3)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_small_pool(overlap, dry):
    """Preempted and computed again, cut in chunks: the books are the real ones, and so is the story."""
    llm = dry(kv_cache_mb=0.25, block_size=4, max_num_seqs=6, max_num_batched_tokens=48, overlap=overlap)
    expected = dry().generate([[5]], SamplingParams(max_tokens=60, ignore_eos=True))[0].token_ids
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    outputs = llm.generate([[number] * (3 + 7 * number) for number in range(1, 13)], params)
    assert [output.token_ids for output in outputs] == [expected] * 12
    assert llm.engine.scheduler.num_preemptions > 0
    assert all_free(llm)


def test_no_weights_are_read(dry, tiny):
    """A config is enough; what the engine says of itself is what it would say with them."""
    llm, real = dry(), LLM(tiny("qwen2"), device="cpu")
    assert all(parameter.is_meta for parameter in llm.model.parameters())
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "dtype", "device"):
        assert getattr(llm, name) == getattr(real, name), name
    pools = [each.engine.scheduler.cache.pool.num_blocks for each in (llm, real)]
    assert pools[0] == pools[1]


def test_a_step_takes_its_time(dry, monkeypatch):
    """One after the other, for three answers together; by a clock that goes on while the engine sleeps."""

    def sleep(seconds: float) -> None:
        now[0] += seconds

    now, params = [100.0], SamplingParams(max_tokens=20, ignore_eos=True)
    monkeypatch.setattr(dry_run, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep))
    llm = dry(step_ms=5.0)
    for _ in range(2):
        began = now[0]
        llm.generate([[5], [6], [7]], params)
        assert now[0] - began == pytest.approx(20 * 0.005)
        now[0] += 1.0  # nobody asks for anything


@pytest.mark.parametrize(
    ("options", "words"),
    [({"step_ms": -1.0}, "dry_run_step_ms.*-1"), ({"speculative": "ngram"}, "speculative.*ngram.*dry run"),
     ({"max_model_len": 10**6}, "max_model_len.*256")],
)  # fmt: skip
def test_bad_options(options, words, dry):
    with pytest.raises(ValueError, match=words):
        dry(**options)
