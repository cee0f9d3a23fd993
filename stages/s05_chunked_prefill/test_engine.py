"""The engine with a real model: however prompts are cut, the same tokens come out, and nothing comes too early."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.s01_forward.llm import LLM as Uncached
from stages.s01_forward.llm import hidden_states
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.kv_store import kv_bytes_per_token
from stages.s02_kv_cache.recorder import recorded_steps
from stages.s04_continuous_batching.recorder import RecordedBatch, recorded_batches
from stages.s04_continuous_batching.scheduler import Step
from stages.s05_chunked_prefill.llm import LLM
from tests.fixtures import FAMILIES, each_family

BLOCK = 8
LENGTHS = (1, 7, 8, 9, 16, 17, 30)
PROMPTS = [[(31 * length + 7 * i) % 497 + 3 for i in range(length)] for length in LENGTHS]
PARAMS = [
    SamplingParams(max_tokens=2 + i % 3, temperature=1.2 * (i % 2), seed=i, n=1 + 2 * (i == 3), logprobs=0)
    for i in range(len(PROMPTS))
]
LONG = list(range(100, 200))


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(folder, device="cpu", **{"dtype": "float32", "block_size": BLOCK, "kv_cache_mb": 2, **options})


def answers(llm: Any, prompts: Any = PROMPTS, params: Any = PARAMS) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in llm.generate(prompts, params)]


def all_free(llm: LLM) -> bool:
    scheduler = llm.engine.scheduler
    scheduler.cache.pool.check()
    free = scheduler.cache.pool.num_free == scheduler.cache.pool.num_blocks - 1
    return free and len(scheduler.swap.free) == scheduler.swap.num_blocks and not scheduler.has_work


def rows_of(batches: list[RecordedBatch]) -> list[list[tuple[int, int, bool]]]:
    """Per step and row: (first position, number of tokens, does it sample?)."""
    return [[(row.start, row.computed, row.samples) for row in batch.rows] for batch in batches]


# ---- the same ids, however prompts are cut ---------------------------------------------------------------------------


@each_family
def test_any_chunk_size_and_any_budget_gives_the_ids_of_stage_01(family, tiny):
    expected = answers(Uncached(tiny(family), device="cpu", dtype="float32"))
    for chunk in (1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1):
        llm = engine(tiny(family), max_chunk=chunk)
        assert answers(llm) == expected, f"max_chunk {chunk}"
        assert all_free(llm)
    for rows, budget in ((1, 1), (3, 4), (4, BLOCK - 1), (4, BLOCK), (4, BLOCK + 1), (9, 40)):
        llm = engine(tiny(family), max_num_seqs=rows, max_num_batched_tokens=budget)
        with recorded_batches(llm.engine) as batches:
            assert answers(llm) == expected, f"{rows} rows, budget {budget}"
        sizes = [sum(row.computed for row in batch.rows) for batch in batches]
        assert max(sizes) == budget
        assert max(len(batch.rows) for batch in batches) <= rows


@pytest.mark.parametrize("swap_mb", [0, 1])
@pytest.mark.parametrize(("family", "chunk"), [*((f, 5) for f in FAMILIES), *(("qwen2", c) for c in (1, 2, 3, 4, 7))])
def test_forced_preemption_gives_the_same_ids(family, chunk, swap_mb, tiny):
    """A pool of one and a half requests, blocks of 4: some are computed again, or come back from host memory."""
    prompts = [[(13 * i + 5 * number) % 490 + 3 for i in range(18 + number)] for number in range(5)]
    params = [SamplingParams(max_tokens=14, temperature=0.9 * (i % 2), seed=i, ignore_eos=True) for i in range(5)]
    plain = Uncached(tiny(family), device="cpu", dtype="float32")
    each = kv_bytes_per_token(plain.config, torch.float32)
    llm = engine(
        tiny(family),
        block_size=4,
        kv_cache_mb=(15 + 1) * 4 * each / 2**20,
        max_model_len=40,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        max_chunk=chunk,
        swap_mb=swap_mb,
    )
    copied, execute = [], llm.engine.runner.execute
    llm.engine.runner.execute = lambda plan: (copied.extend(plan.swap_in), execute(plan))[1]
    assert answers(llm, prompts, params) == answers(plain, prompts, params)
    assert llm.engine.scheduler.num_preemptions >= 3
    assert bool(copied) == bool(swap_mb)
    assert all_free(llm)


@pytest.mark.parametrize("length", [1, 8, 9, 16, 17])
@each_family
def test_logits_after_a_last_chunk_of_one_token(family, length, tiny):
    """Chunks of 8: the last prompt token is one that the model would not say. sgl-project/sglang#30181."""
    llm = engine(tiny(family), max_chunk=8)
    prompt = LONG[: length - 1]
    said = llm.model.logits(hidden_states(llm.model, prompt)[-1]).argmax().item() if prompt else 0
    prompt = [*prompt, (said + 11) % 490]
    with recorded_steps(llm.model) as steps:
        llm.generate([prompt], SamplingParams(max_tokens=1))
    (step,) = steps
    assert step.input_ids == prompt[(length - 1) // 8 * 8 :]
    assert step.positions[-1] == length - 1
    expected = llm.model.logits(hidden_states(llm.model, prompt)[-1:])
    assert (step.logits - expected).abs().max().item() <= 1e-4


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_what_a_neighbour_asks_changes_no_bit(family, tiny):
    """Chunks of the one and decodes of the other in one forward pass; lengths stay, so do all shapes."""
    llm, mine = engine(tiny(family), max_num_seqs=4, max_num_batched_tokens=7), [3, 5, 8, 13, 21]
    runs = []
    for other in (LONG[:40], [499] * 40):
        params = [SamplingParams(max_tokens=12, ignore_eos=True, logprobs=5), SamplingParams(max_tokens=3)]
        runs.append(llm.generate([mine, other], params)[0].outputs[0])
    assert runs[0] == runs[1]


# ---- nothing comes too early -----------------------------------------------------------------------------------------


def test_no_token_before_the_whole_prompt_is_computed(tiny, monkeypatch):
    """Chunks of 4, prompt 10, 3 tokens: 3 events, 3 rows sampled. deepjavalibrary/djl-serving#2299."""
    from stages.s04_continuous_batching import runner

    sampled, sample = [], runner.sample
    monkeypatch.setattr(runner, "sample", lambda logits, rows: (sampled.append(len(rows)), sample(logits, rows))[1])
    llm = engine(tiny("qwen2"), max_chunk=4)
    with recorded_batches(llm.engine) as batches:
        stream = llm.stream([LONG[:10]], SamplingParams(max_tokens=3, temperature=1.0, seed=5, ignore_eos=True))
        events = [next(stream)]
        assert rows_of(batches) == [[(0, 4, False)], [(4, 4, False)], [(8, 2, True)]]
        events += stream
    assert len(events) == 3
    assert all(event.token_id >= 0 for event in events)
    assert [event.finish_reason for event in events] == [None, None, "length"]
    assert sampled == [1, 1, 1]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 9, 10, None])
def test_draws_do_not_depend_on_the_chunks(chunk, tiny, monkeypatch):
    """As many random draws as tokens, and the same ones; penalties and logprobs too."""
    from stages.s04_continuous_batching import runner

    sampled, sample = [], runner.sample
    monkeypatch.setattr(runner, "sample", lambda logits, rows: (sampled.append(len(rows)), sample(logits, rows))[1])
    llm = engine(tiny("qwen2"), max_chunk=chunk)
    params = SamplingParams(
        max_tokens=6,
        temperature=2.0,
        seed=3,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        logprobs=2,
        ignore_eos=True,
    )
    outputs = llm.generate([LONG[:10], LONG[:3]], params)
    assert sum(sampled) == 12
    expected = Uncached(tiny("qwen2"), device="cpu").generate([LONG[:10], LONG[:3]], params)
    for output, alone in zip(outputs, expected, strict=True):
        assert output.token_ids == alone.token_ids
        for entry, same in zip(output.outputs[0].logprobs, alone.outputs[0].logprobs, strict=True):
            assert entry.logprob == pytest.approx(same.logprob, abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 9, 10, 11])
def test_prompt_logprobs_are_those_of_the_whole_prompt(chunk, tiny):
    """Each belongs to its token, the first of a later chunk too. vllm-project/vllm#5846."""
    params = SamplingParams(max_tokens=2, prompt_logprobs=3)
    (whole,) = Uncached(tiny("qwen2"), device="cpu").generate([LONG[:10]], params)
    llm = engine(tiny("qwen2"), max_chunk=chunk)
    (output,) = llm.generate([LONG[:10]], params)
    assert len(output.prompt_logprobs) == 10
    assert output.prompt_logprobs[0] is None
    scores = llm.model.logits(hidden_states(llm.model, LONG[:10])).log_softmax(-1)  # [T, V]
    for i in range(1, 10):
        entry, same = output.prompt_logprobs[i], whole.prompt_logprobs[i]
        assert (entry.token_id, entry.rank) == (LONG[i], same.rank)
        assert entry.logprob == pytest.approx(scores[i - 1, LONG[i]].item(), abs=1e-5)
        assert dict(entry.top) == pytest.approx(dict(same.top), abs=1e-5)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt(after, tiny):
    """What is known is not told again; what is missing is computed."""
    llm = engine(tiny("qwen2"), max_chunk=4)
    params = SamplingParams(max_tokens=3, prompt_logprobs=2)
    (expected,) = llm.generate([LONG[:14]], params)
    step, count = llm.engine.step, itertools.count(1)

    def interrupted() -> Any:
        events = step()
        if next(count) == after:
            llm.engine.scheduler.preempt(llm.engine.scheduler.running[0], Step())
        return events

    llm.engine.step = interrupted
    (output,) = llm.generate([LONG[:14]], params)
    assert output.token_ids == expected.token_ids
    assert [entry and entry.token_id for entry in output.prompt_logprobs] == [None, *LONG[1:14]]
    assert [entry.logprob for entry in output.prompt_logprobs[1:]] == pytest.approx(
        [entry.logprob for entry in expected.prompt_logprobs[1:]], abs=1e-5
    )


# ---- time, counted in steps ------------------------------------------------------------------------------------------


def test_running_answers_get_a_token_in_every_step_while_a_long_prompt_arrives(tiny):
    llm = engine(tiny("qwen2"), max_num_seqs=4, max_num_batched_tokens=16)
    running = llm.stream([[5, 6], [7], [8, 9, 10]], SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(6):
        next(running)
    with recorded_batches(llm.engine) as batches:
        late = llm.stream([LONG], SamplingParams(max_tokens=2, ignore_eos=True))
        first = next(late)
        assert len(batches) == 8, "100 tokens, 13 of them in each step"
        assert all(sum(row.computed for row in batch.rows) <= 16 for batch in batches)
        assert all(set(batch.tokens) >= {0, 1, 2} for batch in batches)
        rest = [*late, *running]
    assert all_free(llm)
    alone = answers(llm, [[5, 6], [7], [8, 9, 10], LONG], SamplingParams(max_tokens=30, ignore_eos=True))
    assert [first.token_id, *(event.token_id for event in rest[:1])] == alone[3][0][:2]


def test_resumption_replays_its_own_output_in_chunks(tiny):
    """Chunks of 4, prompt 5, preempted after 7 tokens: positions 0..11 in 3 chunks. tenstorrent/vllm-tt-plugin#52."""
    llm = engine(tiny("qwen2"), max_chunk=4)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    ((expected,),) = answers(llm, [LONG[:5]], params)
    stream = llm.stream([LONG[:5]], params)
    tokens = [next(stream).token_id for _ in range(7)]
    llm.engine.scheduler.preempt(llm.engine.scheduler.running[0], Step())
    with recorded_batches(llm.engine) as batches:
        tokens += [event.token_id for event in stream]
    assert tokens == expected
    assert rows_of(batches) == [
        [(0, 4, False)],
        [(4, 4, False)],
        [(8, 4, True)],
        *([(position, 1, True)] for position in range(12, 16)),
    ]


def test_a_stream_that_is_left_in_the_middle_of_a_prompt_frees_everything(tiny):
    llm = engine(tiny("qwen2"), max_chunk=4)
    stream = llm.stream([[5], LONG], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    assert 0 < llm.engine.scheduler.running[1].sequence.num_kv < 100
    stream.close()
    assert all_free(llm)


def test_long_prompts_through_a_budget_far_below_them(tiny):
    """255 tokens in steps of 2; stage 04 would refuse the budget."""
    llm = engine(tiny("qwen2"), max_num_seqs=2, max_num_batched_tokens=2)
    prompt = [(17 * i) % 490 for i in range(255)]
    assert answers(llm, [prompt], None) == answers(Uncached(tiny("qwen2"), device="cpu"), [prompt], None)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0; it must be between 64 and 1048576"),
        ({"max_num_batched_tokens": 63}, "max_num_batched_tokens is 63; it must be between 64 and"),
        ({"max_num_batched_tokens": 3, "max_num_seqs": 4}, "max_num_batched_tokens is 3; it must be between 4 and"),
        ({"max_num_batched_tokens": 10**9}, "max_num_batched_tokens is 1000000000; .* 1048576"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1"),
        ({"max_num_batched_tokens": 64.0}, "max_num_batched_tokens is 64.0; it must be a whole number"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens is True"),
        ({"max_num_batched_tokens": "64"}, "max_num_batched_tokens is '64'"),
        ({"max_chunk": 0}, "max_chunk is 0; it must be at least 1"),
        ({"max_chunk": -4}, "max_chunk is -4"),
        ({"max_chunk": 1.5}, "max_chunk is 1.5"),
    ],
    ids=str,
)
def test_bad_budgets_are_refused(options, words, tiny):
    with pytest.raises((ValueError, TypeError), match=words):
        engine(tiny("qwen2"), **options)


def test_the_smallest_budget_is_one_token_per_answer(tiny):
    llm = engine(tiny("qwen2"), max_num_seqs=70)
    assert llm.max_num_batched_tokens == 2048
    assert engine(tiny("qwen2"), max_num_seqs=3000).max_num_batched_tokens == 3000
    assert engine(tiny("qwen2"), max_num_seqs=7, max_num_batched_tokens=7).max_num_batched_tokens == 7
