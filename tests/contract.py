"""The contract of every stage: what its `LLM` must do, whatever happens inside. A stage's checks subclass it:

    class TestContract(Contract):
        llm_class = LLM

Only the face that all stages share is used. The right values come from Hugging Face, from scripted checkpoints, or from
a few lines of arithmetic here, never from another stage.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch

from reference import hf
from stages.s01_forward.sampling_params import SamplingParams
from tests.fixtures import each_family
from tests.scripted import edited, scripted

TOLERANCE = 1e-4  # natural-log units, fp32
VOCAB, KNOWN = 512, 500  # rows of the tiny models, and ids that have a token
GREETING = "A😀é"  # 1 + 4 + 2 bytes, and a token for each byte


@cache
def engine(llm_class: type, folder: Path, **options: Any) -> Any:
    """One engine per class, folder and options for the whole run."""
    return llm_class(folder, device="cpu", **options)


@cache
def ragged(family: str, count: int) -> tuple[tuple[list[int], int], ...]:
    """`count` prompts of 1 to 60 tokens, each with a number of tokens to generate."""
    rng = Random(f"ragged {family}")
    return tuple(
        ([rng.randrange(3, KNOWN) for _ in range(rng.randint(1, 60))], rng.randint(1, 10)) for _ in range(count)
    )


@cache
def hf_eos_ids(folder: Path) -> set[int]:
    return hf.eos_ids(folder)


@cache
def hf_logprobs(folder: Path, ids: tuple[int, ...]) -> torch.Tensor:
    return hf.logits(folder, ids).log_softmax(-1)  # [T, V]


def ids_of(outputs: Sequence[Any]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def assert_greedy(folder: Path, output: Any, tokens: int) -> None:
    """The answer is Hugging Face's greedy one: each token the likeliest after those before it, to the end or the cap.

    One forward pass over prompt and answer shows all of that at once.
    """
    prompt, answer = output.prompt_token_ids, output.token_ids
    best = hf_logprobs(folder, (*prompt, *answer)).argmax(-1)[len(prompt) - 1 : -1]
    assert answer == best.tolist()
    ends = [i for i, token_id in enumerate(answer) if token_id in hf_eos_ids(folder)]
    assert ends in ([], [len(answer) - 1])
    assert output.finish_reason == ("stop" if ends else "length")
    assert ends or len(answer) == tokens


def assert_logprob(entry: Any, expected: torch.Tensor, token_id: int, count: int) -> None:
    """One entry against Hugging Face's log-probabilities [V] of the same position."""
    assert entry.token_id == token_id
    assert entry.logprob == pytest.approx(expected[token_id].item(), abs=TOLERANCE)
    larger = int((expected > expected[token_id] + TOLERANCE).sum())
    assert larger < entry.rank <= int((expected > expected[token_id] - TOLERANCE).sum()) + 1
    values = [value for _, value in entry.top]
    assert len(values) == count
    assert values == sorted(values, reverse=True)
    assert values == pytest.approx(expected.topk(count).values.tolist(), abs=TOLERANCE)
    assert [value for _, value in entry.top] == pytest.approx([expected[i].item() for i, _ in entry.top], abs=TOLERANCE)


@pytest.mark.end_to_end
class Contract:
    """Subclass it and say which engine it is."""

    llm_class: ClassVar[type]
    ragged_prompts: ClassVar[int] = 50  # per family

    @pytest.fixture
    def llm_of(self, tiny: Callable[[str], Path]) -> Callable[..., Any]:
        """`llm_of(name or folder, **options)`: an engine that lives as long as the run."""
        return lambda which, **options: engine(
            self.llm_class, which if isinstance(which, Path) else tiny(which), **options
        )

    @pytest.fixture
    def llm(self, llm_of: Callable[..., Any]) -> Any:
        return llm_of("qwen2")

    @pytest.fixture
    def speaker(self, llm_of: Callable[..., Any], tiny: Callable[[str], Path]) -> Callable[..., Any]:
        """`speaker(*scripts, **keys)`: an engine that follows scripts; keys are those of the generation config."""

        def build(*scripts: Sequence[int], **keys: Any) -> Any:
            source = tiny("qwen2")
            name = f"scripted-{scripts}-{keys}".translate({ord(c): "_" for c in " ()[]{},:'\"."})
            json_files = {"generation_config.json": keys}
            return llm_of(scripted(source, source.parent / name, scripts, json_files), max_model_len=64)

        return build

    # ---- the model's numbers -----------------------------------------------------------------------------------------

    @each_family
    def test_greedy_ids_equal_hugging_face(self, family, tiny, llm_of):
        cases = ragged(family, self.ragged_prompts)
        outputs = llm_of(family).generate([p for p, _ in cases], [SamplingParams(max_tokens=n) for _, n in cases])
        for output, (_, tokens) in zip(outputs, cases, strict=True):
            assert_greedy(tiny(family), output, tokens)
        assert [o.prompt_token_ids for o in outputs] == [p for p, _ in cases]

    @each_family
    def test_logprobs_equal_hugging_face(self, family, tiny, llm_of):
        """Public face of the logits: 1e-4 at every position of prompt and answer. vllm-project/vllm#5846."""
        folder, prompts = tiny(family), [p for p, _ in ragged(family, 50)[:6]] + [[7]]
        params = SamplingParams(max_tokens=6, logprobs=5, prompt_logprobs=20, ignore_eos=True)
        for output in llm_of(family).generate(prompts, params):
            prompt, answer = output.prompt_token_ids, output.token_ids
            expected = hf_logprobs(folder, (*prompt, *answer))  # row t scores the token at t + 1
            assert output.prompt_logprobs[0] is None
            assert len(output.prompt_logprobs) == len(prompt)
            for t, entry in enumerate(output.prompt_logprobs[1:]):
                assert_logprob(entry, expected[t], prompt[t + 1], 20)
            assert len(output.outputs[0].logprobs) == len(answer) == 6
            for t, entry in enumerate(output.outputs[0].logprobs):
                assert_logprob(entry, expected[len(prompt) - 1 + t], answer[t], 5)

    def test_logprobs_are_those_of_the_model_before_sampling(self, llm, tiny):
        """Temperature, filters, penalties and bias choose the token; they do not change what the model says of it."""
        params = SamplingParams(
            max_tokens=4, logprobs=3, temperature=3.0, top_k=50, seed=1, repetition_penalty=2.0, logit_bias={7: 5.0}
        )
        (output,) = llm.generate([[5, 6, 7]], params)
        expected = hf_logprobs(tiny("qwen2"), (5, 6, 7, *output.token_ids))
        for t, entry in enumerate(output.outputs[0].logprobs):
            assert_logprob(entry, expected[2 + t], output.token_ids[t], 3)

    def test_logprobs_only_when_asked(self, llm):
        plain, zero = llm.generate(
            [[5, 6, 7]] * 2, [SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, logprobs=0)]
        )
        assert plain.prompt_logprobs is None
        assert plain.outputs[0].logprobs is None
        assert [entry.top for entry in zero.outputs[0].logprobs] == [(), ()]
        assert all(entry.rank == 1 for entry in zero.outputs[0].logprobs)

    def test_scoring_a_prompt_generates_nothing(self, llm):
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=0, prompt_logprobs=1))
        assert (output.token_ids, output.text, output.finish_reason) == ([], "", "length")
        assert len(output.prompt_logprobs) == 3

    # ---- when an answer ends -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("generation_eos", [[5, 9], 9, [9]], ids=str)
    def test_end_tokens_of_generation_config_count(self, generation_eos, speaker):
        """A list, a single id, and a list that does not hold the tokenizer's own EOS. Blaizzy/mlx-vlm#309."""
        llm = speaker([10, 11, 12, 9, 13], eos_token_id=generation_eos)
        (output,) = llm.generate([[10]], SamplingParams(max_tokens=8))
        assert (output.token_ids, output.finish_reason) == ([11, 12, 9], "stop")
        assert output.outputs[0].stop_reason == 9
        (output,) = llm.generate([[10]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert (output.token_ids, output.finish_reason) == ([11, 12, 9, 13], "length")

    def test_end_tokens_of_config_and_tokenizer_count_too(self, speaker, tiny, llm_of):
        """The stop set is the union: 2 stands in config.json and tokenizer only, here. Blaizzy/mlx-vlm#309."""
        llm = speaker([10, 11, 2, 12], [20, 9, 21], eos_token_id=[9])
        assert ids_of(llm.generate([[10], [20]], SamplingParams(max_tokens=3))) == [[[11, 2]], [[9]]]
        source = tiny("qwen2")
        for owner, eos in (("config", 12), ("tokenizer", ...)):
            folder = scripted(
                source,
                source.parent / f"eos-of-{owner}",
                [[10, 11, 2, 12, 13]],
                {"config.json": {"eos_token_id": eos}, "generation_config.json": {"eos_token_id": ...}},
            )
            (output,) = llm_of(folder).generate([[10]], SamplingParams(max_tokens=8))
            assert output.token_ids == [11, 2]
        (output,) = llm_of(source.parent / "eos-of-config").generate([[11, 2]], SamplingParams(max_tokens=8))
        assert output.token_ids == [12]

    def test_end_tokens_outside_of_the_vocabulary_do_no_harm(self, speaker):
        """Configs state -1 for "none", and tokenizers may have more tokens than the model."""
        llm = speaker([10, 511, 2], eos_token_id=[-1, 5000])
        params = [SamplingParams(max_tokens=4), SamplingParams(max_tokens=2, min_tokens=1, ignore_eos=True)]
        assert ids_of(llm.generate([[10]] * 2, params)) == [[[511, 2]]] * 2

    def test_stop_token_ids(self, speaker):
        llm = speaker([10, 11, 12, 13, 14], eos_token_id=[9])
        (output,) = llm.generate([[10]], SamplingParams(max_tokens=8, stop_token_ids=[13, 400], ignore_eos=True))
        assert (output.token_ids, output.finish_reason) == ([11, 12, 13], "stop")
        assert output.outputs[0].stop_reason == 13
        assert output.text == llm.generate([[10]], SamplingParams(max_tokens=2))[0].text, "a stop token is no text"

    def test_a_stop_at_the_cap_is_a_stop(self, speaker):
        """sgl-project/sglang#31599: the cause is the stop, also when the cap is reached with the same token."""
        llm = speaker([10, 11, 9, 12], eos_token_id=[9])
        assert [
            (o.token_ids, o.finish_reason)
            for n in (1, 2, 3)
            for o in llm.generate([[10]], SamplingParams(max_tokens=n))
        ] == [([11], "length"), ([11, 9], "stop"), ([11, 9], "stop")]

    def test_min_tokens_forbids_every_way_to_stop(self, speaker):
        llm = speaker([10, 9, 11, 12, 13], eos_token_id=[9])
        (output,) = llm.generate([[10]], SamplingParams(max_tokens=12, min_tokens=5))
        assert 9 not in output.token_ids[:5]
        assert len(output.token_ids) >= 5
        (output,) = llm.generate([[10]], SamplingParams(max_tokens=12, min_tokens=5, stop_token_ids=[11]))
        assert not {9, 11} & set(output.token_ids[:5])
        letters = speaker([10, *byte_ids("abcdef")])
        params = [
            SamplingParams(max_tokens=6, min_tokens=n, stop=["bc", "e"], ignore_eos=True) for n in (0, 3, 4, 5, 6)
        ]
        assert [o.text for o in letters.generate([[10]] * 5, params)] == ["a", "a", "abcd", "abcd", "abcdef"]

    def test_length_of_the_model_ends_an_answer(self, llm_of):
        llm = llm_of("qwen2", max_model_len=16)
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (None, 100, 6, 5)]
        outputs = llm.generate([list(range(10, 20))] * 4, params)
        assert [(len(o.token_ids), o.finish_reason) for o in outputs] == [(6, "length")] * 3 + [(5, "length")]
        assert llm.generate([[9] * 15], SamplingParams(max_tokens=None))[0].finish_reason == "length"
        with pytest.raises(ValueError, match=r"16 tokens.*is 16"):
            llm.generate([[9] * 16], SamplingParams(max_tokens=1))
        assert llm.generate([[9] * 16], SamplingParams(max_tokens=0, prompt_logprobs=0))[0].token_ids == []

    @pytest.mark.parametrize(
        ("text", "stop", "expected", "reason"),
        [
            ("abcdef", ["cd"], "ab", "stop"),  # over two tokens
            ("abcdef", ["def", "cd"], "ab", "stop"),  # the earliest
            ("abcdef", "a", "", "stop"),  # a plain string, at the very start
            ("abcdef", ["cx", "fg"], "abcdef", "length"),  # held back, and nothing comes of it
            ("a😀é", ["é"], "a😀", "stop"),  # over the bytes of a character
            ("a😀é", ["x😀"], "a😀é", "length"),
        ],
    )
    def test_stop_strings(self, text, stop, expected, reason, speaker):
        """Text ends before the stop string, and the stream never shows what it takes back. ggml-org/llama.cpp#9867."""
        script = byte_ids(text)
        llm = speaker([10, *script])
        params = SamplingParams(max_tokens=len(script), stop=stop, ignore_eos=True)
        (output,) = llm.generate([[10]], params)
        assert (output.text, output.finish_reason) == (expected, reason)
        assert "".join(event.text for event in llm.stream([[10]], params)) == expected
        assert output.outputs[0].stop_reason == (None if reason == "length" else min(stop, key=text.find))

    def test_text_held_back_for_a_stop_string_is_not_lost(self, speaker):
        """An end token and the cap both release it. ggml-org/llama.cpp#9867."""
        script = byte_ids("Hi?\n")
        llm = speaker([10, *script, 2])
        params = [SamplingParams(max_tokens=n, stop=["\n\nQ:"]) for n in (9, 4)]
        for p, reason in zip(params, ("stop", "length"), strict=True):
            (output,) = llm.generate([[10]], p)
            assert (output.text, output.finish_reason) == ("Hi?\n", reason)
            assert "".join(event.text for event in llm.stream([[10]], p)) == "Hi?\n"

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def test_seed_decides(self, llm):
        """The same draws each time, others for another seed, and each step draws anew. vllm-project/vllm-metal#50."""
        params = [SamplingParams(max_tokens=20, temperature=50.0, seed=seed, ignore_eos=True) for seed in (1, 1, 2)]
        (first,), (again,), (other,) = ids_of(llm.generate([[5, 6]] * 3, params))
        assert first == again != other
        assert ids_of(llm.generate([[5, 6]], params[0])) == [[first]]
        assert len(set(first)) > 14, "at this temperature all 512 tokens are nearly equally likely"

    def test_without_a_seed_answers_differ(self, llm):
        (first,), (second,) = ids_of(llm.generate([[5, 6]] * 2, SamplingParams(max_tokens=20, temperature=50.0)))
        assert first != second

    @each_family
    def test_neighbours_do_not_matter(self, family, llm_of):
        """A batch of unlike requests gives what each gives alone. huggingface/text-generation-inference#1765."""
        prompts = [p for p, _ in ragged(family, 50)[:8]]
        params = [
            SamplingParams(max_tokens=7),
            SamplingParams(max_tokens=9, temperature=1.0, seed=3),
            SamplingParams(max_tokens=5, temperature=0.7, top_k=20, top_p=0.9, seed=4, logprobs=2),
            SamplingParams(max_tokens=8, frequency_penalty=1.0, ignore_eos=True),
            SamplingParams(max_tokens=8, repetition_penalty=1.4, presence_penalty=0.5, temperature=1.3, seed=5),
            SamplingParams(max_tokens=6, temperature=2.0, min_p=0.05, seed=6, n=2),
            SamplingParams(max_tokens=6, logit_bias={3: 4.0, 511: -9.0}, temperature=1.0, seed=7, min_tokens=3),
            SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1e-39, seed=8),
        ]
        llm = llm_of(family)
        together = ids_of(llm.generate(prompts, params))
        assert together == [ids_of(llm.generate([x], p))[0] for x, p in zip(prompts, params, strict=True)]
        assert together[::-1] == ids_of(llm.generate(prompts[::-1], params[::-1]))

    def test_n_answers(self, llm):
        """Independent answers; the first is that of n = 1."""

        def params(n: int, temperature: float = 5.0) -> SamplingParams:
            return SamplingParams(max_tokens=8, temperature=temperature, seed=11, n=n, ignore_eos=True)

        (output,) = llm.generate([[5, 6]], params(3))
        assert [answer.index for answer in output.outputs] == [0, 1, 2]
        assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
        assert ids_of(llm.generate([[5, 6]], params(1))) == [[output.token_ids]]
        (answers,) = ids_of(llm.generate([[5, 6]], params(3, temperature=0.0)))
        assert answers[0] == answers[1] == answers[2]

    @pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-39, 5e-324])
    def test_a_tiny_temperature_is_greedy(self, temperature, llm):
        """And a neighbour at temperature 1 does not notice. vllm-project/vllm#1623."""
        cold = SamplingParams(max_tokens=5, temperature=temperature, seed=1)
        warm = SamplingParams(max_tokens=5, temperature=1.0, seed=1)
        (frozen,), (drawn,) = ids_of(llm.generate([[5, 6, 7]] * 2, [cold, warm]))
        assert [frozen] == ids_of(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=5)))[0]
        assert [drawn] == ids_of(llm.generate([[5, 6, 7]], warm))[0]

    @pytest.mark.parametrize("keys", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
    def test_the_narrowest_filter_is_greedy(self, keys, llm):
        params = [SamplingParams(max_tokens=6, temperature=5.0, seed=1, **keys), SamplingParams(max_tokens=6)]
        (filtered,), (greedy,) = ids_of(llm.generate([[5, 6, 7]] * 2, params))
        assert filtered == greedy

    def test_logit_bias(self, llm):
        (plain,) = ids_of(llm.generate([[5, 6]], SamplingParams(max_tokens=4)))[0]
        params = [
            SamplingParams(max_tokens=3, logit_bias={VOCAB - 1: 100.0}),
            SamplingParams(max_tokens=4, logit_bias={plain[0]: -100.0}, ignore_eos=True),
        ]
        (pushed,), (pulled,) = ids_of(llm.generate([[5, 6]] * 2, params))
        assert pushed == [VOCAB - 1] * 3
        assert plain[0] not in pulled

    @pytest.mark.parametrize(
        "keys",
        [
            {"repetition_penalty": 1.8},
            {"frequency_penalty": 2.0},
            {"presence_penalty": 2.0},
            {"repetition_penalty": 1.2, "frequency_penalty": 0.7, "presence_penalty": -0.4},
        ],
        ids=str,
    )
    def test_penalties(self, keys, tiny, llm_of):
        """Repetition counts prompt and output, once per token; the others count the output. vllm-project/vllm#1577."""
        folder, prompt = tiny("qwen3"), [7, 7, 8, 300]  # the model that repeats itself most
        params = SamplingParams(max_tokens=12, ignore_eos=True, **keys)
        ids, factor = list(prompt), keys.get("repetition_penalty", 1.0)
        for _ in range(12):
            row = hf.logits(folder, ids)[-1].tolist()  # [V]
            for token in set(ids):
                row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
            for token, times in Counter(ids[4:]).items():
                row[token] -= keys.get("presence_penalty", 0.0) + times * keys.get("frequency_penalty", 0.0)
            ids.append(row.index(max(row)))
        assert ids_of(llm_of("qwen3").generate([prompt], params)) == [[ids[4:]]]
        assert ids[4:] != hf.greedy(folder, prompt, 12), "the penalty must matter here"

    def test_draws_follow_the_distribution(self, llm, tiny):
        """768 first tokens at temperature 2, top-k 6: chi-square against the softmax, at a fixed seed."""
        outputs = llm.generate(
            [[5, 6]] * 6, [SamplingParams(max_tokens=1, temperature=2.0, top_k=6, seed=s, n=128) for s in range(6)]
        )
        drawn = Counter(answer.token_ids[0] for output in outputs for answer in output.outputs)
        top = hf.logits(tiny("qwen2"), [5, 6])[-1].topk(6)
        expected = dict(zip(top.indices.tolist(), (768 * (top.values / 2.0).softmax(-1)).tolist(), strict=True))
        assert set(drawn) <= set(expected)
        assert sum((drawn[i] - e) ** 2 / e for i, e in expected.items()) < 20.5  # 0.999 quantile, 5 degrees of freedom

    # ---- text and streams --------------------------------------------------------------------------------------------

    @each_family
    def test_stream_tells_what_generate_tells(self, family, llm_of):
        llm, prompts = llm_of(family), [p for p, _ in ragged(family, 50)[8:12]]
        params = [
            SamplingParams(max_tokens=6, temperature=1.0, seed=i, n=1 + i % 2, stop=["e", " t"]) for i in range(4)
        ]
        events = list(llm.stream(prompts, params))
        for number, output in enumerate(llm.generate(prompts, params)):
            for answer in output.outputs:
                mine = [e for e in events if (e.request, e.index) == (number, answer.index)]
                assert [e.token_id for e in mine] == answer.token_ids
                assert "".join(e.text for e in mine) == answer.text
                assert [e.finish_reason for e in mine] == [None] * (len(mine) - 1) + [answer.finish_reason]

    def test_characters_come_whole(self, speaker):
        """A character is shown when its last byte is there. antonellof/ferrox#124."""
        llm = speaker([10, *byte_ids(GREETING), 2])
        deltas = [e.text for e in llm.stream([[10]], SamplingParams(max_tokens=9))]
        assert deltas == ["A", "", "", "", "😀", "", "é", ""]
        (output,) = llm.generate([[10]], SamplingParams(max_tokens=9))
        assert (output.text, output.finish_reason) == (GREETING, "stop")

    def test_a_character_cut_by_the_cap_is_replaced_once(self, speaker):
        """The same in both modes. antonellof/ferrox#124."""
        llm = speaker([10, *byte_ids(GREETING), 2])
        params = SamplingParams(max_tokens=3)
        assert llm.generate([[10]], params)[0].text == "A\ufffd"
        assert [e.text for e in llm.stream([[10]], params)] == ["A", "", "\ufffd"]

    def test_end_markers_are_no_text(self, speaker):
        """As end token and as a special token that ends nothing, streamed or not. kserve/kserve#4490."""
        llm = speaker([10, *byte_ids("Hi"), 2, 1, *byte_ids("!"), 0])
        for params, count in ((SamplingParams(max_tokens=9), 3), (SamplingParams(max_tokens=6, ignore_eos=True), 6)):
            (output,) = llm.generate([[10]], params)
            assert (output.text, len(output.token_ids)) == ("Hi" if count == 3 else "Hi!", count)
            assert "".join(e.text for e in llm.stream([[10]], params)) == output.text

    def test_ids_without_a_token_are_no_text(self, llm):
        """Models are padded past their tokenizer. pegainfer-project/pegainfer#676."""
        params = SamplingParams(max_tokens=3, logit_bias={505: 100.0}, logprobs=20)
        (output,) = llm.generate([[5, 6]], params)
        assert (output.token_ids, output.text, output.finish_reason) == ([505] * 3, "", "length")
        assert all(len(entry.top) == 20 and entry.token_id == 505 for entry in output.outputs[0].logprobs)
        assert [e.text for e in llm.stream([[505, 511]], params)] == ["", "", ""]

    def test_a_stream_may_be_left(self, llm):
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        before = ids_of(llm.generate([[5, 6], [7]], params))
        stream = llm.stream([[5, 6], [7]], params)
        next(stream)
        stream.close()
        assert ids_of(llm.generate([[5, 6], [7]], params)) == before

    def test_streams_side_by_side(self, llm):
        """Two streams read in turns get what each gets alone."""
        params = SamplingParams(max_tokens=5, temperature=2.0, seed=1, ignore_eos=True)
        streams: list[Iterator[Any]] = [llm.stream([prompt], params) for prompt in ([5, 6], [7, 8, 9])]
        first, second = zip(*zip(*streams, strict=True), strict=True)
        assert [[e.token_id for e in first]] == ids_of(llm.generate([[5, 6]], params))[0]
        assert [[e.token_id for e in second]] == ids_of(llm.generate([[7, 8, 9]], params))[0]

    # ---- what goes in ------------------------------------------------------------------------------------------------

    def test_text_ids_and_both(self, llm, tiny):
        from transformers import AutoTokenizer

        text = "Once upon a time, café 😀"
        ids = AutoTokenizer.from_pretrained(tiny("qwen2"))(text)["input_ids"]
        params = SamplingParams(max_tokens=4)
        mixed = llm.generate([text, ids, (5, 6)], params)
        assert [o.prompt for o in mixed] == [text, None, None]
        assert [o.prompt_token_ids for o in mixed] == [ids, ids, [5, 6]]
        assert mixed[0].token_ids == mixed[1].token_ids
        assert ids_of(llm.generate(text, params)) == ids_of(llm.generate(ids, params)) == ids_of(mixed[:1])
        assert llm.generate([]) == []
        assert list(llm.stream([])) == []

    def test_defaults_are_greedy(self, llm):
        (output,) = llm.generate([[5, 6]])
        assert output.token_ids[:20] == llm.generate([[5, 6]], SamplingParams(max_tokens=20))[0].token_ids

    def test_chat(self, llm, tiny):
        """The template's own special tokens, and none twice. sgl-project/sglang#888."""
        from transformers import AutoTokenizer

        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 😀"}]
        expected = AutoTokenizer.from_pretrained(tiny("qwen2")).apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert llm.chat_ids(messages) == expected
        output = llm.chat(messages, SamplingParams(max_tokens=5))
        assert output.prompt_token_ids == expected
        assert ids_of([output]) == ids_of(llm.generate([expected], SamplingParams(max_tokens=5)))

    @pytest.mark.parametrize("messages", [[{"role": "user"}], ["Hello"], [None]], ids=str)
    def test_messages_that_the_template_does_not_take(self, messages, llm):
        with pytest.raises(ValueError, match="template"):
            llm.chat(messages)

    def test_times_are_told(self, llm):
        timings = llm.generate([[5, 6]], SamplingParams(max_tokens=3))[0].timings
        assert 0 < timings.first_token <= timings.finished < 60

    # ---- what is refused ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("prompts", "words"),
        [
            ("", "empty"),
            ([""], "empty"),
            ([[]], "empty"),
            ([[5], []], "prompt 1.*empty"),
            ([[5, VOCAB]], f"{VOCAB}.*{VOCAB - 1}"),
            ([[5, -1]], "-1.*0"),
            ([[5, 2**70]], f"{VOCAB - 1}"),
            ([[5, 1.0]], r"1\.0"),
            ([[5, True]], "True"),
            ([[5, "6"]], "'6'"),
            ([[5, None]], "None"),
            ([5, [6]], r"\[6\]"),
            ([[5], 6], "prompt 1 is 6"),
            ([None], "None"),
            ({"a": 1}, "dict"),
            ([[9] * 300], "300.*256"),
            ("x " * 1000, "256"),
            ("half a character \ud83d", r"\\ud83d.*17"),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_bad_prompts(self, prompts, words, llm):
        """vllm-project/vllm#7632, sgl-project/sglang#7670."""
        self.assert_refused(llm, prompts, {}, words)

    @pytest.mark.parametrize(
        ("keys", "words"),
        [
            ({"temperature": -0.1}, "temperature.*-0.1.*0"),
            ({"temperature": math.nan}, "temperature.*nan"),
            ({"temperature": math.inf}, "temperature.*inf"),
            ({"temperature": 10**400}, "temperature"),
            ({"temperature": "0.5"}, "temperature.*'0.5'"),
            ({"temperature": None}, "temperature.*None"),
            ({"top_p": 0.0}, "top_p.*0.0.*1.0"),
            ({"top_p": 1.1}, "top_p.*1.1.*1.0"),
            ({"top_p": math.nan}, "top_p.*nan"),
            ({"top_k": -1}, "top_k.*-1.*0"),
            ({"top_k": 1.5}, "top_k.*1.5"),
            ({"min_p": 1.5}, "min_p.*1.5.*1.0"),
            ({"repetition_penalty": 0.0}, "repetition_penalty.*0"),
            ({"repetition_penalty": 1e300}, "repetition_penalty.*1e.300"),
            ({"repetition_penalty": 1e-300}, "repetition_penalty.*1e-300"),
            ({"presence_penalty": 2.1}, "presence_penalty.*2.1.*2.0"),
            ({"frequency_penalty": -math.inf}, "frequency_penalty.*-inf"),
            ({"max_tokens": 0}, "max_tokens.*0.*1"),
            ({"max_tokens": -5}, "max_tokens.*-5"),
            ({"max_tokens": True}, "max_tokens.*True"),
            ({"min_tokens": 5, "max_tokens": 4}, "min_tokens.*5.*4"),
            ({"n": 0}, "n is 0.*1"),
            ({"n": 129}, "n is 129.*128"),
            ({"seed": 2**70}, "seed.*1180591620717411303424"),
            ({"seed": 1.0}, "seed.*1.0"),
            ({"logprobs": 21}, "logprobs.*21.*20"),
            ({"prompt_logprobs": -1}, "prompt_logprobs.*-1"),
            ({"stop": [""]}, "stop"),
            ({"stop": [7]}, "stop.*7"),
            ({"stop": 7}, "stop is 7"),
            ({"stop": None}, "stop is None"),
            ({"stop_token_ids": None}, "stop_token_ids is None"),
            ({"logit_bias": [3]}, r"logit_bias is \[3\]"),
            ({"ignore_eos": "no"}, "ignore_eos is 'no'"),
            ({"stop_token_ids": [VOCAB]}, f"stop_token_ids.*{VOCAB}.*{VOCAB - 1}"),
            ({"stop_token_ids": [-1]}, "stop_token_ids.*-1"),
            ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias.*{VOCAB}.*{VOCAB - 1}"),
            ({"logit_bias": {-1: 1.0}}, "logit_bias.*-1"),
            ({"logit_bias": {"abc": 1.0}}, "logit_bias.*abc"),
            ({"logit_bias": {"3.5": 1.0}}, "logit_bias.*3.5"),
            ({"logit_bias": {3: 1e9}}, r"logit_bias\[3\].*100"),
            ({"logit_bias": {3: math.nan}}, r"logit_bias\[3\].*nan"),
        ],
        ids=str,
    )
    def test_bad_params(self, keys, words, llm):
        """Value and range are named; NaN is in no range. sgl-project/sglang#7670, sgl-project/sglang#28153."""
        self.assert_refused(llm, [[5, 6]], keys, words)

    def test_a_minimum_without_a_token_to_reach_it(self, llm):
        """Every token ends the answer, by the request's wish or as EOS, and none may before that many."""
        eos = llm.requests.eos_token_ids
        others = sorted({*range(VOCAB)} - eos)
        keys: dict[str, Any] = {"max_tokens": 3, "min_tokens": 2, "stop_token_ids": others}
        words = rf"min_tokens is 2.* {VOCAB} tokens .*leave min_tokens out, or some of stop_token_ids"
        self.assert_refused(llm, [[5, 6]], keys, words)
        self.assert_refused(llm, [[5, 6]], {**keys, "stop_token_ids": [*range(VOCAB)], "ignore_eos": True}, words)
        (some_left,) = llm.generate([[5, 6]], SamplingParams(**keys, ignore_eos=True))
        assert set(some_left.token_ids[:2]) <= eos
        (no_minimum,) = llm.generate([[5, 6]], SamplingParams(max_tokens=3, stop_token_ids=others))
        assert (len(no_minimum.token_ids), no_minimum.finish_reason) == (1, "stop")

    def test_bounds_belong_to_the_range(self, llm):
        edges: list[dict[str, Any]] = [
            {"logit_bias": {0: 100.0, VOCAB - 1: -100}, "stop_token_ids": [0, VOCAB - 1]},
            {"temperature": 0, "top_p": 1, "top_k": 2**70, "min_p": 1, "seed": -(2**63)},
            {"temperature": 1.0, "seed": 2**64 - 1, "top_k": 2**70, "presence_penalty": 2, "frequency_penalty": -2.0},
            {"n": 128, "max_tokens": 1, "temperature": 1.0},
            {"logprobs": 20, "prompt_logprobs": 20, "priority": -5},
        ]
        outputs = llm.generate([[0, VOCAB - 1]] * 5, [SamplingParams(**{"max_tokens": 2, **keys}) for keys in edges])
        assert [o.finish_reason in ("stop", "length") for o in outputs] == [True] * 5
        assert len(outputs[3].outputs) == 128

    def test_wrong_number_or_kind_of_params(self, llm):
        with pytest.raises(ValueError, match=r"2 prompts.*3 SamplingParams"):
            llm.generate([[5], [6]], [SamplingParams()] * 3)
        with pytest.raises(ValueError, match=r"1 prompts.*0 SamplingParams"):
            llm.generate([[5]], [])
        with pytest.raises(TypeError, match="max_tokens.*SamplingParams"):
            llm.generate([[5]], {"max_tokens": 3})
        with pytest.raises(TypeError, match="None.*SamplingParams"):
            llm.generate([[5], [6]], [SamplingParams(), None])

    def test_a_stream_is_refused_at_the_call(self, llm):
        with pytest.raises(ValueError, match="empty"):
            llm.stream([[5], []])

    def assert_refused(self, llm, prompts, keys, words) -> None:
        """An error in the words, nothing of the call done, and the engine as good as before."""
        with pytest.raises((ValueError, TypeError), match=words):
            llm.generate(prompts, SamplingParams(**keys))
        again = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True))[0]
        assert (len(again.token_ids), again.finish_reason) == (2, "length")

    def test_a_broken_row_breaks_alone(self, llm, llm_of, tiny):
        """NaN logits end their own request with an error, and the others go on. vllm-project/vllm#1623."""
        source = tiny("qwen2")
        folder = edited(
            source,
            source.parent / "nan-embedding",
            lambda weights: weights["model.embed_tokens.weight"][499].fill_(math.nan),
        )
        params = [
            SamplingParams(max_tokens=4, temperature=t, seed=1, logprobs=1, ignore_eos=True) for t in (0, 1, 0, 1)
        ]
        prompts = [[5, 6], [7, 499, 8], [499], [9, 10, 11]]
        outputs = llm_of(folder).generate(prompts, params)
        assert [o.finish_reason for o in outputs] == ["length", "error", "error", "length"]
        assert [o.token_ids for o in outputs[1:3]] == [[], []]
        assert all("not finite" in o.outputs[0].error for o in outputs[1:3])
        healthy = llm.generate(prompts, params)
        assert [outputs[i].token_ids for i in (0, 3)] == [healthy[i].token_ids for i in (0, 3)]
        (event,) = llm_of(folder).stream([[499]])
        assert (event.finish_reason, event.text) == ("error", "")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"max_model_len": 0}, "max_model_len.*0.*256"),
            ({"max_model_len": 257}, "max_model_len.*257.*256"),
            ({"max_model_len": 16.0}, "max_model_len.*16.0"),
            ({"dtype": "int8"}, "int8.*bfloat16"),
            ({"device": "gpu"}, "gpu.*cpu"),
            ({"device": "meta"}, "meta.*cpu"),
            *([] if torch.cuda.is_available() else [({"device": "cuda"}, "cuda.*cpu")]),
        ],
        ids=str,
    )
    def test_bad_options(self, options, words, tiny):
        with pytest.raises((ValueError, TypeError), match=words):
            self.llm_class(tiny("qwen2"), **options)


def byte_ids(text: str) -> list[int]:
    """Ids of the one-byte tokens of a text, in the tiny tokenizer."""
    from reference.tiny_tokenizer import tiny_tokenizer
    from stages.s01_forward.tokenizer import unicode_to_byte

    character_of = {byte: character for character, byte in unicode_to_byte().items()}
    return [tiny_tokenizer().get_vocab()[character_of[byte]] for byte in text.encode()]
