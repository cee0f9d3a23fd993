"""A smaller model that guesses: its K/V is that of the tokens that stand, whatever happened to the request."""

from typing import Any

import pytest
import torch

from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.batch import Batch
from stages.s02_kv_cache.kv_store import KVStore
from stages.s02_kv_cache.sequence import Sequence
from stages.s03_paged_kv.context import PagedContext
from stages.s04_continuous_batching.span import Span
from stages.s06_prefix_cache.llm import LLM as Plain
from stages.s08_speculative import draft_model
from stages.s08_speculative.draft_model import DraftModelProposer
from stages.s08_speculative.proposer import Draft
from stages.s08_speculative.test_engine import add, all_free, assert_same, engine, ids
from tests.scripted import edited

PROMPTS = [[5] * 20, [6, 7] * 12, [7] * 3, [8] * 11]
PARAMS = [
    SamplingParams(max_tokens=9 + 5 * i, temperature=i % 2, seed=i, n=1 + i // 3, ignore_eos=True) for i in range(4)
]


def anew(proposer: DraftModelProposer, token_ids: list[int]) -> torch.Tensor:
    """K/V of the draft model over these tokens, computed in one go in memory of its own: [L, 2, T, Hkv, D]."""
    size = proposer.store.data.shape[3]
    blocks = -(-len(token_ids) // size)
    store = KVStore(proposer.model.config, blocks + 1, size, device=torch.device("cpu"), dtype=torch.float32)
    chunk = Span(Sequence(token_ids, block_table=list(range(1, blocks + 1))), 0, len(token_ids))
    batch = Batch.of([chunk], torch.device("cpu"))
    with torch.inference_mode():
        proposer.model(
            batch.input_ids, batch.positions, PagedContext.of([chunk], batch, store, proposer.ops, proposer.shape)
        )
    return in_order(store, chunk.block_table, len(token_ids))


def in_order(store: KVStore, table: list[int], count: int) -> torch.Tensor:
    return store.data[:, :, table].flatten(2, 3)[:, :, :count]


def watch(llm: Any) -> list[int]:
    """From now on, after every step and for everybody: what counts as read is what would be computed anew.

    The list gets the number of tokens that was right, each time.
    """
    step, checked = llm.engine.step, []

    def checking() -> Any:
        events, proposer = step(), llm.engine.proposer
        for request in llm.engine.scheduler.running:
            stay, count, tail = proposer.read.get(request, (-1, 0, []))
            tokens, table = request.sequence.token_ids, request.sequence.block_table
            read = [*tokens[:count], *tail]
            known = min(len(read), request.sequence.num_kv)
            right = next((i for i in range(known) if read[i] != tokens[i]), known)
            if stay == request.num_preemptions and right:
                there, expected = in_order(proposer.store, table, right), anew(proposer, tokens[:right])
                torch.testing.assert_close(there, expected, atol=1e-4, rtol=1e-4)  # other products for other counts
                checked.append(right)
        return events

    llm.engine.step = checking
    return checked


@pytest.mark.parametrize(
    ("happens", "options"),
    [
        ("guesses stand and fall", {}),
        ("preemption", {"blocks": 33, "max_num_seqs": 5, "max_num_batched_tokens": 12}),
        ("swap", {"blocks": 33, "swap": 90, "max_num_seqs": 5, "max_num_batched_tokens": 12}),
        ("catching up in pieces", {"max_num_batched_tokens": 64}),
    ],
)
def test_what_is_read_is_right(happens, options, tiny, monkeypatch):
    """Twice the same prompts, the second time found in the prefix cache; several answers share and copy blocks."""
    if happens == "catching up in pieces":
        monkeypatch.setattr(draft_model, "CATCH_UP", 5)
    expected = engine(tiny("qwen2"), cls=Plain).generate(PROMPTS, PARAMS)
    llm = engine(tiny("qwen2"), speculative="layers:2", **{"blocks": 160, **options})
    checked, copies, copy_blocks = watch(llm), [], llm.engine.proposer.copy_blocks
    llm.engine.proposer.copy_blocks = lambda pairs: (copies.extend(pairs), copy_blocks(pairs))
    for _ in range(2):
        assert_same(llm.generate(PROMPTS, PARAMS), expected)
        assert all_free(llm)
    stats, scheduler = llm.engine.stats, llm.engine.scheduler
    assert 0 < stats.accepted < stats.drafted
    assert len(checked) > 20
    assert scheduler.cache.hit_tokens > 20 or happens in ("preemption", "swap")
    assert copies
    assert (scheduler.num_preemptions > 0) == (happens in ("preemption", "swap"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_model_as_its_own_draft_is_always_right(temperature, tiny):
    """Every guess of every row stands, for 40 tokens: nothing is lost where all are accepted. lablup/mlxcel#994."""
    folder = tiny("qwen2")
    llm = engine(folder, speculative=str(folder), blocks=160)
    checked, calls = watch(llm), []
    chunk = llm.engine.proposer.chunk
    llm.engine.proposer.chunk = lambda request, guesses: (
        calls.append((len(guesses), made := chunk(request, guesses))) or made
    )
    params = SamplingParams(
        max_tokens=41, temperature=temperature, seed=1, repetition_penalty=1.3, frequency_penalty=0.3, ignore_eos=True
    )
    (output,) = llm.generate([[5, 6, 7]], params)
    assert [[output.token_ids]] == ids(engine(folder, cls=Plain).generate([[5, 6, 7]], params))
    stats = llm.engine.stats
    assert (stats.acceptance_rate, stats.rows, stats.accepted) == (1.0, 8, 32)
    assert len(checked) == 8 - 1, "after each row but the last"
    first, *later = [made.num_new for number, made in calls if number == 0]
    assert first == 4, "prompt and first token"
    assert set(later) == {2}, "the last guess, which nobody had fed to it, and the token after"
    assert {made.num_new for number, made in calls if number} == {1}


@pytest.mark.parametrize("stands", range(5))
def test_each_number_of_guesses_that_stand(stands, tiny):
    """The same guesses, spoiled from one place on: what is read is never more than what stands, and catches up."""
    folder = tiny("qwen2")
    llm = engine(folder, speculative=str(folder), blocks=160)
    checked, proposer = watch(llm), llm.engine.proposer
    propose = proposer.propose

    def spoiled(wanted: Any) -> Any:
        return {
            request: Draft((*draft.tokens[:stands], *((token + 1) % 512 for token in draft.tokens[stands:])))
            for request, draft in propose(wanted).items()
        }

    proposer.propose = spoiled
    request = add(llm, [5, 6, 7], SamplingParams(max_tokens=41, ignore_eos=True))
    while llm.engine.has_work:
        llm.engine.step()
        if request.state == "running" and not llm.engine.under_way:
            made = request.generation.token_ids
            assert request.sequence.num_kv == 3 + len(made) - 1
    assert [[request.generation.token_ids]] == ids(
        engine(folder, cls=Plain).generate([[5, 6, 7]], SamplingParams(max_tokens=41, ignore_eos=True))
    )
    stats = llm.engine.stats
    assert stats.accepted_at[:stands] == stats.drafted_at[:stands]
    assert set(stats.accepted_at[stands:]) <= {0}
    assert len(checked) >= 7


@pytest.mark.parametrize("drawn", [False, True])
def test_up_to_the_last_place_of_the_model(drawn, tiny):
    """Answers that end where the model's length does; no position and no block beyond it, and the neighbours' answers
    are theirs."""
    folder, prompts = tiny("qwen2"), [[5] * 50, [6] * 57, [7] * 62, [8] * 3]
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    llm = engine(folder, speculative="layers:2", blocks=160, acceptance="ratio" if drawn else "match")
    longest, execute = [0], llm.engine.runner.execute

    def measured(plan: Any) -> Any:
        longest.append(max(len(row.span.block_table) for row in plan.rows))
        return execute(plan)

    llm.engine.runner.execute = measured
    outputs = llm.generate(prompts, params)
    assert ids(outputs) == ids(engine(folder, cls=Plain).generate(prompts, params))
    assert [len(o.token_ids) for o in outputs] == [14, 7, 2, 61]
    assert max(longest) == 64 // 4
    assert llm.engine.stats.drafted > 20


def test_who_has_no_blocks_for_guesses_gets_none(tiny):
    """And nothing is taken for them; a block stays for everybody who asks."""
    llm = engine(tiny("qwen2"), speculative="layers:2", blocks=160)
    request = add(llm, [5] * 6, SamplingParams(max_tokens=20, ignore_eos=True))
    llm.engine.step()
    while llm.engine.under_way:
        llm.engine.read(0, [])
    pool, table = llm.engine.scheduler.cache.pool, list(request.sequence.block_table)
    taken = pool.allocate(pool.num_free - 1)
    assert llm.engine.proposer.propose({request: 4}) == {}
    assert request.sequence.block_table == table
    pool.give_back(taken[:1])
    (draft,) = llm.engine.proposer.propose({request: 4}).values()
    assert len(draft.tokens) == 4
    pool.give_back(taken[1:])
    llm.engine.abort(request)
    assert all_free(llm)


def test_guesses_are_drawn_from_what_is_said_to_be_their_distribution(tiny):
    """With penalties, too: no guess has a probability of 0, and each is the token that its distribution gives."""
    llm = engine(tiny("qwen2"), speculative="layers:2", blocks=160, acceptance="ratio")
    proposer, seen = llm.engine.proposer, []
    propose = proposer.propose
    proposer.propose = lambda wanted: seen.append(propose(wanted)) or seen[-1]
    params = SamplingParams(
        max_tokens=30, temperature=1.5, top_k=2, seed=1, frequency_penalty=2.0, repetition_penalty=2.0, ignore_eos=True
    )
    llm.generate([[5, 6]] * 3, params)
    drafts = [draft for each in seen for draft in each.values()]
    assert len(drafts) > 10
    for draft in drafts:
        assert draft.probs.shape == (len(draft.tokens), 512)
        assert draft.probs.sum(-1).tolist() == pytest.approx([1.0] * len(draft.tokens))
        assert all(p[token] > 0 for p, token in zip(draft.probs, draft.tokens, strict=True))
        assert {int((p > 0).sum()) for p in draft.probs} == {2}


def test_its_blocks_are_copied_with_the_models(tiny):
    """Copy-on-write: all layers, keys and values."""
    proposer = engine(tiny("qwen2"), speculative="layers:2").engine.proposer
    proposer.store.data.normal_()
    before = proposer.store.data.clone()
    proposer.copy_blocks([(3, 5), (4, 6)])
    assert torch.equal(proposer.store.data[:, :, [5, 6]], before[:, :, [3, 4]])
    assert torch.equal(proposer.store.data[:, :, :5], before[:, :, :5])


# ---- what cannot be a draft ------------------------------------------------------------------------------------------


def test_another_vocabulary_is_refused_with_both_sizes(tiny):
    source = tiny("qwen2")

    def cut(weights: Any) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = weights[name][:505].clone()

    folder = edited(source, source.parent / "fewer-tokens", cut, {"config.json": {"vocab_size": 505}})
    with pytest.raises(ValueError, match=r"505.*512"):
        engine(source, speculative=str(folder))


def test_a_draft_that_reads_less_than_the_model(tiny):
    """Refused with both lengths; where the model is told to read no more, it serves."""
    source = tiny("qwen2")
    folder = edited(source, source.parent / "short", json_files={"config.json": {"max_position_embeddings": 40}})
    with pytest.raises(ValueError, match=r"40.*64"):
        engine(source, speculative=str(folder))
    llm = engine(source, speculative=str(folder), max_model_len=40)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    assert ids(llm.generate([[5, 6]], params)) == ids(
        engine(source, cls=Plain, max_model_len=40).generate([[5, 6]], params)
    )
    assert llm.engine.stats.drafted > 10


@pytest.mark.parametrize(
    ("speculative", "words"),
    [
        ("layers:0", "0 layers.*3"),
        ("layers:3", "3 layers.*3"),
        ("layers:40", "40 layers.*3"),
        ("layers:", "layers:.*layers:12"),
        ("layers:-1", "layers:-1.*layers:12"),
        ("layers:x", "layers:x.*layers:12"),
        ("layers:²", "layers:².*layers:12"),
    ],
)
def test_bad_layers(speculative, words, tiny):
    with pytest.raises(ValueError, match=words):
        engine(tiny("qwen2"), speculative=speculative)


def test_what_is_no_model_is_refused(tiny, tmp_path):
    with pytest.raises((ValueError, OSError)):
        engine(tiny("qwen2"), speculative=str(tmp_path / "nowhere"))


def test_a_draft_of_layers_copies_no_weight_and_shares_the_budget(tiny):
    """Two of three layers: of the same bytes, three fifths are the model's."""
    llm, alone = (engine(tiny("qwen2"), blocks=99, max_num_seqs=64, speculative=kind) for kind in ("layers:2", "ngram"))
    draft = llm.draft
    assert draft.layers[1] is llm.model.layers[1]
    assert draft.embed_tokens is llm.model.embed_tokens
    blocks = [each.engine.scheduler.cache.pool.num_blocks for each in (llm, alone)]
    assert blocks == [60, 100]
    assert llm.engine.proposer.store.data.shape[2] == 60
