"""Text as it becomes certain, and the end of an answer: one token at a time, without a model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.s01_forward.generation import Generation
from stages.s01_forward.outputs import SampledToken, TokenEvent
from stages.s01_forward.sampling_params import SamplingParams
from stages.s01_forward.text_stream import TextStream, held_length

EOS = 99


class Words:
    """A tokenizer whose token i is the i-th of these byte strings."""

    def __init__(self, *words: bytes | str) -> None:
        self.words = [word.encode() if isinstance(word, str) else word for word in words]

    def token_bytes(self, token_id: int) -> bytes:
        return self.words[token_id] if token_id < len(self.words) else b""


def pushed(words: list[bytes | str], stop: list[str] | None = None) -> tuple[list[str], TextStream]:
    stream = TextStream(Words(*words), stop or [])
    deltas = []
    for i in range(len(words)):
        deltas.append(stream.push(i))
        if stream.stopped_by is not None:
            break
    return deltas, stream


def answer(words: list[bytes | str], tokens: list[int], **keys) -> tuple[list[TokenEvent], Generation]:
    params = SamplingParams(**{"max_tokens": 50, **keys})
    generation = Generation(
        [0], params, seed=0, token_limit=params.max_tokens, eos_token_ids={EOS}, tokenizer=Words(*words)
    )
    events = []
    for token_id in tokens:
        events.append(generation.append(SampledToken(token_id)))
        if generation.finish_reason:
            break
    return events, generation


# ---- characters ------------------------------------------------------------------------------------------------------


def test_bytes_become_whole_characters():
    """antonellof/ferrox#124."""
    deltas, stream = pushed([bytes([b]) for b in "A😀é".encode()])
    assert deltas == ["A", "", "", "", "😀", "", "é"]
    assert stream.finish() == ""


def test_an_unfinished_character_is_replaced_once():
    deltas, stream = pushed([b"A", b"\xf0", b"\x9f"])
    assert deltas == ["A", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_a_real_replacement_character_passes():
    """It is three good bytes, and must not stall the stream. antonellof/ferrox#124."""
    assert pushed(["a", "\ufffd", "b"])[0] == ["a", "\ufffd", "b"]
    assert pushed([b"\xef", b"\xbf", b"\xbd", b"b"])[0] == ["", "", "\ufffd", "b"]


def test_broken_bytes_do_not_swallow_what_follows():
    assert "".join(pushed([b"\xf0", b"a", b"\xff", b"b"])[0]) == b"\xf0a\xffb".decode(errors="replace")


# ---- stop strings ----------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.text(alphabet="ab\né", min_size=1, max_size=3), max_size=12),
    stop=st.lists(st.text(alphabet="ab\né", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_at_the_first_match(words, stop):
    """Against a search of the whole text after every token, over all ways to cut tokens."""
    text, expected, by = "", None, None
    for word in words:
        text += word
        found = [(text.index(s), s) for s in stop if s in text]
        if found:
            expected, by = text[: min(found)[0]], min(found)[1]
            break
    deltas, stream = pushed(list(words), stop)
    if by is None:
        deltas.append(stream.finish())
    assert "".join(deltas) == (text if by is None else expected)
    assert stream.stopped_by == by


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.text(alphabet="ab", min_size=1, max_size=2), min_size=1, max_size=10),
    stop=st.text(alphabet="ab", min_size=1, max_size=4),
)
def test_no_more_is_held_back_than_may_become_a_stop_string(words, stop):
    deltas, stream = pushed(list(words), [stop])
    if stream.stopped_by is None:
        held = stream.finish()
        assert stop.startswith(held)
        assert len(held) < len(stop)
        text = "".join(deltas) + held
        longest = max(n for n in range(len(stop)) if n == 0 or text.endswith(stop[:n]))
        assert len(held) == longest


def test_length_that_is_held():
    assert [held_length(text, "\n\nQ:") for text in ("", "a", "a\n", "a\n\n", "a\n\nQ", "a\n\nQ:", "\n\n\n")] == [
        0, 0, 1, 2, 3, 0, 2
    ]  # fmt: skip
    assert held_length("ab", "b") == 0, "a stop string of one character never waits"


@pytest.mark.parametrize(
    ("words", "tokens", "limit", "expected", "reason"),
    [
        (["Hi", "?", "\n"], [0, 1, 2, EOS], 50, "Hi?\n", "stop"),
        (["Hi", "?", "\n", "\n"], [0, 1, 2, 3], 4, "Hi?\n\n", "length"),
        (["Hi", "?\n\nQ: x"], [0, 1], 50, "Hi?", "stop"),
        (["Hi", "?\n\nQ: x"], [0, 1], 2, "Hi?", "stop"),
    ],
)
def test_held_text_at_the_end(words, tokens, limit, expected, reason):
    """Released by an end token and by the cap; cut when it was a stop string. ggml-org/llama.cpp#9867."""
    events, generation = answer(words, tokens, stop=["\n\nQ:"], max_tokens=limit)
    assert "".join(event.text for event in events) == generation.output().text == expected
    assert events[-1].finish_reason == generation.output().finish_reason == reason


# ---- the end of an answer --------------------------------------------------------------------------------------------


def test_stop_before_cap():
    """STOP as fourth token with a cap of 4 is a stop, with a cap of 2 the cap comes first. sgl-project/sglang#31599."""
    for limit, tokens, reason in ((4, [0, 1, 2], "stop"), (3, [0, 1, 2], "stop"), (2, [0, 1], "length")):
        _, generation = answer(["a", "b", "S", "c", "d"], [0, 1, 2, 3, 4], max_tokens=limit, stop_token_ids=[2])
        output = generation.output()
        assert (output.token_ids, output.text, output.finish_reason) == (tokens, "ab", reason)


def test_stop_reason():
    assert answer(["a"], [0, EOS])[1].output().stop_reason == EOS
    assert answer(["a", "b"], [0, 1], stop="b")[1].output().stop_reason == "b"
    assert answer(["a", "b"], [0, 1], max_tokens=2)[1].output().stop_reason is None


def test_the_ended_answer_takes_no_token():
    _, generation = answer(["a"], [0, EOS])
    with pytest.raises(ValueError, match=r"has ended \(stop\)"):
        generation.append(SampledToken(0))


def test_ignore_eos():
    _, generation = answer(["a", "b"], [0, EOS, 1], ignore_eos=True, max_tokens=3)
    output = generation.output()
    assert (output.token_ids, output.text, output.finish_reason) == ([0, EOS, 1], "ab", "length")


def test_an_error_ends_the_answer_and_keeps_its_text():
    generation = Generation([0], SamplingParams(stop="xy"), seed=0, token_limit=9, tokenizer=Words("a", "x"))
    generation.append(SampledToken(0))
    generation.append(SampledToken(1))
    event = generation.append(SampledToken(-1, error="broken"))
    output = generation.output()
    assert (event.finish_reason, event.text) == ("error", "x")
    assert (output.text, output.token_ids, output.error) == ("ax", [0, 1], "broken")


def test_stop_string_that_begins_before_min_tokens():
    """Complete before: text. Complete after: a stop, and its beginning is not shown."""
    words = ["a", "b", "c", "b", "c"]
    for minimum, expected in ((0, "a"), (3, "a"), (4, "abca"), (5, "abca")):
        _, generation = answer([*words[:3], "a", *words[1:3]], [0, 1, 2, 3, 4, 5], stop="bc", min_tokens=minimum)
        assert generation.output().text == expected


def test_what_was_complete_before_min_tokens_never_stops():
    """Not even when another stop string holds it back; but what a later token completes does."""
    for words, stop, text, by in (
        (["a", "b", "c", "d"], ["b", "abZ"], "abcd", None),
        (["a", "b", b"\xc3", b"\xa9"], ["b", "abZ"], "abé", None),  # a token that is half a character completes nothing
        (["a", "b", "b", "d"], ["b", "abZ"], "ab", "b"),
        (["b", "b", "b", "d"], ["bb"], "b", "bb"),
        (["a", "b", "Z", "d"], ["b", "abZ"], "", "abZ"),
    ):
        _, generation = answer(words, [0, 1, 2, 3], stop=stop, min_tokens=3, max_tokens=4)
        assert (generation.output().text, generation.output().stop_reason) == (text, by), words


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=8),
    stop=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
    early=st.integers(0, 8),
)
def test_stop_strings_after_min_tokens_against_the_whole_text(words, stop, early):
    """The first match that ends in a token's own text, over all tokens that may stop the answer."""
    whole, expected, by = "", None, None
    stream, deltas = TextStream(Words(*words), stop), []
    for i, word in enumerate(words):
        before, whole = len(whole), whole + word
        ends = [(at, s) for s in stop for at in range(len(whole)) if whole.startswith(s, at) and at + len(s) > before]
        deltas.append(stream.push(i, i >= early))
        if i >= early and ends:
            expected, by = whole[: min(ends)[0]], min(ends)[1]
            break
    if by is None:
        deltas.append(stream.finish())
    assert "".join(deltas) == (whole if by is None else expected)
    assert stream.stopped_by == by


def test_without_a_tokenizer_there_is_no_text():
    generation = Generation([0], SamplingParams(), seed=0, token_limit=1)
    assert generation.append(SampledToken(3)) == TokenEvent(0, 0, 3, "", "length")
