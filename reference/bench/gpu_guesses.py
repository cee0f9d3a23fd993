"""One model under an engine that guesses and one that cannot, and a timed run of either, for `gpu_speculative.py`."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import torch

from reference.bench.gpu_bench import Bench
from reference.bench.gpu_runs import build, replaced, timed_steps
from reference.bench.workloads import LARGEST_ID
from stages.s01_forward.sampling_params import SamplingParams
from stages.s08_speculative.pace import Pace
from stages.s08_speculative.set_acceptance import SetAcceptance
from stages.s08_speculative.speculative_engine import SpeculationStats

MOST = 8  # guesses per row
PROMPT = 128  # tokens
LOUD = 4.0  # standard deviation of the embedding: more than all layers together add to it


@dataclass(frozen=True)
class Decoding:
    """One run, from the time when all requests had their first token."""

    tokens: int  # that came after the first ones
    seconds: float
    cycles: list[float]  # seconds from the end of each step to the end of the next, without the first and last few
    gpu: list[float]  # seconds of each step on the GPU; empty on a CPU
    stats: SpeculationStats | None

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Speculation:
    """One model, an engine that guesses and one that cannot, over the same weights."""

    def __init__(self, bench: Bench) -> None:
        self.bench, options = bench, bench.options
        self.tokens = options.tokens
        self.llm = build(bench.folder, options, speculative="ngram", num_draft_tokens=MOST, prefix_cache="off")
        self.guessing = self.llm.engine
        self.usual = self.guessing.pace
        rng = Random(2)
        count = max(*options.rows, *options.pays_rows)
        self.prompts = [
            tuple(rng.randint(0, LARGEST_ID) for _ in range(min(PROMPT, 4 * options.tokens))) for _ in range(count)
        ]
        self.answers: dict[tuple[int, ...], list[int]] = {}
        with replaced(self.llm, speculative=None):
            blocks = 2 + count * -(-(len(self.prompts[0]) + max(options.tokens, options.loss_tokens)) // 16)
            self.plain = self.llm.build_engine(blocks, 16, 0)

    def learn(self) -> None:
        """What plain decoding answers, for the longest run."""
        longest = max(self.tokens, self.bench.options.loss_tokens)
        with replaced(self.llm, engine=self.plain):
            outputs = self.llm.generate([list(each) for each in self.prompts], self.params(longest))
        self.answers = {prompt: output.token_ids for prompt, output in zip(self.prompts, outputs, strict=True)}

    @staticmethod
    def params(tokens: int) -> SamplingParams:
        """Greedy."""
        return SamplingParams(max_tokens=tokens, ignore_eos=True)

    @contextmanager
    def guesses(self, count: int, rate: float, pace: Pace | None = None) -> Iterator[None]:
        """The engine inside the block: `count` guesses per row and step, none for the plain engine.

        pace: when it pauses; None: never.
        """
        with ExitStack() as stack:
            if not count:
                stack.enter_context(replaced(self.llm, engine=self.plain))
            else:
                proposer = SetAcceptance(self.answers, rate, self.llm.config.vocab_size)
                always = Pace(max_rows=len(self.prompts), least_rate=0.0)
                stack.enter_context(replaced(self.guessing.runner, most=count))
                stack.enter_context(
                    replaced(self.guessing, proposer=proposer, pace=pace or always, stats=SpeculationStats())
                )
            yield

    def decode(self, rows: int, count: int, rate: float, pace: Pace | None = None, tokens: int = 0) -> Decoding:
        """The first `rows` prompts at once. Raises RuntimeError for ids that are not plain decoding's."""
        tokens, prompts = tokens or self.tokens, self.prompts[:rows]
        with self.guesses(count, rate, pace):
            engine = self.llm.engine
            with timed_steps(self.llm) as steps, gpu_times(engine.runner) as gpu:
                start = time.perf_counter()
                outputs = self.llm.generate([list(each) for each in prompts], self.params(tokens))
                seconds = time.perf_counter() - start
            stats = engine.stats if count else None
        for prompt, output in zip(prompts, outputs, strict=True):
            if output.token_ids != self.answers[prompt][:tokens]:
                same = [a == b for a, b in zip(output.token_ids, self.answers[prompt], strict=False)]
                raise RuntimeError(
                    f"{rows} rows, {count} guesses: token {same.index(False)} of an answer is not plain decoding's"
                )
        first = max(output.timings.first_token for output in outputs)
        cycles = [later - earlier for (_, earlier), (_, later) in pairwise(steps)]
        return Decoding(rows * (tokens - 1), seconds - first, middle(cycles), middle(gpu()), stats)

    def warm_up(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Capture the graphs of these steps."""
        for number in rows:
            for count in counts:
                self.decode(number, count, 0.0, tokens=min(12, self.tokens))


def middle(times: list[float]) -> list[float]:
    """Without the first and the last few, which belong to prompts and to answers that end; all if there are few."""
    return times[4:-3] if len(times) > 12 else times


@contextmanager
def gpu_times(runner: Any) -> Iterator[Callable[[], list[float]]]:
    """A function that tells the seconds of each step on the GPU, from its first operation to its last."""
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    if runner.state.flat.device.type != "cuda":
        yield list
        return
    run = runner.run

    def timed(*arguments: Any) -> Any:
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        outputs = run(*arguments)
        pair[1].record()
        pairs.append(pair)
        return outputs

    def seconds() -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in pairs]

    with replaced(runner, run=timed):
        yield seconds


@torch.no_grad()
def make_certain(model: Any, seed: int = 0) -> None:
    """New embedding and head, in place: after each token one other is far more likely than the rest.

    The embedding is louder than what the layers add, and the head's row of a token is the embedding of the one before
    it in a cycle through the vocabulary. (Of a model with one matrix for both, each token is followed by itself.)
    """
    embedding, head = model.embed_tokens.weight, model.lm_head.weight
    generator = torch.Generator(embedding.device).manual_seed(seed)
    embedding.normal_(0.0, LOUD, generator=generator)
    if head.data_ptr() != embedding.data_ptr():
        head.copy_(embedding.roll(1, 0)).mul_(head.shape[1] ** -0.5 / LOUD)
