"""transformers' own continuous batching, started once and given loads: what it takes to start is not counted."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Run = Callable[[Sequence[Sequence[int]], Sequence[int]], list[list[int]]]
PATIENCE = 600.0  # seconds until a request that gives no answer is an error


@contextmanager
def continuous_batching(model: Any, max_tokens: int, max_batch_tokens: int = 2048) -> Iterator[Run]:
    """Inside the block, `run(prompts, output_lens)` gives the greedy answers, each exactly as long as asked for.

    The model's attention is switched to a paged one inside the block, and back at its end.

    Args:
        max_tokens: Tokens that the cache must hold, of all requests together.
        max_batch_tokens: Tokens of one step.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    page = 256
    config = ContinuousBatchingConfig(
        page_size=page, num_blocks=-(-max_tokens // page) + 64, max_batch_tokens=max_batch_tokens,
        allow_block_sharing=False,
    )  # fmt: skip
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max_batch_tokens)

    with model.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=config, block=True, timeout=30, warmup=False
    ) as manager:

        def run(prompts: Sequence[Sequence[int]], output_lens: Sequence[int]) -> list[list[int]]:
            names = [
                manager.add_request(list(prompt), max_new_tokens=length)
                for prompt, length in zip(prompts, output_lens, strict=True)
            ]
            answers: dict[str, list[int]] = {}
            while len(answers) < len(names):
                result = manager.get_result(timeout=PATIENCE)
                if result is None or result.error is not None:
                    reason = "no answer came" if result is None else result.error
                    raise RuntimeError(f"transformers' continuous batching failed: {reason}")
                if result.is_finished():
                    answers[result.request_id] = list(result.generated_tokens)
            return [answers[name] for name in names]

        yield run
