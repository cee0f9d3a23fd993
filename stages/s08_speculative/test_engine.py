"""The engine that guesses: whatever is guessed, the answers are those of plain decoding, told once and to the end."""

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch

from stages.s01_forward.config import ModelConfig
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.kv_store import kv_bytes_per_token
from stages.s04_continuous_batching import llm as s04_llm
from stages.s06_prefix_cache.llm import LLM as Plain
from stages.s07_cuda_graph.fake_graphs import FakeGraphs
from stages.s08_speculative.llm import LLM
from stages.s08_speculative.ngram import NgramProposer
from stages.s08_speculative.pace import FIRST_PAUSE, Pace
from stages.s08_speculative.proposer import Draft
from stages.s08_speculative.set_acceptance import SetAcceptance
from tests.contract import byte_ids
from tests.scripted import scripted

VOCAB = 512


def engine(folder: Any, blocks: int = 80, swap: int = 0, cls: type = LLM, **options: Any) -> Any:
    """Blocks of 4 tokens; it guesses with n-grams until it is told otherwise, and never pauses."""
    block = 4 * kv_bytes_per_token(ModelConfig.from_dir(folder), torch.float32) / 2**20
    memory = {"kv_cache_mb": (blocks + 1) * block, "swap_mb": swap * block, "block_size": 4, "max_model_len": 64}
    often = {"speculative": "ngram", "speculative_least_rate": 0.0, "speculative_max_rows": 16}
    guessing = often if cls is LLM else {}
    return cls(folder, device="cpu", dtype="float32", **{**memory, **guessing, **options})


def ids(outputs: Any) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def all_free(llm: LLM) -> bool:
    """Nothing runs, no block is taken, and nobody is remembered."""
    while llm.engine.has_work:
        assert llm.engine.step() == []
    scheduler, proposer = llm.engine.scheduler, llm.engine.proposer
    scheduler.cache.pool.check()
    free = scheduler.cache.pool.num_free == scheduler.cache.pool.num_blocks - 1
    books = [llm.engine.pace.records, getattr(proposer, "read", {}), getattr(proposer, "indexes", {}), llm.inboxes]
    return free and len(scheduler.swap.free) == scheduler.swap.num_blocks and not any(books)


class Told:
    """Guesses made of what will be said, by prompt and number of the answer: `change(coming, wanted, random)`."""

    def __init__(self, answers: dict[tuple[tuple[int, ...], int], list[int]], change: Any) -> None:
        self.answers, self.change, self.rng, self.forgotten = answers, change, Random(1), Counter[Any]()

    def propose(self, wanted: Any) -> dict[Any, Draft]:
        drafts = {}
        for request, count in wanted.items():
            generation = request.generation
            answer = self.answers[tuple(generation.prompt_token_ids), generation.index]
            coming = answer[len(generation.token_ids) :]
            drafts[request] = Draft(tuple(self.change(coming, count, self.rng)))
        return drafts

    def copy_blocks(self, pairs: Any) -> None:
        pass

    def forget(self, request: Any) -> None:
        self.forgotten[request] += 1


def at_random(coming: list[int], count: int, rng: Random) -> list[int]:
    return [token if rng.random() < 0.7 else rng.randrange(VOCAB) for token in coming[: rng.randint(0, count)]]


KINDS = {
    "right": lambda coming, count, rng: coming[:count],
    "wrong": lambda coming, count, rng: [(token + 1) % VOCAB for token in coming[:count]],
    "random": at_random,
    "too long": lambda coming, count, rng: [*coming, *rng.choices(range(VOCAB), k=70)],
    "empty": lambda coming, count, rng: [],
    "foreign": lambda coming, count, rng: [*coming[:1], rng.choice((-1, VOCAB, 10**12, -(2**40))), *coming[2:count]],
}

PROMPTS = [[5, 6, 7] * 5, [9, 8], [11] * 9, [20, 21, 22, 23], [30, 31], [40, 41, 42]]
PARAMS = [
    SamplingParams(max_tokens=16, ignore_eos=True),
    SamplingParams(max_tokens=13, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=14, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.3, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=1.2, top_k=8, seed=4, n=2, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.7, seed=5, logprobs=3, prompt_logprobs=2, min_tokens=6),
    SamplingParams(max_tokens=11, logit_bias={7: 3.0, 8: 3.0}, logprobs=0, repetition_penalty=1.2, ignore_eos=True),
]


def assert_same(outputs: Any, expected: Any) -> None:
    """Tokens, text, ends and log-probabilities."""
    for output, plain in zip(outputs, expected, strict=True):
        for mine, other in zip(output.outputs, plain.outputs, strict=True):
            for name in ("token_ids", "text", "finish_reason", "stop_reason", "error"):
                assert getattr(mine, name) == getattr(other, name), name
            assert (mine.logprobs is None) == (other.logprobs is None)
            assert_close(mine.logprobs, other.logprobs)
        assert_close(output.prompt_logprobs, plain.prompt_logprobs)


def assert_close(mine: Any, other: Any) -> None:
    entries = [[entry for entry in each or () if entry is not None] for each in (mine, other)]
    for one, two in zip(*entries, strict=True):
        assert (one.token_id, one.rank, len(one.top)) == (two.token_id, two.rank, len(two.top))
        assert [one.logprob, *dict(one.top).values()] == pytest.approx([two.logprob, *dict(two.top).values()], abs=1e-4)


@pytest.fixture(scope="module")
def plain(tiny) -> Any:
    """What stage 06 says, and the answers by prompt and number."""
    outputs = engine(tiny("qwen2"), cls=Plain).generate(PROMPTS, PARAMS)
    answers = {(tuple(o.prompt_token_ids), a.index): a.token_ids for o in outputs for a in o.outputs}
    return outputs, answers


# ---- the same answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True], ids=["eager", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_guessed(kind, padded, plain, tiny):
    """k = 1 to 8: greedy, seeded, penalised, biased, scored, several answers; in steps as graphs have them, too."""
    outputs, answers = plain
    llm = engine(tiny("qwen2"), num_draft_tokens=8)
    llm.engine.proposer = Told(answers, KINDS[kind])
    if padded:
        llm.engine.runner.graphs = FakeGraphs(llm.engine.runner.step, 64, 2048, 64)
    for k in (8, 5, 2) if padded else range(1, 9):
        llm.engine.runner.most = k
        before = llm.engine.stats.drafted
        assert_same(llm.generate(PROMPTS, PARAMS), outputs)
        assert all_free(llm)
        assert (llm.engine.stats.drafted == before) == (kind == "empty")
    assert (llm.engine.stats.accepted == 0) == (kind in ("wrong", "empty"))
    if kind == "right":
        assert llm.engine.stats.acceptance_rate == 1


def test_capture_at_the_start_makes_all_that_steps_with_guesses_ask_for(plain, tiny, monkeypatch):
    """For as many rows as may guess, and no more."""
    monkeypatch.setattr("stages.s07_cuda_graph.llm.has_kernels", lambda device: True)
    monkeypatch.setattr("stages.s07_cuda_graph.llm.Graphs", FakeGraphs)
    sizes = {"max_num_seqs": 10, "max_num_batched_tokens": 64, "speculative_max_rows": 7}
    llm = engine(tiny("qwen2"), capture="start", fused=False, **sizes)
    graphs = llm.engine.runner.graphs
    made = list(graphs.captured)
    llm.engine.proposer = Told(plain[1], KINDS["right"])
    assert_same(llm.generate(PROMPTS, PARAMS), plain[0])
    assert list(graphs.captured) == made
    assert [size.rows for size in made if size.queries == 5] == [8 + 1, 4 + 1, 2 + 1, 1 + 1]
    assert llm.engine.stats.rows > 10


def test_the_draft_model_is_there_before_memory_is_shared_out(tiny, monkeypatch):
    order: list[str] = []
    make, budget = LLM.make_draft, s04_llm.kv_budget_mb
    monkeypatch.setattr(LLM, "make_draft", lambda self: (order.append("draft"), make(self))[1])
    monkeypatch.setattr(s04_llm, "kv_budget_mb", lambda *a, **o: (order.append("budget"), budget(*a, **o))[1])
    llm = engine(tiny("qwen2"), speculative="layers:1")
    assert order == ["draft", "budget"]
    assert llm.draft is not None


@pytest.mark.parametrize("k", [0, 1, 8])
def test_n_grams(k, plain, tiny):
    """0: nobody guesses, and there is no machinery for it."""
    llm = engine(tiny("qwen2"), num_draft_tokens=k)
    if k:
        llm.engine.proposer = NgramProposer(largest=4, smallest=1)  # random answers repeat little else
    for _ in range(2):
        assert_same(llm.generate(PROMPTS, PARAMS), plain[0])
    assert hasattr(llm.engine, "stats") == (k > 0)
    if k:
        assert llm.engine.stats.drafted > 0
        assert all_free(llm)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("swap", [0, 60])
def test_through_a_small_pool(family, swap, tiny):
    """Preempted while guessing, swapped, cut in chunks, several answers to a prompt."""
    options = {"blocks": 19, "max_num_seqs": 5, "max_num_batched_tokens": 12}
    prompts = [[5] * 20, [6, 7] * 12, [7] * 3, [8] * 9]
    params = [
        SamplingParams(
            max_tokens=9 + 5 * i, temperature=i % 2, seed=i, n=1 + i // 3, repetition_penalty=1.1, ignore_eos=True
        )
        for i in range(4)
    ]
    outputs = engine(tiny(family), cls=Plain, **options).generate(prompts, params)
    answers = {(tuple(o.prompt_token_ids), a.index): a.token_ids for o in outputs for a in o.outputs}
    llm = engine(tiny(family), swap=swap, **options)
    llm.engine.proposer = Told(answers, at_random)
    for _ in range(2):
        assert ids(llm.generate(prompts, params)) == ids(outputs)
        assert all_free(llm)
    assert llm.engine.scheduler.num_preemptions > 2
    assert llm.engine.stats.accepted > 5


# ---- ends inside a run -----------------------------------------------------------------------------------------------

SCRIPT = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


@pytest.fixture(scope="module")
def script(tiny) -> Any:
    """An engine whose answer to [10] is 11, 12 .., and that guesses all of it."""
    source = tiny("qwen2")
    llm = engine(scripted(source, source.parent / "eight", [SCRIPT], {"generation_config.json": {"eos_token_id": 9}}))
    llm.engine.proposer = Told({((10,), 0): SCRIPT[1:]}, KINDS["right"])
    return llm


@pytest.mark.parametrize("place", range(9))
def test_a_stop_token_within_guesses_that_stand(place, script):
    """Nothing after it: not in the answer, the stream, the cache or the counts. huggingface/transformers#47912."""
    stored: list[Any] = []
    cache = script.engine.scheduler.cache
    cache.subscribers[:] = [stored.append]
    params = SamplingParams(max_tokens=9, stop_token_ids=[SCRIPT[1 + place]], cache_salt=f"salt {place}")
    (output,) = script.generate([[10]], params)
    assert output.token_ids == SCRIPT[1 : 2 + place]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", SCRIPT[1 + place])
    kept = [token for event in stored if event.kind == "stored" for token in event.tokens]
    assert kept == SCRIPT[: len(kept)]
    assert len(kept) == (1 + place) // 4 * 4, "the last token was never written"
    assert [event.token_id for event in script.stream([[10]], params)] == output.token_ids
    cache.subscribers.clear()
    assert all_free(script)


def test_an_end_token_within_guesses_that_stand(tiny):
    source = tiny("qwen2")
    folder = scripted(
        source,
        source.parent / "guessed_ends",
        [[10, 11, 12, 9, 13, 14]],
        {"generation_config.json": {"eos_token_id": 9}},
    )
    llm = engine(folder)
    llm.engine.proposer = Told({((10,), 0): [11, 12, 9, 13, 14]}, KINDS["right"])
    (output,) = llm.generate([[10]], SamplingParams(max_tokens=9))
    assert (output.token_ids, output.finish_reason) == ([11, 12, 9], "stop")
    (output,) = llm.generate([[10]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert (output.token_ids, output.finish_reason) == ([11, 12, 9, 13, 14], "length")


@pytest.mark.parametrize(
    ("cap", "tokens", "reason"), [(2, [11, 12], "length"), (3, [11, 12, 13], "stop"), (4, [11, 12, 13], "stop")]
)
def test_stop_and_cap_in_one_step(cap, tokens, reason, script):
    """The stop goes first, and the cap cuts before what is behind it. sgl-project/sglang#31599."""
    (output,) = script.generate([[10]], SamplingParams(max_tokens=cap, stop_token_ids=[13], ignore_eos=True))
    assert (output.token_ids, output.finish_reason) == (tokens, reason)


@pytest.mark.parametrize("cap", range(1, 10))
def test_the_cap_within_a_run(cap, script):
    """No guess is made beyond the cap, and no token comes after it."""
    drafted = script.engine.stats.drafted
    (output,) = script.generate([[10]], SamplingParams(max_tokens=cap, ignore_eos=True))
    assert (output.token_ids, output.finish_reason) == (SCRIPT[1 : 1 + cap], "length")
    rows = (cap + 3) // 5  # one token comes with the prompt, five with each row
    assert script.engine.stats.drafted - drafted == cap - 1 - rows
    assert all_free(script)


def test_min_tokens_within_a_run(script):
    """Before its time the end token cannot be chosen, however right the guess would have been."""
    params = SamplingParams(max_tokens=9, min_tokens=4, stop_token_ids=[13])
    (output,) = script.generate([[10]], params)
    assert output.token_ids[:2] == [11, 12]
    assert 13 not in output.token_ids[:4]


@pytest.mark.parametrize(("stop", "expected"), [(["cd"], "ab"), (["f", "de"], "abc"), (["gx"], "abcdefg")])
def test_stop_strings_within_a_run(stop, expected, tiny):
    """The string ends in the middle of a run, or over two of them; the stream takes nothing back."""
    source, letters = tiny("qwen2"), byte_ids("abcdefg")
    llm = engine(scripted(source, source.parent / "letters", [[10, *letters]]))
    for k in (1, 2, 4):
        llm.engine.runner.most = k
        llm.engine.proposer = Told({((10,), 0): letters}, KINDS["right"])
        params = SamplingParams(max_tokens=7, stop=stop, ignore_eos=True)
        (output,) = llm.generate([[10]], params)
        assert (output.text, output.finish_reason) == (expected, "length" if expected == "abcdefg" else "stop")
        assert "".join(event.text for event in llm.stream([[10]], params)) == expected
        assert len(output.token_ids) == len(expected) + (0 if expected == "abcdefg" else len(stop[-1]))
        assert all_free(llm)


# ---- who comes and goes ----------------------------------------------------------------------------------------------


def add(llm: LLM, prompt: list[int], params: SamplingParams) -> Any:
    (request,) = llm.requests.build([prompt], params)
    return llm.engine.add_request(request.generations[0])


def test_an_abort_at_any_moment(plain, tiny):
    """After each number of steps, one of two; the other says what it would have said."""
    _, answers = plain
    llm = engine(tiny("qwen2"), blocks=40)
    llm.engine.proposer = told = Told(answers, at_random)
    for steps in range(9):
        first, second = (add(llm, PROMPTS[i], PARAMS[i]) for i in (0, 1))
        heard = [event.token_id for _ in range(steps) for request, event in llm.engine.step() if request is first]
        ended = first.generation.finish_reason
        llm.engine.abort(first)
        assert ended or not first.sequence.block_table
        while llm.engine.has_work:
            assert all(request is second for request, _ in llm.engine.step())
        assert heard == first.generation.token_ids == answers[tuple(PROMPTS[0]), 0][: len(heard)]
        assert second.generation.token_ids == answers[tuple(PROMPTS[1]), 0]
        assert told.forgotten[first] and told.forgotten[second]
        assert all_free(llm)


def test_a_prompt_that_is_only_scored_beside_one_that_guesses(tiny):
    """Its last chunk is one token, as a decode is; it gives none."""
    folder, prompt = tiny("qwen2"), [6, 7, 8, 9, 10, 11, 12, 13, 14]
    scored = SamplingParams(max_tokens=0, prompt_logprobs=1)
    (expected,) = engine(folder, cls=Plain).generate([prompt], scored)
    (alone,) = engine(folder, cls=Plain).generate([PROMPTS[0]], PARAMS[0])
    for chunk in (1, 2, 4, 8):
        llm = engine(folder, max_num_seqs=4, max_num_batched_tokens=64, max_chunk=chunk)
        llm.engine.proposer = Told({(tuple(PROMPTS[0]), 0): alone.token_ids}, KINDS["wrong"])
        outputs = llm.generate([PROMPTS[0], prompt], [PARAMS[0], scored])
        assert_same(outputs, [alone, expected])
        assert llm.engine.stats.drafted > 0
        assert all_free(llm)


def test_no_guesses_beside_a_prompt(tiny, plain):
    """While somebody's prompt is computed, or could be, all decode plainly."""
    llm = engine(tiny("qwen2"), max_num_seqs=2, max_num_batched_tokens=4)
    llm.engine.proposer = Told(plain[1], KINDS["wrong"])
    plans: list[Any] = []
    execute = llm.engine.runner.execute
    llm.engine.runner.execute = lambda plan: (plans.append(plan), execute(plan))[1]
    llm.generate(PROMPTS[:3], PARAMS[:3])
    guessing = [plan for plan in plans if any(row.drafts for row in plan.rows)]
    assert len(guessing) > 5
    assert all(row.span.start >= row.request.prompt_len for plan in guessing for row in plan.rows)
    assert any(row.span.start < row.request.prompt_len for plan in plans for row in plan.rows)


def test_guesses_and_overlap_take_turns(tiny):
    """Pausing and over a crowd a step is planned ahead; with guesses none; whoever changes, nothing is lost."""
    llm = engine(tiny("qwen2"), speculative_least_rate=0.2, speculative_max_rows=2)
    params = SamplingParams(max_tokens=50, temperature=1.0, seed=1, ignore_eos=True)
    expected = ids(engine(tiny("qwen2"), cls=Plain).generate([[5, 6], [7, 8], [9]], params))
    llm.engine.proposer = Told(
        {((5, 6), 0): expected[0][0], ((7, 8), 0): expected[1][0], ((9,), 0): expected[2][0]}, KINDS["wrong"]
    )
    requests, lags = [add(llm, [5, 6], params)], []

    def steps(count: int) -> list[int]:
        lags[:] = []
        for _ in range(count):
            llm.engine.step()
            lags.append(len(llm.engine.under_way))
        return lags

    assert steps(12)[1:10] == [0] * 9, "it guesses, and every step is read at once"
    assert steps(10) == [1] * 10, "its guesses fell: it pauses"
    requests.append(add(llm, [7, 8], params))
    assert set(steps(6)[2:]) == {0}, "somebody is new, and trusted"
    requests.append(add(llm, [9], params))
    assert set(steps(6)[1:]) == {1}, "three are a crowd"
    llm.engine.abort(requests[2])
    assert 0 in steps(3)
    while llm.engine.has_work:
        llm.engine.step()
    assert [request.generation.token_ids for request in requests[:2]] == [expected[0][0], expected[1][0]]
    assert requests[2].generation.token_ids == expected[2][0][: len(requests[2].generation.token_ids)]
    assert all_free(llm)


def test_a_step_with_guesses_is_read_at_once(tiny):
    """Also where it follows a step that could not be started, and the engine had meant to overlap."""
    llm = engine(tiny("qwen2"))
    llm.engine.proposer = Told({((5, 6), 0): [0] * 99}, KINDS["wrong"])
    request = add(llm, [5, 6], SamplingParams(max_tokens=9, ignore_eos=True))
    llm.engine.step()
    assert len(llm.engine.under_way) == 1
    llm.engine.lag = lambda: 1
    llm.engine.stumbled = True
    llm.engine.step()
    assert (llm.engine.stats.rows, len(llm.engine.under_way)) == (1, 0)
    assert len(request.generation.token_ids) == 2
    llm.engine.abort(request)
    assert all_free(llm)


# ---- what is counted -------------------------------------------------------------------------------------------------


def test_counts_by_place(script):
    """9 tokens: one with the prompt, then rows of 4 guesses and 2; only guesses that stood count as accepted."""
    script.engine.stats = type(script.engine.stats)()
    script.generate([[10]], SamplingParams(max_tokens=9, ignore_eos=True))
    stats = script.engine.stats
    assert (stats.rows, stats.drafted, stats.accepted) == (2, 6, 6)
    assert (stats.drafted_at, stats.accepted_at) == ([2, 2, 1, 1], [2, 2, 1, 1])
    assert (stats.acceptance_rate, stats.tokens_per_row) == (1.0, 4.0)


def test_counts_of_guesses_that_fall(script):
    """The second guess is wrong each time: of 4 one stands, and the third and fourth are not counted though equal."""
    stats = script.engine.stats = type(script.engine.stats)()
    assert (stats.acceptance_rate, stats.tokens_per_row) == (0.0, 1.0)
    script.engine.proposer = Told(
        {((10,), 0): SCRIPT[1:]}, lambda coming, count, rng: [*coming[:1], 400, *coming[2:count]][:count]
    )
    script.generate([[10]], SamplingParams(max_tokens=9, ignore_eos=True))
    script.engine.proposer = Told({((10,), 0): SCRIPT[1:]}, KINDS["right"])
    assert (stats.rows, stats.drafted, stats.accepted) == (4, 12, 4)
    assert (stats.drafted_at, stats.accepted_at) == ([4, 3, 3, 2], [4, 0, 0, 0])
    assert stats.tokens_per_row == 2.0


def test_the_answer_known_and_the_rate_set(tiny):
    """SetAcceptance at 0.5 on an answer: each run is as long as its hashes say."""
    llm = engine(tiny("qwen2"))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    (output,) = engine(tiny("qwen2"), cls=Plain).generate([[5, 6]], params)
    llm.engine.proposer = known = SetAcceptance({(5, 6): output.token_ids}, 0.5, VOCAB)
    assert ids(llm.generate([[5, 6]], params)) == [[output.token_ids]]
    right = [known.guess((5, 6), place, token) == token for place, token in enumerate(output.token_ids)]
    place = accepted = 1
    accepted = 0
    while place < 59:
        run = right[place : min(place + 4, 59)]
        stood = run.index(False) if False in run else len(run)
        accepted, place = accepted + stood, place + stood + 1
    assert llm.engine.stats.accepted == accepted > 10


def test_who_guesses_badly_pauses(tiny):
    """After ten bad rows, 48 tokens of rest; then a short trial."""
    llm = engine(tiny("qwen2"), speculative_least_rate=0.2, max_model_len=250, blocks=160)
    params = SamplingParams(max_tokens=70, ignore_eos=True)
    (output,) = engine(tiny("qwen2"), cls=Plain, max_model_len=250, blocks=160).generate([[5, 6]], params)
    llm.engine.proposer = SetAcceptance({(5, 6): output.token_ids}, 0.0, VOCAB)
    plans: list[Any] = []
    execute = llm.engine.runner.execute
    llm.engine.runner.execute = lambda plan: (plans.append(plan), execute(plan))[1]
    assert ids(llm.generate([[5, 6]], params)) == [[output.token_ids]]
    guessed = [place for place, plan in enumerate(plans) if plan.rows[0].drafts]
    back = 12 + FIRST_PAUSE  # one later than its tokens say: with overlap the newest is not known yet
    assert guessed == [*range(1, 11), *range(back, back + 2)]
    assert len(plans) == 70
    assert all_free(llm)


def test_nothing_found_counts_little(tiny):
    """80 steps without a find are a pause, and 12 are a trial: 0.98 ** 80 and 0.25 * 0.98 ** 12 are below 0.2."""
    llm = engine(tiny("qwen2"), speculative_least_rate=0.2, max_model_len=250, blocks=160)
    asked = []
    llm.engine.proposer = Told({((5, 6), 0): [0] * 199}, lambda *_: asked.append(1) or [])
    llm.generate([[5, 6]], SamplingParams(max_tokens=80 + FIRST_PAUSE + 60, ignore_eos=True))
    assert len(asked) == 80 + 12


# ---- when something fails --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [MemoryError("a rigged failure"), KeyboardInterrupt("a rigged interrupt")], ids=repr)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_step_that_fails(at, when, error, plain, tiny):
    """Its requests end with the error, told once; afterwards all is as before."""
    outputs, answers = plain
    llm = engine(tiny("qwen2"))
    llm.engine.proposer = Told(answers, at_random)
    execute, count = llm.engine.runner.execute, Counter[str]()

    def failing(plan: Any) -> Any:
        count["step"] += 1
        if count["step"] == at and when == "before":
            raise error
        handle = execute(plan)
        if count["step"] == at:
            raise error
        return handle

    llm.engine.runner.execute = failing
    with pytest.raises(type(error), match="rigged"):
        llm.generate(PROMPTS, PARAMS)
    assert all_free(llm)
    assert_same(llm.generate(PROMPTS, PARAMS), outputs)
    assert all_free(llm)


def test_a_proposer_that_fails_costs_no_token(tiny):
    """Its error is raised; what the step had read before is told, and nobody's answer changes."""
    llm = engine(tiny("qwen2"), speculative_least_rate=0.2)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    expected = ids(engine(tiny("qwen2"), cls=Plain).generate([[5, 6], [7]], params))
    failing: list[int] = []

    def guess(coming: Any, count: int, rng: Any) -> list[int]:
        if failing.pop() if failing else False:
            raise MemoryError("a rigged failure")
        return [0]

    llm.engine.proposer = Told({((5, 6), 0): [0] * 99, ((7,), 0): [0] * 99}, guess)
    first = add(llm, [5, 6], params)
    told: list[int] = []

    def step() -> None:
        try:
            events = llm.engine.step()
        except MemoryError:
            events = llm.engine.failed
            told_by_failing.append(len(events))
        told.extend(event.token_id for request, event in events if request is first)

    told_by_failing: list[int] = []
    while not llm.engine.under_way or len(told) < 15:  # it pauses by now, and a step is under way
        step()
    second = add(llm, [7], params)
    failing += [1]  # at the first guess for who is new: what was under way has just been read
    while llm.engine.has_work:
        step()
    assert told_by_failing[0] > 0
    assert told == first.generation.token_ids == expected[0][0]
    assert second.generation.token_ids == expected[1][0]
    assert all_free(llm)


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_draft_tokens": -1}, "num_draft_tokens.*-1.*0"),
        ({"num_draft_tokens": 10**9}, "num_draft_tokens is 1000000000; .* 64"),
        ({"speculative": 5}, "speculative is 5; .*layers:12"),
        ({"num_draft_tokens": 2.0}, r"num_draft_tokens.*2\.0"),
        ({"acceptance": "maybe"}, "'maybe'.*'match'.*'ratio'"),
        ({"speculative_max_rows": 0}, "speculative_max_rows.*0.*1"),
        ({"speculative_least_rate": 1.5}, "speculative_least_rate.*1.5"),
    ],
    ids=str,
)
def test_bad_options(options, words, tiny):
    with pytest.raises((ValueError, TypeError), match=words):
        engine(tiny("qwen2"), **options)


def test_without_a_proposer_it_is_stage_07(tiny):
    llm = engine(tiny("qwen2"), speculative=None)
    assert type(llm.engine).__name__ == "OverlapEngine"


def test_a_crowd_does_not_guess(plain, tiny):
    llm = engine(tiny("qwen2"), speculative_max_rows=3)
    llm.engine.pace = Pace(3, 0.0)
    llm.engine.proposer = Told(plain[1], KINDS["right"])
    rows: list[int] = []
    execute = llm.engine.runner.execute
    llm.engine.runner.execute = lambda plan: (
        rows.append(len(plan.rows)) if any(r.drafts for r in plan.rows) else 0,
        execute(plan),
    )[1]
    assert_same(llm.generate(PROMPTS, PARAMS), plain[0])
    assert rows
    assert max(rows) <= 3
