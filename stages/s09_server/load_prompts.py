"""What the load generator asks: prompts of random words, or those of a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

# Each is one token, with the space before it, in the vocabularies of SmolLM2, Llama and Qwen.
WORDS = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city community name president team minute idea body information back parent
face others level office door health person art war history party result change morning reason research girl guy moment
air teacher force education""".split()


@dataclass(frozen=True)
class Question:
    """A text, or the messages of a chat, and how many tokens the answer may have."""

    prompt: str | list[dict[str, Any]]
    max_tokens: int

    def body(self, chat: bool) -> dict[str, Any]:
        """What the endpoint expects. ValueError if it takes a text and there are messages."""
        if not chat:
            if not isinstance(self.prompt, str):
                raise ValueError("messages go to an endpoint .../chat/completions, and this one takes a prompt")
            return {"prompt": self.prompt, "max_tokens": self.max_tokens}
        said = [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt
        return {"messages": said, "max_tokens": self.max_tokens}


@dataclass(frozen=True)
class Lengths:
    """Lengths of random prompts and answers, in words and tokens; each is drawn from mean * (1 ± `spread`)."""

    prompt: int = 128
    answer: int = 32
    spread: float = 0.0
    shared: int = 0  # words that all prompts begin with, on top

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.answer < 1 or self.shared < 0:
            raise ValueError(f"a prompt and an answer need a length of at least 1, a shared part 0, got {self}")
        if not 0 <= self.spread < 1:
            raise ValueError(f"the range ratio must be at least 0 and below 1, got {self.spread}")


def random_questions(count: int, lengths: Lengths, rng: Random) -> list[Question]:
    """Prompts of random common words. A word is one token in most vocabularies; the server's usage has the count."""

    def words(number: int) -> str:
        return " ".join(rng.choices(WORDS, k=number))

    def draw(mean: int) -> int:
        return max(1, rng.randint(round(mean * (1 - lengths.spread)), round(mean * (1 + lengths.spread))))

    shared = words(lengths.shared) + " " if lengths.shared else ""
    return [Question(shared + words(draw(lengths.prompt)), draw(lengths.answer)) for _ in range(count)]


def read_questions(path: Path, count: int | None, default_tokens: int) -> list[Question]:
    """The first `count` lines of a JSONL file, all if None: {"prompt": text} or {"messages": [...]} each.

    A line may set `max_tokens` for its answer; the others get `default_tokens`.

    Raises:
        ValueError: A line that is neither, or fewer lines than `count`; says which line.
    """
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    if not lines or (count is not None and count > len(lines)):
        raise ValueError(f"{path.name} has {len(lines)} prompts, asked for {1 if count is None else count}")
    return [_question(line, f"{path.name}, prompt {n}", default_tokens) for n, line in enumerate(lines[:count], 1)]


def _question(line: str, where: str, default_tokens: int) -> Question:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: {error}") from None
    row = row if isinstance(row, dict) else {}
    prompt, tokens = row.get("messages", row.get("prompt")), row.get("max_tokens", default_tokens)
    if not prompt or not isinstance(prompt, (str, list)):
        raise ValueError(f'{where}: expected {{"prompt": text}} or {{"messages": [...]}}, got {line[:80]}')
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"{where}: max_tokens must be a whole number of at least 1, got {tokens!r}")
    return Question(prompt, tokens)


def bodies(questions: Sequence[Question], chat: bool, fields: dict[str, Any]) -> list[bytes]:
    """The requests as they are sent: made before the clock starts."""
    return [json.dumps({**question.body(chat), **fields}).encode() for question in questions]
