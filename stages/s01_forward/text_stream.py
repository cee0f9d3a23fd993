"""Read later: text as it becomes certain, token by token."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from stages.s01_forward.tokenizer import Tokenizer


class TextStream:
    """Text as it becomes certain: whole characters only, and nothing that may yet turn into a stop string.

    `push` costs the same for every token, however long the text is. `pieces`: all that became certain so far.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # the longest end of the text that begins a stop string
        self.pieces: list[str] = []
        self.stopped_by: str | None = None

    def push(self, token_id: int, stop_allowed: bool = True) -> str:
        """Add a token; returns the text that became certain. Sets `stopped_by` when a stop string is complete.

        Without `stop_allowed` a complete one is plain text, but one that has only begun may still stop a later token.
        """
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        if self._stop:
            text = self._cut(text, stop_allowed)
        self.pieces.append(text)
        return text

    def finish(self) -> str:
        """The rest: what was held back, and an unfinished character as U+FFFD."""
        text, self._held = self._held + self._decoder.decode(b"", final=True), ""
        self.pieces.append(text)
        return text

    def _cut(self, new: str, stop_allowed: bool) -> str:
        """What is held and `new`, up to a stop string that `new` completes; else up to one that has begun."""
        text, held = self._held + new, len(self._held)
        self._held = ""
        # A match that ends in what was held was complete when it might not stop the answer: it is plain text.
        matches = ((text.find(stop, max(held + 1 - len(stop), 0)), stop) for stop in self._stop if stop_allowed)
        found = [match for match in matches if match[0] >= 0]
        if found:
            cut, self.stopped_by = min(found)
        else:
            cut = len(text) - max((held_length(text, stop) for stop in self._stop), default=0)
            self._held = text[cut:]
        return text[:cut]


def held_length(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
