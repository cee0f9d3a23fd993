"""Grammars at work: which tokens the text so far allows. The engine's side of `grammar.py`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.s01_forward.tokenizer import Tokenizer
from stages.s09_server.grammar import limits, llguidance, why

MAX_KNOWN = 64  # grammars that are kept compiled


class GrammarConstraint:
    """Stage 01's `Constraint`: one answer's place in its grammar. `vocab_size`: V, the model's."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self.matcher, self.vocab_size = matcher, vocab_size
        self.error: str | None = None

    def allowed(self) -> Tensor:
        """Which tokens may come next: bool [V], on the CPU. EOS is among them where the text may end."""
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        if self.matcher.is_error():
            self.error = f"the grammar cannot be followed any further: {why(self.matcher)}"
            return torch.zeros(self.vocab_size, dtype=torch.bool)
        return torch.from_numpy(np.unpackbits(bits, count=self.vocab_size, bitorder="little").view(np.bool_))  # [V]

    def accept(self, token_id: int) -> bool:
        """Take the answer's next token. True: the text is complete, nothing can be added."""
        self.matcher.consume_token(token_id)
        return bool(self.matcher.is_stopped() and not self.matcher.is_error())

    def after(self, token_ids: Sequence[int]) -> GrammarConstraint:
        """A copy, some tokens further on; if these are not allowed, nothing is allowed after them."""
        copy = GrammarConstraint(self.matcher.deep_copy(), self.vocab_size)
        copy.matcher.consume_tokens(list(token_ids))
        return copy


class Grammars:
    """Compiles each grammar once, in a thread and without the GIL, so that no step waits for it.

    tokenizer: the model's, whose bytes are the text; None: a model without text has no grammars.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, sorted(eos_token_ids)
        self.known: OrderedDict[str, Future[GrammarConstraint]] = OrderedDict()  # the one used last comes last
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def compile(self, grammar: str) -> Future[GrammarConstraint]:
        """The start of a grammar, for `after` to make copies of; a ValueError if it is none."""
        if grammar not in self.known:
            self.known[grammar] = self.thread.submit(self.compile_now, grammar)
        self.known.move_to_end(grammar)
        if len(self.known) > MAX_KNOWN:
            self.known.popitem(last=False)
        return self.known[grammar]

    def compile_now(self, grammar: str) -> GrammarConstraint:
        """With its first step, which takes longer than those that follow."""
        matcher = llguidance().LLMatcher(self.vocabulary, grammar, limits=limits(), log_level=0)
        start = GrammarConstraint(matcher, self.vocab_size)
        start.allowed()
        if start.error is not None:
            raise ValueError(start.error)
        return start

    @cached_property
    def vocabulary(self) -> Any:
        """The model's tokens as the library wants them: a second's work, done for the first grammar."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer, so its answers cannot follow a grammar")
        vocabulary = Vocabulary(self.tokenizer, self.vocab_size, self.eos_token_ids)
        vocabulary.trie = llguidance().LLTokenizer(vocabulary, eos_token=self.eos_token_ids or None)
        return vocabulary.trie


class Vocabulary:
    """The attributes that llguidance asks a tokenizer for. `tokens`: each one's bytes, [V]; padding has none."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    trie: Any

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else None
        self.special_token_ids = [token_id for token_id in tokenizer.special_ids if token_id < vocab_size]
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]

    def __call__(self, text: str) -> list[int]:
        """How the model would write what the grammar forces; bytes by bytes where its tokenizer adds something."""
        token_ids = self.tokenizer.encode(text, add_special=False)
        known = all(token_id < len(self.tokens) for token_id in token_ids)
        if known and b"".join(self.tokens[token_id] for token_id in token_ids) == text.encode():
            return token_ids
        return list(self.trie.greedy_tokenize(text))
