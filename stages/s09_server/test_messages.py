"""What the processes say to each other: all of it arrives as it was, and nothing else is taken for it."""

import math
from dataclasses import replace

import msgspec
import pytest

from stages.s01_forward.outputs import TokenLogprob
from stages.s01_forward.sampling_params import SamplingParams
from stages.s09_server.engine_process import EngineSettings
from stages.s09_server.link import pack_settings
from stages.s09_server.messages import (
    Abort,
    Add,
    AnswerEvent,
    AskStatus,
    Begun,
    Dead,
    EngineInfo,
    EngineStats,
    Ready,
    Status,
    Step,
    Stop,
    Texts,
    decode_from_engine,
    decode_to_engine,
    encode,
)

SCORE = TokenLogprob(7, -0.5, 2, ((3, -0.25), (7, -math.inf)))
PARAMS = SamplingParams(
    max_tokens=None, min_tokens=3, temperature=1, top_k=2**63 - 1, logit_bias={5: -100, 511: 2.5}, seed=2**64 - 1,
    n=2, stop=["\n\n", "😀"], stop_token_ids=[0, 1], logprobs=0, prompt_logprobs=20, cache_salt="é", priority=-5,
)  # fmt: skip
TO_ENGINE = [
    Add(3, 4, [1, 2, 3], PARAMS, [-(2**63), 2**63 - 1], 9, "root ::= [0-9]"),
    Add(0, 0, [1], SamplingParams(), [0], 0),
    Abort([1, 2**63]),
    AskStatus(),
    Stop(),
]
FROM_ENGINE = [
    Ready(EngineInfo("demo", "/a folder/é", 512, 256, [0, 2], 9, 16, 8, 64, "float32", "cpu", "ngram")),
    Step([4, 4, 5], [1, 2, 3], {0: SCORE, 2: SCORE}, [Begun(4, 16, [None, SCORE]), Begun(5, 0, None)], {6: "no"},
         EngineStats(*range(12))),
    Texts([AnswerEvent(3, 1, [1], "é", [SCORE], "stop", "\n", None, 16, [None]), AnswerEvent(3, 0, [], "")],
          EngineStats()),
    Status({"steps": [{"rows": [[7, "decode", 1]]}], "uptime": 0.5}),
    Dead("MemoryError: no", fault=True),
]  # fmt: skip


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda m: type(m).__name__)
def test_to_the_engine(message):
    assert decode_to_engine(encode(message)) == message
    with pytest.raises(msgspec.ValidationError):
        decode_from_engine(encode(message))


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda m: type(m).__name__)
def test_from_the_engine(message):
    assert decode_from_engine(encode(message)) == message
    with pytest.raises(msgspec.ValidationError):
        decode_to_engine(encode(message))


def test_params_arrive_checked_and_of_the_same_kinds():
    """Tuples stay tuples, the keys of a bias numbers; what is out of range is refused here, too."""
    params = decode_to_engine(encode(TO_ENGINE[0])).params
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("\n\n", "😀"), (0, 1), {5: -100.0, 511: 2.5})
    hot, not_a_number = map(msgspec.msgpack.encode, (999_999.5, math.nan))
    frame = encode(replace_params(temperature=999_999.5))
    assert hot in frame
    broken = frame.replace(hot, not_a_number)
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        decode_to_engine(broken)


def replace_params(**keys) -> Add:
    return msgspec.structs.replace(TO_ENGINE[1], params=replace(SamplingParams(), **keys))


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", b"\x90", encode(TO_ENGINE[0])[:-1], msgspec.msgpack.encode(["Step"]), msgspec.msgpack.encode({}),
     msgspec.msgpack.encode(["Launch", "missiles"]), msgspec.msgpack.encode(["Abort", ["all"]]), b"\x91" * 5000],
    ids=lambda frame: repr(frame[:12]),
)  # fmt: skip
def test_what_is_no_message(frame):
    for decode in (decode_to_engine, decode_from_engine):
        with pytest.raises((msgspec.MsgspecError, RecursionError)):
            decode(frame)


def test_text_that_is_none():
    """Half of a surrogate pair has no UTF-8. Whoever sends it hears so, as of any other bad value."""
    with pytest.raises(ValueError, match="surrogates"):
        encode(replace_params(cache_salt="\ud83d"))


def test_the_numbers_of_the_answers():
    assert list(TO_ENGINE[0].answers) == [4, 5]


def test_a_million_token_ids():
    """At a few bytes each."""
    message = Add(0, 0, [151_000] * 1_000_000, SamplingParams(), [0], 9)
    frame = encode(message)
    assert len(frame) < 5_100_000
    assert decode_to_engine(frame).prompt_token_ids == message.prompt_token_ids


def test_a_step_costs_a_few_bytes_a_token():
    count = 256
    frame = encode(Step(list(range(10**6, 10**6 + count)), [50_000] * count, {}, [], {}, EngineStats()))
    assert len(frame) < 10 * count


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_settings_that_json_cannot_tell(value):
    """They would arrive as None, which is another option's value or the default."""
    with pytest.raises(ValueError, match=f"kv_cache_mb is {value}; it must be a finite number"):
        EngineSettings("demo", {"kv_cache_mb": value})
    with pytest.raises(ValueError, match=f"dry_run_step_ms is {value}"):
        EngineSettings("demo", dry_run=True, dry_run_step_ms=value)
    settings = EngineSettings("demo", {"kv_cache_mb": 0.5, "max_chunk": None}, True, 2.5)
    assert msgspec.json.decode(pack_settings(settings), type=EngineSettings) == settings
