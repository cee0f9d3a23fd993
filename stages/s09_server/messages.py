"""What the processes say to each other: msgspec Structs, packed by MessagePack. Numbers and text only, never code.

The engine knows each answer by a number that is never used twice, so that what comes late for one that has gone away
is told from what is meant for the next. Of a step, one message tells everything.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stages.s01_forward.outputs import FinishReason, TokenLogprob
from stages.s01_forward.sampling_params import SamplingParams


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An array of its fields, the name of its kind first."""


# ---- to the engine ---------------------------------------------------------------------------------------------------


class Add(Message, frozen=True):
    """A checked prompt, and the answers to give: one for each seed, with the numbers `first`, `first + 1`, ..."""

    stream: int  # the number of the first answer of the stream that it belongs to
    first: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seeds: list[int]
    token_limit: int  # new tokens at most, the model's length considered
    grammar: str | None = None  # what the text must follow; see grammar.py

    @property
    def answers(self) -> range:
        """The numbers of its answers."""
        return range(self.first, self.first + len(self.seeds))


class Abort(Message, frozen=True):
    """Nobody wants these answers any more. Those that have ended, or never were, are passed over."""

    answers: list[int]


class AskStatus(Message, frozen=True):
    """Tell what a status page shows."""


class Stop(Message, frozen=True):
    """End the process. Whoever wants answers to be finished first waits for them before."""


# ---- from the engine -------------------------------------------------------------------------------------------------


class EngineInfo(msgspec.Struct, frozen=True):
    """What the API must know of the engine to refuse what it could never do."""

    model: str  # as it was asked for
    folder: str
    vocab_size: int
    max_model_len: int  # tokens, prompt and answer together
    eos_token_ids: list[int]
    num_blocks: int  # that can be held, without the dummy
    block_size: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    speculative: str | None = None


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Now: requests and blocks. Since the start: everything else."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks: int = 0
    preemptions: int = 0
    queried_tokens: int = 0  # looked up in the prefix cache
    hit_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    tokens: int = 0  # sampled
    failed_steps: int = 0


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """Told once for each answer, with its first token; alone, if it wants no token."""

    answer: int
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprob | None] | None


class Ready(Message, frozen=True):
    """The engine takes requests from now on."""

    info: EngineInfo


class Step(Message, frozen=True):
    """What one step brought, as columns: `tokens[i]` belongs to the answer `answers[i]`; several may be of one."""

    answers: list[int]
    tokens: list[int]
    logprobs: dict[int, TokenLogprob]  # by place in the columns, of those who asked
    begun: list[Begun]
    errors: dict[int, str]  # answers that have ended with an error
    stats: EngineStats
    complete: list[int] = []  # places in the columns: tokens after which their grammar allows no other


class Status(Message, frozen=True):
    """What a status page shows."""

    status: dict[str, Any]


class Dead(Message, frozen=True):
    """The engine ends, and why. `fault` is ours: False for a model or an option that the caller got wrong."""

    error: str
    fault: bool


# ---- to the API ------------------------------------------------------------------------------------------------------


class AnswerEvent(msgspec.Struct, frozen=True, array_like=True):
    """What became of one answer: tokens, the text that became certain with them, how it ended."""

    stream: int
    answer: int  # which of the stream: prompt number * n + index
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0  # of the prompt; told with the first event
    prompt_logprobs: list[TokenLogprob | None] | None = None  # told with the first event


class Texts(Message, frozen=True):
    """A `Step` with its tokens turned to text."""

    events: list[AnswerEvent]
    stats: EngineStats


ToEngine = Add | Abort | AskStatus | Stop
FromEngine = Ready | Step | Texts | Status | Dead

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
