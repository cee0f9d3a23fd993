"""The engine with a model: the same answers whoever is beside them and however often they step back; nothing leaks."""

import itertools
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from stages.s01_forward.config import ModelConfig
from stages.s01_forward.llm import LLM as Uncached
from stages.s01_forward.outputs import TokenEvent
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.kv_store import kv_bytes_per_token
from stages.s02_kv_cache.recorder import recorded_steps
from stages.s03_paged_kv.llm import LLM as Waves
from stages.s04_continuous_batching.interrupts import held_back
from stages.s04_continuous_batching.llm import LLM
from stages.s04_continuous_batching.plan import Plan
from stages.s04_continuous_batching.scheduler import Step
from tests.fixtures import each_family

DENSE = pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])


def megabytes(folder: Any, blocks: int) -> float:
    """What so many blocks of 4 tokens take."""
    return blocks * 4 * kv_bytes_per_token(ModelConfig.from_dir(folder), torch.float32) / 2**20


def engine(folder: Any, blocks: int = 24, swap: int = 0, **options: Any) -> LLM:
    """Blocks of 4 tokens; the default 24 hold one and a half sequences of 64 tokens, the longest."""
    memory = {"kv_cache_mb": megabytes(folder, blocks + 1), "swap_mb": megabytes(folder, swap)}
    return LLM(folder, device="cpu", dtype="float32", block_size=4, max_model_len=64, **{**memory, **options})


def ids(outputs: Any) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def all_free(llm: LLM) -> bool:
    """Nobody holds anything, and nobody waits for anything."""
    scheduler = llm.engine.scheduler
    scheduler.cache.pool.check()
    free = scheduler.cache.pool.num_free == scheduler.cache.pool.num_blocks - 1
    return free and len(scheduler.swap.free) == scheduler.swap.num_blocks and not scheduler.has_work and not llm.inboxes


def plans_of(llm: LLM) -> list[Plan]:
    """The plans that are executed from now on."""
    plans, execute = [], llm.engine.runner.execute
    llm.engine.runner.execute = lambda plan: (plans.append(plan), execute(plan))[1]
    return plans


def fail_at(llm: LLM, call: int, error: BaseException) -> Any:
    """The model raises at this call of its last layer, counted from now on."""
    calls = iter(range(1, 1000))

    def fail(*_: object) -> None:
        if next(calls) == call:
            raise error

    return llm.model.layers[-1].register_forward_pre_hook(fail)


# ---- the same answers ------------------------------------------------------------------------------------------------

PROMPTS = [list(range(100, 133)), [7] * 20, [3, 4, 5], list(range(200, 241)), [9], list(range(50, 62))]
PARAMS = [
    SamplingParams(max_tokens=n, temperature=t, seed=n, n=answers, ignore_eos=True)
    for n, t, answers in [(14, 0.0, 1), (16, 1.2, 2), (30, 0.0, 1), (9, 0.8, 1), (24, 1.0, 3), (12, 1.5, 1)]
]


@each_family
def test_forced_preemption_changes_no_token(family, tiny):
    """Nine answers through one and a half requests' memory, computed again or swapped: the tokens of stage 01."""
    folder = tiny(family)
    expected = ids(Uncached(folder, device="cpu", dtype="float32", max_model_len=64).generate(PROMPTS, PARAMS))
    for swap in (0, 6, 60):
        llm = engine(folder, swap=swap)
        assert llm.engine.scheduler.cache.pool.num_free == 24
        plans = plans_of(llm)
        assert ids(llm.generate(PROMPTS, PARAMS)) == expected, f"{swap} host blocks"
        assert all_free(llm)
        assert llm.engine.scheduler.num_preemptions >= 5
        assert any(plan.swap_in for plan in plans) == any(plan.swap_out for plan in plans) == (swap > 0)


@each_family
def test_a_batch_gives_what_its_requests_give_alone(family, tiny):
    """Six unlike requests, with room for all, in two rows, and one by one."""
    llm = engine(tiny(family), blocks=120)
    together = ids(llm.generate(PROMPTS, PARAMS))
    assert together == [ids(llm.generate([x], p))[0] for x, p in zip(PROMPTS, PARAMS, strict=True)]
    assert together == ids(engine(tiny(family), blocks=120, max_num_seqs=2).generate(PROMPTS, PARAMS))
    assert llm.engine.scheduler.num_preemptions == 0


def neighbours(llm: LLM, mine: list[int], other: list[int]) -> list[torch.Tensor]:
    """Logits of my row at each step, beside a neighbour."""
    with recorded_steps(llm.model) as steps:
        llm.generate([other, mine], SamplingParams(max_tokens=6, ignore_eos=True))
    return [step.logits[1] for step in steps]


@DENSE
@pytest.mark.parametrize("length", [1, 9])
def test_a_neighbours_words_change_no_bit_of_mine(family, length, tiny):
    """At equal lengths every product has the same shape, and a row of it sees its own row only."""
    llm = engine(tiny(family))
    runs = [neighbours(llm, [5, 6, 7, 8, 9], [word] * length) for word in (11, 300, 499)]
    assert len(runs[0]) == 6
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_a_neighbours_words_hardly_change_mine_with_experts(tiny):
    """Who goes to which expert changes the shapes of products, and with them the last bits."""
    llm = engine(tiny("qwen3_moe"))
    runs = [neighbours(llm, [5, 6, 7, 8, 9], [word] * 9) for word in (11, 300, 499)]
    for other in runs[1:]:
        assert all((a - b).abs().max().item() <= 1e-4 for a, b in zip(runs[0], other, strict=True))


def test_the_same_prompt_many_times(tiny):
    """Requests are told apart by what they are, not by what they ask. vllm-project/vllm#10583."""
    llm = engine(tiny("qwen2"))
    params = [SamplingParams(max_tokens=8, temperature=t, seed=1, ignore_eos=True) for t in (0.0, 0.0, 2.0, 2.0)]
    first, again, third, fourth = ids(llm.generate([[5, 6, 7]] * 4, params))
    assert first == again != third == fourth
    assert all_free(llm)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_preempted_answer_goes_on_as_if_nothing_had_been(temperature, tiny):
    """Penalties tell prompt from output, the draws continue, no token comes twice, no log-probability is lost.

    Prompt of 5, 6 tokens, preempted after the third. vllm-project/vllm#5349, vllm-project/vllm-metal#50.
    """
    llm = engine(tiny("qwen3"))
    params = SamplingParams(
        max_tokens=6,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        logprobs=2,
        prompt_logprobs=1,
        temperature=temperature,
        seed=4,
        ignore_eos=True,
    )
    (expected,) = llm.generate([[5, 5, 6, 7, 8]], params)
    (request,) = llm.requests.build([[5, 5, 6, 7, 8]], params)
    events, plans = [], plans_of(llm)
    for event in llm.run([request]):
        events.append(event)
        if len(events) == 3:
            llm.engine.scheduler.preempt(llm.engine.scheduler.running[0], Step())
    output = request.output()
    assert [plan.num_tokens for plan in plans] == [5, 1, 1, 8, 1, 1]
    assert [event.token_id for event in events] == output.token_ids == expected.token_ids
    assert "".join(event.text for event in events) == output.text == expected.text
    assert (output.prompt_token_ids, len(output.token_ids)) == ([5, 5, 6, 7, 8], 6)
    for ours, theirs in (
        (output.outputs[0].logprobs, expected.outputs[0].logprobs),
        (output.prompt_logprobs[1:], expected.prompt_logprobs[1:]),
    ):
        assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs]
        assert [entry.logprob for entry in ours] == pytest.approx([entry.logprob for entry in theirs], abs=1e-4)
    assert all_free(llm)


# ---- the edges of a request ------------------------------------------------------------------------------------------


def test_prompts_up_to_the_length_of_the_model(tiny):
    """63 of 64 tokens leave room for one; 64 can be scored, not answered. All in one batch, and alone."""
    llm = engine(tiny("qwen2"))
    prompts, one = [[9] * 63, [9] * 64, [9] * 63, [9]], SamplingParams(max_tokens=1, ignore_eos=True)
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)
    params = [SamplingParams(max_tokens=None, ignore_eos=True), score, one, one]
    outputs = llm.generate(prompts, params)
    assert [(len(o.token_ids), o.finish_reason) for o in outputs] == [(n, "length") for n in (1, 0, 1, 1)]
    assert len(outputs[1].prompt_logprobs) == 64
    assert ids(outputs) == [ids(llm.generate([x], p))[0] for x, p in zip(prompts, params, strict=True)]
    with pytest.raises(ValueError, match=r"prompt 0 has 64 tokens.*is 64"):
        llm.generate([[9] * 64], one)
    with pytest.raises(ValueError, match=r"prompt 1 has 65 tokens.*is 64"):
        llm.generate([[9], [9] * 65], score)
    assert all_free(llm)


def test_an_empty_prompt_is_refused_and_the_next_one_works(tiny):
    """vllm-project/vllm#7632."""
    llm = engine(tiny("qwen2"))
    for prompts in ("", [""], [[]], [[5], []]):
        with pytest.raises(ValueError, match="empty"):
            llm.generate(prompts)
        assert all_free(llm)
    assert len(llm.generate([[5]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


def test_a_free_row_is_used_in_the_next_step(tiny):
    """Outputs of 6, 2, 3 and 2 tokens in two rows: 7 steps, and 9 in waves."""
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (6, 2, 3, 2)]
    prompts = [[5] * n for n in (3, 3, 2, 4)]
    counts, answers = [], []
    for cls in (LLM, Waves):
        llm = cls(tiny("qwen2"), device="cpu", max_num_seqs=2)
        with recorded_steps(llm.model) as steps:
            answers.append(ids(llm.generate(prompts, params)))
        counts.append([len(step.input_ids) for step in steps])
    assert answers[0] == answers[1]
    assert counts == [[6, 2, 3, 2, 2, 5, 1], [6, 2, 1, 1, 1, 1, 6, 2, 1]]


def test_no_step_is_larger_than_its_budget(tiny):
    llm = engine(tiny("qwen2"), blocks=120, max_num_batched_tokens=64, max_num_seqs=12)
    with recorded_steps(llm.model) as steps:
        llm.generate([[i] * 30 for i in range(10, 30)], SamplingParams(max_tokens=5, ignore_eos=True))
    assert 60 <= max(len(step.input_ids) for step in steps) <= 64
    assert max(len(step.logits) for step in steps) <= 12


def test_priority_decides_who_goes_first(tiny):
    llm = engine(tiny("qwen2"), max_num_seqs=1)
    params = [SamplingParams(max_tokens=2, priority=p, ignore_eos=True) for p in (0, 1, -1, 0)]
    order = [event.request for event in llm.stream([[5], [6], [7], [8]], params)]
    assert order == [2, 2, 0, 0, 3, 3, 1, 1]


# ---- streams come and go ---------------------------------------------------------------------------------------------

LONG = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)


@pytest.mark.parametrize("swap", [0, 60])
def test_streams_in_turns_through_a_small_pool(swap, tiny):
    """Each steps the other along; they preempt each other, and get what each gets alone."""
    llm = engine(tiny("qwen2"), blocks=16, swap=swap)
    prompts = [[5] * 20, [6] * 30, [7] * 8]
    alone = ids([llm.generate([prompt], LONG)[0] for prompt in prompts])
    streams = [llm.stream([prompt], LONG) for prompt in prompts]
    tokens: list[list[int]] = [[], [], []]
    for events in zip(*streams, strict=True):
        for mine, event in zip(tokens, events, strict=True):
            mine.append(event.token_id)
    assert [[mine] for mine in tokens] == alone
    assert llm.engine.scheduler.num_preemptions > 0
    assert all_free(llm)


@pytest.mark.parametrize("events", [0, 1, 2, 5, 11, 30])
def test_a_stream_that_is_left_takes_nothing_with_it(events, tiny):
    """Its answers, running, waiting or swapped out, are aborted; another stream goes on."""
    llm = engine(tiny("qwen2"), blocks=16, swap=8)
    (expected,) = llm.generate([[8] * 9], LONG)
    other, left = llm.stream([[8] * 9], LONG), llm.stream([[5] * 20, [6] * 30, [7]], LONG)
    tokens = [next(other).token_id]
    for _ in range(events):
        next(left)
    left.close()
    assert len(llm.inboxes) == 1
    assert {*llm.engine.scheduler.running, *llm.engine.scheduler.waiting} <= set(llm.inboxes)
    assert tokens + [event.token_id for event in other] == expected.token_ids
    assert all_free(llm)


@pytest.mark.parametrize("which", [0, 1, 3])
def test_an_abort_at_any_moment(which, tiny):
    """That answer ends with what there is of it; the others do not notice."""
    llm = engine(tiny("qwen2"), blocks=16, swap=8)
    prompts = [[5] * 20, [6] * 30, [7], [8] * 9]
    expected = ids(llm.generate(prompts, LONG))
    for after in (1, 2, 4, 9, 15, 40):
        requests = llm.requests.build(prompts, LONG)
        entries: list[Any] = []
        for count, _ in enumerate(llm.run(requests), start=1):
            entries = entries or sorted(llm.inboxes, key=lambda entry: entry.id)
            if count == after:
                llm.engine.abort(entries[which])
        answers = [request.output() for request in requests]
        ended = answers[which]
        assert ended.finish_reason == ("abort" if len(ended.token_ids) < 24 else "length")
        assert ended.token_ids == expected[which][0][: len(ended.token_ids)]
        others = [i for i in range(4) if i != which]
        assert [answers[i].token_ids for i in others] == [expected[i][0] for i in others]
        assert all_free(llm)


def test_progress_is_shown_beside_the_answers(tiny, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # so that it is drawn although nobody looks
    monkeypatch.setenv("TERM", "xterm")
    llm = engine(tiny("qwen2"))
    plain = ids(llm.generate([[5], [6]], LONG))
    assert capsys.readouterr() == ("", "")
    assert ids(llm.generate([[5], [6]], LONG, progress=True)) == plain
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "2/2" in shown.err
    assert "tok/s" in shown.err
    assert all_free(llm)


# ---- when a step fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [1, 2, 5, 14])
@pytest.mark.parametrize("swap", [0, 8])
def test_an_error_in_the_model_reaches_the_caller_and_nothing_leaks(call, swap, tiny):
    """In the first prefill, in the step that forks, and between preemptions; afterwards all is as before."""
    llm = engine(tiny("qwen2"), blocks=16, swap=swap)
    params = SamplingParams(max_tokens=20, n=2, temperature=1.0, seed=1, ignore_eos=True)
    healthy = ids(llm.generate([[5] * 20, [6] * 30], params))
    hook = fail_at(llm, call, MemoryError("a rigged failure"))
    with pytest.raises(MemoryError, match="rigged"):
        llm.generate([[5] * 20, [6] * 30], params)
    hook.remove()
    assert all_free(llm)
    assert ids(llm.generate([[5] * 20, [6] * 30], params)) == healthy


@pytest.mark.parametrize("error", [MemoryError("a rigged failure"), KeyboardInterrupt("a rigged interrupt")], ids=repr)
def test_every_answer_of_a_failed_step_is_told(error, tiny):
    """The stream that stepped raises; the other one ends with an error event; who was waiting goes on."""
    llm = engine(tiny("qwen2"), max_num_seqs=2)
    first, second = llm.stream([[5] * 3], LONG), llm.stream([[6] * 4], LONG)
    before = [next(first), next(second)]
    inbox: deque[TokenEvent] = deque()
    (entry,) = llm.add(llm.requests.build([[7] * 5], LONG)[0], inbox)
    hook = fail_at(llm, 1, error)
    assert next(first).finish_reason is None, "this one was in its inbox"
    with pytest.raises(type(error), match="rigged"):
        next(first)
    hook.remove()
    rest = list(second)
    assert (rest[-1].finish_reason, rest[-1].token_id) == ("error", -1)
    assert before[1].finish_reason is None
    assert entry.state == "waiting"
    while llm.engine.has_work:
        llm.step()
    assert [event.token_id for event in inbox] == llm.generate([[7] * 5], LONG)[0].token_ids
    del llm.inboxes[entry]
    assert all_free(llm)


BOOKS = ("scheduler.py", "block_pool.py", "paged_cache.py", "swap.py", "llm.py")


@contextmanager
def ctrl_c_at(line: int) -> Iterator[None]:
    """Presses it once, when so many lines of the books have run."""
    lines = itertools.count(1)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if Path(frame.f_code.co_filename).name not in BOOKS:
            return None
        if event == "line" and next(lines) == line:
            signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("line", [*range(20, 400, 19), *range(400, 4000, 173)])
def test_ctrl_c_leaves_the_books_whole(line, tiny):
    """Wherever it comes: in the middle of a step it waits for its end. Rows step back, and go out to the host."""
    llm = engine(tiny("qwen2"), blocks=16, swap=8)
    params = SamplingParams(max_tokens=12, n=2, temperature=1.0, seed=1, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt), ctrl_c_at(line):
        llm.generate([[5] * 20, [6] * 30], params)
    assert all_free(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_is_not_held_back():
    reached = []
    with pytest.raises(KeyboardInterrupt), held_back():
        signal.raise_signal(signal.SIGINT)
        reached.append("behind the first")
        signal.raise_signal(signal.SIGINT)
        reached.append("behind the second")
    assert reached == ["behind the first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outside_of_the_main_thread_nothing_is_held_back():
    handlers = []

    def work() -> None:
        with held_back():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_what_was_on_its_way_to_host_memory_is_computed_again(tiny):
    """The copies out fail: nobody may read those host blocks, and who stepped back still gets its own tokens."""
    llm = engine(tiny("qwen2"), blocks=16, swap=60)
    prompts = [[5] * 20, [6] * 30]
    expected = ids(llm.generate(prompts, LONG))
    requests = llm.requests.build(prompts, LONG)
    aborted, kept = (llm.engine.add_request(request.generations[0]) for request in requests)
    copy = llm.engine.runner.host_store.copy_blocks

    def fail(pairs: Any, source: Any = None) -> None:
        if pairs:
            raise MemoryError("a rigged failure")

    llm.engine.runner.host_store.copy_blocks = fail
    with pytest.raises(MemoryError, match="rigged"):
        while True:
            llm.engine.step()
    llm.engine.runner.host_store.copy_blocks = copy
    assert (aborted.state, aborted.generation.finish_reason) == ("finished", "error")
    assert "rigged" in aborted.generation.error
    assert (kept.state, kept.host_blocks, kept.num_preemptions) == ("waiting", [], 1)
    while llm.engine.has_work:
        llm.engine.step()
    assert kept.generation.token_ids == expected[1][0]
    assert all_free(llm)


def test_a_broken_row_breaks_alone(tiny):
    """NaN in one row's embedding: its request ends with an error, and who gets its blocks next does not notice."""
    llm = engine(tiny("qwen2"))
    params = SamplingParams(max_tokens=3, n=2, ignore_eos=True)
    healthy = ids(llm.generate([[6, 7]] * 3, params))
    with torch.no_grad():
        llm.model.embed_tokens.weight[499] = float("nan")
    broken, whole = llm.generate([[499, 5], [6, 7]], params)
    assert [a.finish_reason for a in (*broken.outputs, *whole.outputs)] == ["error", "error", "length", "length"]
    assert all_free(llm)
    assert ids(llm.generate([[6, 7]] * 3, params)) == healthy


# ---- options and memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 64, "max_num_batched_tokens": 16}, "max_num_batched_tokens is 16.*at least 64"),
        ({"max_num_batched_tokens": 300.0}, r"max_num_batched_tokens is 300\.0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0.*1"),
        ({"block_size": 0}, "block_size is 0.*1"),
        ({"swap_mb": -1}, "swap_mb is -1"),
        ({"swap_mb": float("nan")}, "swap_mb is nan"),
        ({"swap_mb": float("inf")}, "swap_mb is inf"),
        ({"swap_mb": 2e9}, "swap_mb is 2000000000.0; .* at most 1048576"),
        ({"kv_cache_mb": 10**310}, "kv_cache_mb is 10000"),
        ({"max_num_seqs": 10**9}, "max_num_seqs is 1000000000; .* 65536"),
        ({"memory_share": 0}, "memory_share is 0"),
        ({"memory_share": 1.5}, r"memory_share is 1\.5.*1"),
        ({"kv_cache_mb": -1}, "kv_cache_mb is -1"),
        ({"kv_cache_mb": "2048"}, "kv_cache_mb is '2048'"),
        ({"kv_cache_mb": 0.1}, r"kv_cache_mb is 0\.1, which holds 112 tokens.*256.*kv_cache_mb to 1, .*to 112"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, words, tiny):
    """A step that cannot compute the longest prompt is a bad option too. tenstorrent/vllm#436."""
    with pytest.raises((ValueError, TypeError), match=words):
        LLM(tiny("qwen2"), device="cpu", **options)


def test_memory_stays_within_what_was_given(tiny):
    """The dummy is in it; host memory likewise; and no more is taken than can be used."""
    folder = tiny("qwen2")
    llm = LLM(folder, device="cpu", kv_cache_mb=0.5, swap_mb=0.3)
    runner, scheduler = llm.engine.runner, llm.engine.scheduler
    assert 0.5 * 2**20 - 16 * 768 < runner.store.data.nbytes <= 0.5 * 2**20
    assert 0.3 * 2**20 - 16 * 768 < runner.host_store.data.nbytes <= 0.3 * 2**20
    assert runner.store.data.shape[2] == scheduler.cache.pool.num_blocks
    assert runner.host_store.data.shape[2] == scheduler.swap.num_blocks
    assert LLM(folder, device="cpu").engine.runner.host_store.data.numel() == 0
    few = LLM(folder, device="cpu", max_num_seqs=3, max_model_len=100)
    assert few.engine.scheduler.cache.pool.num_blocks == 1 + 3 * 7


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_whose_scores_are_nan_is_an_error(tiny, max_tokens):
    """Of that request alone, and without half a list of scores."""
    llm = LLM(tiny("qwen2"), device="cpu", kv_cache_mb=1)
    llm.model.embed_tokens.weight[7] = float("nan")
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=1, ignore_eos=True)
    bad, good = llm.generate([[5, 7], [5, 6]], params)
    assert (bad.finish_reason, bad.prompt_logprobs, bad.token_ids) == ("error", None, [])
    assert "not finite" in bad.outputs[0].error
    assert (good.finish_reason, len(good.prompt_logprobs), len(good.token_ids)) == ("length", 2, max_tokens)
    assert llm.engine.scheduler.cache.pool.num_free == llm.engine.scheduler.cache.pool.num_blocks - 1
