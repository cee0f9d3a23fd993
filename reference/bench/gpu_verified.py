"""Are the logits Hugging Face's where guesses are verified? For `gpu_speculative.py`, before anything is timed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from reference.bench.gpu_guesses import Speculation
from reference.bench.gpu_logits import ALLOWED, largest_error
from reference.bench.gpu_runs import replaced
from stages.s08_speculative.set_acceptance import SetAcceptance

RIGHT = 0.6  # of the guesses: rows with several that stand, and with some that fall
TOKENS = 8  # of each answer


@contextmanager
def verified_logits(llm: Any) -> Iterator[dict[int, dict[int, torch.Tensor]]]:
    """By request and position: the logits [V] from which steps with guesses took a token."""
    runner, found = llm.engine.runner, dict[int, dict[int, torch.Tensor]]()
    settle = runner.settle

    def recorded(row: Any, logits: torch.Tensor, sampled: list[int]) -> Any:
        given = settle(row, logits, sampled)
        if row.drafts:
            mine = found.setdefault(row.request.id, {})
            mine.update(zip(range(row.span.start, row.span.end), logits[: len(given)].clone().float(), strict=False))
        return given

    with replaced(runner, settle=recorded):
        yield found


def check_verified(spec: Speculation, rows: int, count: int) -> tuple[int, float, float]:
    """Logits of verified steps against Hugging Face's: how many, our largest relative error, and its own in bf16.

    Raises RuntimeError where ours are further from Hugging Face in fp32 than allowed.
    """
    llm, theirs = spec.llm, spec.bench.theirs
    prompts = [list(each[: 3 + number % 8]) for number, each in enumerate(spec.prompts[:rows])]
    with replaced(llm, engine=spec.plain):
        answers = [output.token_ids for output in llm.generate(prompts, spec.params(TOKENS))]
    proposer = SetAcceptance(
        {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}, RIGHT, llm.config.vocab_size
    )
    with spec.guesses(count, 0.0), replaced(llm.engine, proposer=proposer), verified_logits(llm) as found:
        outputs = llm.generate(prompts, spec.params(TOKENS))
    asked = [output.prompt_token_ids + output.token_ids[:-1] for output in outputs]
    exact, rounded = (theirs.logits(asked, TOKENS, dtype) for dtype in (torch.float32, torch.bfloat16))
    pairs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for request, prompt, one, other in zip(sorted(found), prompts, exact, rounded, strict=True):
        places = [(each, position - len(prompt) + 1) for position, each in found[request].items()]
        pairs += [(each[None], one[place][None], other[place][None]) for each, place in places]
    mine, exacts, roundeds = zip(*pairs, strict=True)
    ours, own = largest_error(mine, exacts), largest_error(roundeds, exacts)
    if not ours <= ALLOWED * own:
        raise RuntimeError(
            f"{rows} rows, {count} guesses: the logits of verified steps differ from Hugging Face's in fp32 by "
            f"{ours:.4f}, its own in bf16 by {own:.4f}: more than {ALLOWED} times as much"
        )
    return len(pairs), ours, own
