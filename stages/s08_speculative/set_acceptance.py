"""For benchmarks: a proposer that knows the answers, and guesses right as often as it is told to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from stages.s02_kv_cache.contiguous_cache import BlockCopy
from stages.s04_continuous_batching.request import Request
from stages.s08_speculative.proposer import Draft


class SetAcceptance:
    """`answers`: what plain decoding gives, token ids by prompt. Each guess is right with probability `rate`.

    Whether it is hangs on the seed, the prompt and the place in the answer alone: the same in every run, and however
    the answer was cut into steps. A wrong guess is another token of the `vocab_size`. Where an answer ends, or a prompt
    is not known, there are no guesses. Raises ValueError for a rate outside of 0 to 1.
    """

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], rate: float, vocab_size: int, seed: int = 0
    ) -> None:
        if not 0 <= rate <= 1:
            raise ValueError(f"the rate of right guesses is {rate}; it must be between 0 and 1")
        self.answers = {tuple(prompt): tuple(answer) for prompt, answer in answers.items()}
        self.numbers = {prompt: number for number, prompt in enumerate(self.answers)}
        self.rate, self.vocab_size, self.seed = rate, vocab_size, seed

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, Draft]:
        """See `Proposer.propose`."""
        drafts = {}
        for request, count in wanted.items():
            prompt, known = tuple(request.generation.prompt_token_ids), len(request.generation.token_ids)
            coming = self.answers.get(prompt, ())[known : known + count]
            if coming:
                places = enumerate(coming, start=known)
                drafts[request] = Draft(tuple(self.guess(prompt, place, token) for place, token in places))
        return drafts

    def guess(self, prompt: tuple[int, ...], place: int, token: int) -> int:
        """The token that comes, or another one."""
        name = f"{self.seed} {self.numbers[prompt]} {place}".encode()
        chance = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") / 2**64
        return token if chance < self.rate else (token + 1) % self.vocab_size

    def copy_blocks(self, pairs: Sequence[BlockCopy]) -> None:
        """It keeps no K/V."""

    def forget(self, request: Request) -> None:
        """It keeps nothing of a request."""
