"""The text side: whatever the steps and however slow the reader, the events together are the answer."""

import asyncio
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.tiny_tokenizer import tiny_tokenizer
from stages.s01_forward.inputs import RequestBuilder
from stages.s01_forward.outputs import TokenLogprob
from stages.s01_forward.sampling_params import SamplingParams
from stages.s01_forward.tokenizer import Tokenizer, unicode_to_byte
from stages.s09_server.answer_stream import AnswerStream
from stages.s09_server.answers import LARGEST, Answers, add_message, generations_of
from stages.s09_server.messages import Add, AnswerEvent, Begun, EngineStats, Step, decode_to_engine, encode

EOS, KNOWN, LIMIT = 0, 500, 10_000


class Pieces:
    """A tokenizer as SentencePiece writes text: words with their space before them, and bytes."""

    words = [b"", b" Hello", b" new", b" world", b" ", b"  ", b"\n", *(bytes([byte]) for byte in range(256))]
    eos_token_ids = frozenset([EOS])

    def token_bytes(self, token_id: int) -> bytes:
        return self.words[token_id] if token_id < len(self.words) else b""

    def ids(self, text: str) -> list[int]:
        return [7 + byte for byte in text.encode()]


@cache
def byte_ids() -> dict[int, int]:
    """The tokens of one byte of the tiny tokenizer."""
    vocabulary, character_of = tiny_tokenizer().get_vocab(), {b: c for c, b in unicode_to_byte().items()}
    return {byte: vocabulary[character_of[byte]] for byte in range(256)}


@pytest.fixture(scope="module")
def tokenizer(tiny) -> Tokenizer:
    return Tokenizer(tiny("qwen2"))


class Side:
    """The text side of one prompt, n answers; its events go into a stream, that is read now and then."""

    def __init__(self, tokenizer: Any, n: int = 1, limit: int = LIMIT, first: int = 4, **params: Any) -> None:
        message = Add(first, first, [5], SamplingParams(max_tokens=limit, n=n, **params), [0] * n, limit)
        self.answers, self.surplus, self.first = Answers(), list[int](), first
        self.for_engine = self.answers.add(message, generations_of(message, [EOS], tokenizer))
        self.stream = AnswerStream(range(first, first + n), lambda stream: None)
        self.heard: list[AnswerEvent] = []

    def take(self, *tokens: tuple[int, int], begun: Any = (), errors: Any = None, logprobs: Any = None) -> None:
        numbers, ids = [number for number, _ in tokens], [token for _, token in tokens]
        step = Step(numbers, ids, logprobs or {}, list(begun), errors or {}, EngineStats())
        events, surplus = self.answers.take(step)
        self.surplus += surplus
        for event in events:
            self.stream.put(event)

    def read(self) -> list[AnswerEvent]:
        news = asyncio.run(asyncio.wait_for(self.stream.next(), 2.0))
        self.heard += news
        return news

    def told(self, answer: int = 0) -> tuple[list[int], str, str | None]:
        """Tokens, text, and how it ended, as the reader has heard it."""
        mine = [event for event in self.heard if event.answer == answer]
        reasons = [event.finish_reason for event in mine if event.finish_reason]
        assert len(reasons) <= 1 and (not reasons or mine[-1].finish_reason), "an end is told once, and last"
        return [t for e in mine for t in e.token_ids], "".join(e.text for e in mine), (reasons or [None])[0]


def tell(tokenizer: Any, ids: list[int], rng: random.Random | None = None, **params: Any) -> Side:
    """An answer of these tokens, several in a step at times, to a reader who is late at times."""
    side, place, rng = Side(tokenizer, **params), 0, rng or random.Random(0)
    while place < len(ids) and side.answers.open:
        count = rng.choice((1, 1, 2, 5))
        side.take(*((4, token) for token in ids[place : place + count]))
        place += count
        if side.stream.pending and rng.random() < 0.4:
            side.read()
    if side.stream.pending:
        side.read()
    return side


# ---- text ------------------------------------------------------------------------------------------------------------


def test_characters_of_several_tokens_come_whole(tokenizer):
    """antonellof/ferrox#124. Cut by the cap, the rest is told once."""
    ids = [byte_ids()[byte] for byte in "A😀é\ufffd!".encode()]
    side = Side(tokenizer)
    for token in [*ids, EOS]:
        side.take((4, token))
        side.read()
    assert [event.text for event in side.heard if event.text] == ["A", "😀", "é", "\ufffd", "!"]
    for limit in (1, 2, 3, 4):
        assert tell(tokenizer, ids[:limit], limit=limit).told() == (ids[:limit], "A" + "\ufffd" * (limit > 1), "length")


@pytest.mark.parametrize(
    ("text", "limit", "expected", "reason"),
    [("Hi?\n", LIMIT, "Hi?\n", "stop"), ("Hi\n\n", 4, "Hi\n\n", "length"), ("?\n\nQ: x", LIMIT, "?", "stop")],
)
def test_what_is_held_back_is_not_lost(text, limit, expected, reason, tokenizer):
    """At EOS, at the cap, and all of a stop string in a token that begins earlier. ggml-org/llama.cpp#9867."""
    for ids in ([byte_ids()[byte] for byte in text.encode()], tokenizer.encode(text)):
        side = tell(tokenizer, [*ids, EOS], limit=min(limit, len(ids) if limit < LIMIT else limit), stop=("\n\nQ:",))
        assert side.told()[1:] == (expected, reason)


def test_spaces_between_words_stay():
    """huggingface/transformers#28776. A completion begins with its space; the prompt is before it."""
    assert tell(Pieces(), [1, 2, 3, 4, 4, 4, 5, EOS]).told()[1] == " Hello new world     "


def test_special_tokens_and_the_end_token_are_no_text(tokenizer):
    """As an end, and as a token that ends nothing; no token at all is none either. kserve/kserve#4490."""
    hi = [byte_ids()[byte] for byte in b"Hi"]
    assert tell(tokenizer, [*hi, EOS]).told() == ([*hi, EOS], "Hi", "stop")
    side = tell(tokenizer, [*hi, EOS, 1, 505, 511, *hi], limit=8, ignore_eos=True)
    assert side.told() == ([*hi, EOS, 1, 505, 511, *hi], "HiHi", "length")


def cut_at(stops: list[str], pieces: list[bytes]) -> tuple[str, int]:
    """By the definition: the text before the first stop string, once a token completes one; and how many tokens."""
    for count in range(1, len(pieces) + 1):
        text = b"".join(pieces[:count]).decode(errors="ignore")
        if found := [text.index(stop) for stop in stops if stop in text]:
            return text[: min(found)], count
    return b"".join(pieces).decode(errors="replace"), len(pieces)


LETTERS = "ab\n é\u0301漢字😀👨\u200d👩e\u0308"


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(LETTERS, max_size=40),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3),
    seed=st.integers(0, 2**32),
    how=st.sampled_from(["bytes", "tokens", "pieces"]),
)
def test_all_events_together_are_the_whole_text(text, stops, seed, how, tokenizer):
    """Emoji, CJK, marks that combine, stop strings anywhere; steps and readers at random."""
    speaker: Any = Pieces() if how == "pieces" else tokenizer
    ids = speaker.ids(text) if how == "pieces" else tokenizer.encode(text)
    if how == "bytes":
        ids = [byte_ids()[byte] for byte in text.encode()]
    pieces = [speaker.token_bytes(token) for token in ids]
    expected, count = cut_at(stops, pieces)
    side = tell(speaker, [*ids, EOS], random.Random(seed), stop=stops)
    stopped = any(stop in b"".join(pieces).decode() for stop in stops)
    assert side.told() == ([*ids, EOS][: count + (not stopped)], expected, "stop")
    assert side.surplus == ([4] if stopped else []), "the engine hears of a stop string, and of nothing else"
    assert "".join(event.text for event in side.heard).count("\ufffd") == 0
    assert not side.answers.open


def test_a_reader_may_be_as_late_as_it_likes(tokenizer):
    """Two answers, thousands of tokens, one event for each; with scores, and all that is told once."""
    side = Side(tokenizer, n=2, logprobs=0, ignore_eos=True)
    text, score = "漢字😀 " * 400, TokenLogprob(7, -1.0, 1, ())
    ids = [byte_ids()[byte] for byte in text.encode()]
    side.take(begun=[Begun(4, 16, [None, score]), Begun(5, 32, None)])
    for token in ids:
        side.take((5, token), (4, token), logprobs={0: score, 1: score})
    side.take(errors={5: "out of memory"})
    second, first = side.read()
    assert [(event.answer, event.text, event.token_ids) for event in (first, second)] == [
        (0, text, ids),
        (1, text, ids),
    ]
    assert (len(first.logprobs), len(second.logprobs)) == (len(ids), len(ids))
    assert [(event.num_cached_tokens, event.prompt_logprobs) for event in (first, second)] == [
        (16, [None, score]),
        (32, None),
    ]
    assert (first.finish_reason, second.finish_reason, second.error) == (None, "error", "out of memory")


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_who_wants_no_token_and_cannot_even_be_scored(tokenizer):
    """Its generation has ended before it began; what it hears of is the error."""
    side = Side(tokenizer, limit=0, prompt_logprobs=0)
    side.take(begun=[Begun(4, 0, None)], errors={4: "the logits are not finite"})
    (event,) = side.read()
    assert (event.finish_reason, event.error) == ("error", "the logits are not finite")
    assert (side.answers.open, side.surplus) == ({}, [])


def test_tokens_and_the_end_by_an_error_in_one_step(tokenizer):
    """The tokens of the step before, and the step that failed (stage 07)."""
    side = Side(tokenizer)
    side.take((4, byte_ids()[65]), begun=[Begun(4, 16, None)], errors={4: "MemoryError"})
    (event,) = side.read()
    assert (event.text, event.finish_reason, event.error, event.num_cached_tokens) == ("A", "error", "MemoryError", 16)


def test_nothing_comes_after_a_drop(tokenizer):
    side = Side(tokenizer, n=3)
    assert side.answers.drop([5, 5, 99]) == [5]
    side.take((4, 9), (5, 9), (6, 9), begun=[Begun(5, 0, None)], errors={5: "late"})
    assert sorted(event.answer for event in side.read()) == [0, 2]
    assert sorted(side.answers.open) == [4, 6]


def test_tokens_after_a_stop_string_are_nobodys(tokenizer):
    """Guesses that stood (stage 08), and steps that were under way."""
    side = Side(tokenizer, stop=("B",))
    side.take(*((4, byte_ids()[byte]) for byte in b"ABC"))
    side.take((4, byte_ids()[68]))
    side.read()
    assert side.told() == ([byte_ids()[65], byte_ids()[66]], "A", "stop")
    assert side.surplus == [4]


# ---- what the engine is told -----------------------------------------------------------------------------------------


def build(tokenizer: Any = None, **params: Any) -> Add:
    (request,) = RequestBuilder(512, 256, frozenset([EOS]), tokenizer).build([[5, 6]], SamplingParams(**params))
    return add_message(request, 7, 3, None)


def test_stop_strings_are_not_the_engines_affair(tokenizer):
    side = Side(tokenizer, stop=("a", "b"), stop_token_ids=(9,))
    assert (side.for_engine.params.stop, side.for_engine.params.stop_token_ids) == ((), (9,))
    assert next(iter(side.answers.open.values())).generation.params.stop == ("a", "b")


def test_counts_without_bounds_fit_into_a_message():
    """They are in the range, and mean no more than any large number does."""
    message = build(max_tokens=2**80, min_tokens=2**70, top_k=2**64)
    told = decode_to_engine(encode(message))
    assert isinstance(told, Add) and told == message
    assert (told.params.max_tokens, told.params.min_tokens, told.params.top_k) == (LARGEST, LARGEST, LARGEST)
    assert told.token_limit == 254
    ordinary = SamplingParams(max_tokens=None, top_k=5)
    assert build(max_tokens=None, top_k=5).params == replace(ordinary)


def test_each_answer_has_its_seed_and_number():
    message = build(n=3, seed=1)
    assert (message.stream, list(message.answers), len(set(message.seeds))) == (3, [7, 8, 9], 3)
    generations = generations_of(message, [EOS], None)
    assert [(g.request, g.index, g.seed) for g in generations] == [(7, i, message.seeds[i]) for i in range(3)]
