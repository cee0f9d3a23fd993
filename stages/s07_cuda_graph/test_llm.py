"""The fast engine's face: its switches, and every kind of request beside every other."""

import gc
import itertools
from typing import Any

import pytest
import torch

from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.kv_store import kv_bytes_per_token
from stages.s04_continuous_batching.plan import Plan
from stages.s04_continuous_batching.recorder import recorded_batches
from stages.s06_prefix_cache.llm import LLM as InTurns
from stages.s07_cuda_graph.fake_graphs import FakeGraphs
from stages.s07_cuda_graph.graphs import GRAPH_BYTES, decode_buckets, graphs_bytes
from stages.s07_cuda_graph.llm import LLM
from tests.scripted import scripted

PROMPTS = [[(17 * i + 3 * j) % 490 for j in range(n)] for i, n in enumerate((5, 1, 23, 9, 14, 2, 30, 11, 4, 8))]
WISHES = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=9, temperature=1.0, seed=-5, n=3),
    SamplingParams(max_tokens=15, logprobs=2, repetition_penalty=1.3, temperature=0.8, seed=2**63),
    SamplingParams(max_tokens=0, prompt_logprobs=1),
    SamplingParams(max_tokens=7, logit_bias={7: 5.0, 9: -100.0}, frequency_penalty=0.5),
    SamplingParams(max_tokens=20, min_tokens=8, temperature=2.0, top_k=9, seed=1),
    SamplingParams(max_tokens=11, repetition_penalty=1.5, presence_penalty=1.0, ignore_eos=True),
    SamplingParams(max_tokens=13, temperature=1.3, top_p=0.8, min_p=0.02, frequency_penalty=-0.4, seed=2**64 - 1),
    SamplingParams(max_tokens=6, prompt_logprobs=0, logprobs=0, n=2, temperature=3.0, seed=0),
    SamplingParams(max_tokens=16, stop=["e", "a"], temperature=1.0, seed=4, priority=-1),
]


def engine(folder: Any, cls: type = LLM, **options: Any) -> Any:
    return cls(folder, device="cpu", **{"dtype": "float32", "block_size": 4, "max_model_len": 64, **options})


def told(output: Any) -> list[tuple[Any, ...]]:
    """All that is the same in every engine."""
    scores = [None if entry is None else entry.token_id for entry in output.prompt_logprobs or ()]
    return [
        (a.token_ids, a.text, a.finish_reason, a.stop_reason, [e.token_id for e in a.logprobs or ()], scores)
        for a in output.outputs
    ]


def chances(output: Any) -> list[float]:
    """Log-probabilities of prompt and answers."""
    answers = [entry.logprob for answer in output.outputs for entry in answer.logprobs or ()]
    return answers + [entry.logprob for entry in (output.prompt_logprobs or ())[1:]]


@pytest.fixture(scope="module")
def expected(tiny) -> list[Any]:
    return engine(tiny("qwen3"), InTurns).generate(PROMPTS, WISHES)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("blocks", [200, 18])
def test_every_kind_of_request_beside_every_other(padded, blocks, tiny, expected):
    """Chosen by the host or on the device, one by one or together, in a pool that holds little more than one."""
    block = 4 * kv_bytes_per_token(engine(tiny("qwen3"), InTurns).config, torch.float32) / 2**20
    options = {"kv_cache_mb": (blocks + 1) * block, "swap_mb": 30 * block, "max_num_seqs": 7}
    llm = engine(tiny("qwen3"), max_num_batched_tokens=20, **options)
    if padded:
        llm.engine.runner.graphs = FakeGraphs(llm.engine.runner.step, 7, 20, 64)
    device_only = [i for i in range(len(PROMPTS)) if i in (0, 1, 6, 7, 9)]
    for chosen in (range(len(PROMPTS)), device_only, reversed(range(len(PROMPTS))), [2], [5, 0]):
        order = list(chosen)
        outputs = llm.generate([PROMPTS[i] for i in order], [WISHES[i] for i in order])
        for number, output in zip(order, outputs, strict=True):
            assert told(output) == told(expected[number])
            assert chances(output) == pytest.approx(chances(expected[number]), abs=1e-4)
    assert (llm.engine.scheduler.num_preemptions > 0) == (blocks == 18)
    while llm.engine.has_work:
        llm.engine.step()
    assert llm.engine.scheduler.cache.pool.num_free == llm.engine.scheduler.cache.pool.num_blocks - 1


@pytest.mark.parametrize("switches", list(itertools.product([False, True], repeat=4)), ids=str)
def test_switches(switches, tiny, expected):
    """On a CPU all of them give the same, and none of them needs a GPU."""
    names = ("graphs", "fused", "few_rows", "overlap")
    llm = engine(tiny("qwen3"), **dict(zip(names, switches, strict=True)))
    assert llm.engine.ahead == int(switches[3])
    assert told(llm.generate(PROMPTS[:2], WISHES[:2])[1]) == told(expected[1])


@pytest.mark.parametrize("capture", ["lazy", "start"])
def test_on_a_cpu_there_are_no_graphs(capture, tiny):
    llm = engine(tiny("qwen2"), graphs=True, capture=capture)
    assert llm.engine.runner.graphs is None
    assert not llm.kernels
    assert llm.reserved_bytes() == 0


def test_what_a_gpu_would_set_aside(tiny, monkeypatch):
    """The more requests and tokens, the more; without graphs no more than what tokens have been seen."""
    llm = engine(tiny("qwen2"), graphs=True, max_num_seqs=8, max_num_batched_tokens=64)
    monkeypatch.setattr(llm, "device", torch.device("cuda"))
    monkeypatch.setattr("stages.s07_cuda_graph.llm.largest_step_bytes", lambda *step: 0)  # it is run
    few = llm.reserved_bytes()
    assert few > len(decode_buckets(8)) * GRAPH_BYTES
    llm.max_num_batched_tokens = 4096
    more = llm.reserved_bytes()
    assert more > few + 8 * GRAPH_BYTES
    assert graphs_bytes(8, 4096, num_heads=64) > graphs_bytes(8, 4096, num_heads=1)  # more of chunks alone
    llm.graphs = False
    assert llm.reserved_bytes() == 9 * llm.config.vocab_size * 2


@pytest.mark.parametrize("capture", ["eager", "", None, True, "Start"])
def test_an_unknown_time_of_capture_is_refused(capture, tiny):
    with pytest.raises(ValueError, match=f"capture is {capture!r}; it must be 'lazy' or 'start'"):
        engine(tiny("qwen2"), capture=capture)


def test_the_most_urgent_goes_first(tiny):
    llm = engine(tiny("qwen2"), max_num_seqs=1)
    params = [SamplingParams(max_tokens=2, priority=p, ignore_eos=True) for p in (0, 1, -1, 0)]
    assert [event.request for event in llm.stream([[5], [6], [7], [8]], params)] == [2, 2, 0, 0, 3, 3, 1, 1]


def test_streams_in_turns(tiny):
    """Whoever steps the engine fills the others' inboxes; one of them needs the host, and slows all down."""
    llm, wishes = engine(tiny("qwen2"), max_num_batched_tokens=64), [SamplingParams(max_tokens=9, ignore_eos=True)] * 2
    wishes.append(SamplingParams(max_tokens=4, logprobs=0, ignore_eos=True))
    alone = [[event.token_id for event in llm.stream([p], w)] for p, w in zip(PROMPTS, wishes, strict=False)]
    streams = [llm.stream([p], w) for p, w in zip(PROMPTS, wishes, strict=False)]
    tokens: list[list[int]] = [[], [], []]
    for events in itertools.zip_longest(*streams):
        for mine, event in zip(tokens, events, strict=True):
            mine += [event.token_id] if event else []
    assert tokens == alone
    assert not llm.inboxes


@pytest.mark.parametrize("events", [0, 1, 2, 7, 15])
def test_a_stream_that_is_left_takes_nothing_with_it(events, tiny):
    """Its rows may be under way: they are passed over, their blocks and slots go to others, another stream goes on."""
    llm = engine(tiny("qwen2"), max_num_seqs=4)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    (expected,) = llm.generate([[8] * 9], params)
    other, left = llm.stream([[8] * 9], params), llm.stream([[5] * 20, [6] * 30, [7]], params)
    tokens = [next(other).token_id]
    for _ in range(events):
        next(left)
    left.close()
    late = llm.generate([[5] * 20, [9] * 3], params)
    assert tokens + [event.token_id for event in other] == expected.token_ids
    alone = engine(tiny("qwen2"), InTurns).generate([[5] * 20, [9] * 3], params)
    assert [o.token_ids for o in late] == [o.token_ids for o in alone]
    while llm.engine.has_work:
        assert llm.engine.step() == []
    assert llm.engine.scheduler.cache.pool.num_free == llm.engine.scheduler.cache.pool.num_blocks - 1


def test_ends_in_the_middle(tiny):
    """EOS, stop tokens and stop strings at different steps of one batch, while the step after is under way."""
    source = tiny("qwen2")
    scripts = [[10, 11, 12, 2], [20, 21, 22, 23, 24, 9, 25], [30, 31, 32, 33, 34, 35, 36]]
    keys = {"generation_config.json": {"eos_token_id": [2, 9]}}
    folder = scripted(source, source.parent / "in the middle", scripts, keys)
    params = [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, n=2),
        SamplingParams(max_tokens=9, stop_token_ids=[34]),
    ]
    for _ in range(2):
        outputs = engine(folder).generate([[10], [20], [30]], params)
        assert [[a.token_ids for a in o.outputs] for o in outputs] == [
            [[11, 12, 2]],
            [[21, 22, 23, 24, 9]] * 2,
            [[31, 32, 33, 34]],
        ]
        assert [o.outputs[0].stop_reason for o in outputs] == [2, 9, 34]


def test_the_tap_hears_the_logits_of_every_token(tiny):
    """[N, V] of the rows that sample, in the plan's order; a chunk is not among them."""
    llm = engine(tiny("qwen2"), max_num_batched_tokens=64, max_chunk=6)
    plans: list[Plan] = []
    execute = llm.engine.runner.execute
    runner = llm.engine.runner
    runner.execute = lambda plan: (plans.append(plan), execute(plan))[1]
    runner.tap = []
    outputs = llm.generate([[5] * 9, [6] * 3], SamplingParams(max_tokens=4, ignore_eos=True))
    heard: dict[int, list[int]] = {0: [], 1: []}
    for plan, logits in zip(plans, runner.tap, strict=True):
        sampling = [row.request.id for row in plan.rows if row.samples]
        assert logits.shape == (len(sampling), 512)
        for number, best in zip(sampling, logits.argmax(-1).tolist(), strict=True):
            heard[number].append(best)
    assert [heard[0], heard[1]] == [output.token_ids for output in outputs]


def test_a_recording_follows_the_lag(tiny):
    """Each step is recorded with its own rows, though the next is planned before its tokens come."""
    llm = engine(tiny("qwen2"), max_num_seqs=4, max_num_batched_tokens=16)
    with recorded_batches(llm.engine) as batches:
        outputs = llm.generate([[5] * 20, [6] * 3], SamplingParams(max_tokens=5, ignore_eos=True))
    for number, output in enumerate(outputs):
        rows = [row for batch in batches for row in batch.rows if row.request == number]
        assert sum(row.computed for row in rows) == len(output.prompt_token_ids) + 4
        assert sum(batch.tokens.count(number) for batch in batches) == 5
        assert [row.start for row in rows] == sorted(row.start for row in rows)
    assert all(set(batch.tokens) <= {row.request for row in batch.rows if row.samples} for batch in batches)


def test_the_garbage_collector_leaves_the_queue_alone(tiny):
    """While a run is on: not its requests, nor what was there before. Then everything is as it was."""
    gc.unfreeze()
    llm = engine(tiny("qwen2"))
    stream = llm.stream(PROMPTS, SamplingParams(max_tokens=3, ignore_eos=True))
    next(stream)
    queued = [request.sequence.token_ids for request in llm.engine.scheduler.running]
    looked_at = {id(each) for each in gc.get_objects()}
    assert len(queued) == len(PROMPTS)
    assert not any(id(ids) in looked_at for ids in queued)
    assert id(llm) not in looked_at
    assert len(list(stream)) == 3 * len(PROMPTS) - 1
    assert gc.get_freeze_count() == 0
