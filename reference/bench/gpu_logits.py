"""Are the logits of an engine Hugging Face's? Taken from the steps that are timed: scheduler, paged cache, graphs.

Random weights make a wrong engine as fast as a right one, so a figure counts only after this check.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from reference.bench.gpu_runs import forget, replaced
from reference.bench.workloads import LARGEST_ID
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.recorder import recorded_steps

ALLOWED = 1.5  # times the error that Hugging Face's own bf16 logits have against its fp32 ones
LENGTHS = (1, 17, 300, 700, 1500, 2500)  # prompts
TOKENS = 6  # of each answer
BUDGET = 600  # tokens of a step, where prompts are to be cut into chunks
MANY = 256  # short prompts at once: the largest batch that is timed
SHORT = 20  # tokens of each of those


@dataclass(frozen=True)
class Agreement:
    """The largest relative error |logits - exact| / |exact| of any row, ours and Hugging Face's in bf16."""

    rows: int
    chunks: int  # rows that computed a part of a prompt
    reused: int  # prompt tokens that came from the prefix cache
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """How much larger ours is."""
        return self.ours / self.theirs


@dataclass
class RecordedLogits:
    """What an engine's steps computed: of each request the logits it sampled from, in order."""

    rows: dict[int, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))  # each [V], fp32
    chunks: int = 0

    def of(self, answers: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Logits [tokens, V] of each answer. A row that was computed in vain, after an answer's end, is left out."""
        pairs = zip(sorted(self.rows), answers, strict=True)
        return [torch.stack(self.rows[request][: len(answer)]) for request, answer in pairs]


@contextmanager
def recorded_logits(llm: Any) -> Iterator[RecordedLogits]:
    """The logits of the steps inside the block; complete when the block has ended.

    From stage 07 on the runner hands them out (`tap`): a replayed graph calls no Python. Before, the model does.
    """
    runner, recording = llm.engine.runner, RecordedLogits()
    sampling: list[list[int]] = []  # per step, the requests that sample
    cut: set[int] = set()  # requests whose prompt is being computed in parts
    execute = runner.execute

    def recorded_execute(plan: Any) -> Any:
        for row in plan.rows:
            if not row.samples:
                cut.add(row.request.id)
            recording.chunks += row.request.id in cut
            if row.samples:
                cut.discard(row.request.id)
        sampling.append([row.request.id for row in plan.rows if row.samples])
        return execute(plan)

    steps: list[torch.Tensor] = []
    with replaced(runner, execute=recorded_execute):
        if hasattr(runner, "tap"):
            with replaced(runner, tap=steps):
                yield recording
        else:
            with recorded_steps(llm.model) as recorded:
                yield recording
            steps += [step.logits for step in recorded]
    for requests, logits in zip(filter(None, sampling), filter(len, steps), strict=True):
        for request, each in zip(requests, logits, strict=True):
            recording.rows[request].append(each.float())


class HuggingFace:
    """The same weights in Hugging Face's code: in bf16, and in fp32, which is taken for exact."""

    def __init__(self, model: Any) -> None:
        """`model` in bf16; it is converted back and forth, so that the device never holds it twice.

        The frequencies of the position code are fp32 in both: `to` would round them, so they are put back.
        """
        self.model: Any = model
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def release(self) -> None:
        """Let go of the weights."""
        self.model = None

    @torch.no_grad()  # not inference mode: what `to` makes there cannot be used outside
    def logits(self, ids: Sequence[Sequence[int]], last: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The last logits [last, V] of each sequence, in fp32; sequences of one length are computed together."""
        self.model.to(dtype)
        for name, buffer in self.model.named_buffers():
            if buffer.dtype.is_floating_point:
                buffer.data = self.buffers[name]
        found: dict[int, torch.Tensor] = {}
        for group in _by_length(ids):
            inputs = torch.tensor([list(ids[i]) for i in group], device=self.model.device)
            logits = self.model(inputs, use_cache=False, logits_to_keep=last).logits
            found |= {i: each.float() for i, each in zip(group, logits, strict=True)}
        return [found[i] for i in range(len(ids))]


def _by_length(ids: Sequence[Sequence[int]], tokens: int = 8192) -> list[list[int]]:
    """Groups of sequences that have one length, at most `tokens` tokens in each group of several."""
    groups: dict[int, list[list[int]]] = defaultdict(lambda: [[]])
    for i, each in enumerate(ids):
        mine = groups[len(each)]
        if mine[-1] and (len(mine[-1]) + 1) * len(each) > tokens:
            mine.append([])
        mine[-1].append(i)
    return [group for mine in groups.values() for group in mine]


def check_logits(
    llm: Any,
    theirs: HuggingFace,
    lengths: Sequence[int] = LENGTHS,
    tokens: int = TOKENS,
    chunk_budget: int | None = None,
    many: int = 0,
) -> Agreement:
    """The engine's logits of every token of some answers, against Hugging Face's over the same ids.

    Prompts of `lengths` are asked three times: as the engine is; with steps of `chunk_budget` tokens and an empty
    prefix cache; and once more, when prefixes are found. Then `many` short ones at once, and one alone. Raises
    RuntimeError where ours are further from Hugging Face in fp32 than allowed.
    """
    rng = Random(1)

    def prompts(lengths: Sequence[int]) -> list[list[int]]:
        return [[rng.randint(0, LARGEST_ID) for _ in range(length)] for length in lengths]

    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    usual = llm.engine.scheduler.max_num_batched_tokens
    several, alone = prompts(lengths), prompts([SHORT])
    again, short = (several, chunk_budget or usual), prompts([SHORT] * many)
    asked, mine, chunks, reused = [], [], 0, 0
    for load, budget in ((several, usual), again, again, (short, usual), (alone, usual)):
        if llm.engine.scheduler.max_num_batched_tokens != budget:
            forget(llm)
            llm.engine.scheduler.max_num_batched_tokens = budget
        with recorded_logits(llm) as recorded:
            outputs = llm.generate(load, params) if load else []
        mine += recorded.of([output.token_ids for output in outputs])
        asked += [output.prompt_token_ids + output.token_ids[:-1] for output in outputs]
        chunks += recorded.chunks
        reused += sum(output.num_cached_tokens for output in outputs)
    forget(llm)
    exact = theirs.logits(asked, tokens, torch.float32)
    rounded = theirs.logits(asked, tokens, torch.bfloat16)
    found = Agreement(len(asked) * tokens, chunks, reused, largest_error(mine, exact), largest_error(rounded, exact))
    if not found.ratio <= ALLOWED:
        raise RuntimeError(
            f"the logits differ from Hugging Face's in fp32 by {found.ours:.4f}, its own in bf16 by "
            f"{found.theirs:.4f}: {found.ratio:.2f} times as much, {ALLOWED} are allowed"
        )
    return found


def largest_error(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Of any row; NaN if there is one anywhere."""
    errors = [(a - b).norm(dim=-1) / b.norm(dim=-1) for a, b in zip(found, exact, strict=True)]
    return torch.cat(errors).max().item()
