"""Log-probabilities as the OpenAI API writes them: by text, and a token's text may be half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from stages.s01_forward.outputs import TokenLogprob
from stages.s01_forward.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON does not have

Entry = dict[str, Any]


class TokenTexts:
    """What tokens look like alone. Special tokens are shown; an unfinished character is U+FFFD, its bytes are exact."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.known: dict[int, tuple[str, list[int]]] = {}

    def of(self, token_id: int) -> tuple[str, list[int]]:
        """Its text and its bytes."""
        known = self.known.get(token_id)
        if known is None:
            raw = self.tokenizer.token_bytes(token_id, skip_special=False)
            known = self.known[token_id] = (raw.decode("utf-8", errors="replace"), list(raw))
        return known

    def entry(self, token_id: int, logprob: float) -> Entry:
        """One token in the form of chat."""
        text, raw = self.of(token_id)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": raw}

    def for_chat(self, scores: Iterable[TokenLogprob]) -> list[Entry]:
        """One entry per token, with its alternatives in descending order. Different tokens of equal text all stay."""
        return [
            self.entry(score.token_id, score.logprob)
            | {"top_logprobs": [self.entry(token_id, logprob) for token_id, logprob in score.top]}
            for score in scores
        ]


class CompletionScores:
    """The older form, of /v1/completions: columns, and alternatives in a dict by text.

    Where two tokens look the same, the dict keeps the likelier. The chosen token is in it too. `text_offset` counts the
    characters before each token, of the echoed prompt if there is one, and of the answer over all parts of a stream.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self.texts = texts
        self.offset = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def prompt(self, text: str, token_ids: Sequence[int], scores: Sequence[TokenLogprob | None]) -> Entry:
        """The echoed prompt; nothing precedes its first token, so that has no score."""
        columns = self.columns(list(zip(token_ids, scores, strict=True)), text)
        self.offset = len(text)
        self.decoder.reset()
        return columns

    def answer(self, scores: Sequence[TokenLogprob]) -> Entry:
        """The next tokens of the answer."""
        return self.columns([(score.token_id, score) for score in scores])

    def columns(self, scored: Sequence[tuple[int, TokenLogprob | None]], prompt: str | None = None) -> Entry:
        """The columns of some tokens. A prompt's special tokens are characters if they were written in its text."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for token_id, score in scored:
            text, raw = self.texts.of(token_id)
            tokens.append(text)
            offsets.append(self.offset)
            logprobs.append(None if score is None else max(score.logprob, LEAST))
            tops.append(None if score is None else self.by_text(score))
            if self.texts.tokenizer.token_bytes(token_id):
                piece = self.decoder.decode(bytes(raw))
                starts = prompt is not None and not self.offset and not prompt.startswith(" ")
                self.offset += len(piece.removeprefix(" ") if starts else piece)  # SentencePiece puts a space first
            elif prompt is not None and prompt.startswith(text, self.offset):
                self.offset += len(text)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def by_text(self, score: TokenLogprob) -> dict[str, float]:
        """Alternatives and the token itself, the likelier of two that look the same."""
        best: dict[str, float] = {}
        for token_id, logprob in (*score.top, (score.token_id, score.logprob)):
            text = self.texts.of(token_id)[0]
            best[text] = max(logprob, best.get(text, LEAST))
        return best
