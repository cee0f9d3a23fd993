"""What structured output costs, without a model: `python -m stages.s09_server.bench_grammar`.

The sampler's part of a step at the demo model's vocabulary, with logits out of thin air, for batches in which nobody,
one or everybody follows a grammar; and what comes before the first token. Times are the processor's, of one thread, so
that others who use the machine do not count. The result is `s09_grammar` in reference/results.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reference.bench.harness import RESULTS, Measurement, Result
from reference.checkpoints import build_tiny, demo_model
from stages.s01_forward.generation import Generation
from stages.s01_forward.sampler import sample
from stages.s01_forward.sampling_params import SamplingParams
from stages.s01_forward.tokenizer import Tokenizer
from stages.s02_kv_cache.bench import save
from stages.s04_continuous_batching.bench import microseconds
from stages.s09_server.constraint import GrammarConstraint, Grammars
from stages.s09_server.grammar import checked, grammar_of

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["name", "age", "tags"],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "3 properties": PERSON,
    "100 objects of 3": {"type": "object", "properties": {f"person {i}": PERSON for i in range(100)}},
}


def of(schema: dict[str, Any]) -> dict[str, Any]:
    """As a client says it."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


class Rows:
    """Answers that never end: who is complete begins anew. The first `bound` of them follow a grammar."""

    def __init__(self, start: GrammarConstraint, count: int, bound: int) -> None:
        self.start, self.count, self.bound, self.begun = start, count, bound, 0
        self.answers = [self.begin(number) for number in range(count)]
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(8, count, start.vocab_size, generator=generator)  # of eight steps, again and again

    def begin(self, number: int) -> Generation:
        self.begun += 1
        answer = Generation([1], SamplingParams(max_tokens=100), seed=self.begun, token_limit=100)
        answer.constraint = self.start.after(()) if number < self.bound else None
        return answer

    def step(self, number: int) -> float:
        """A token for each; seconds."""
        begun = time.thread_time()
        tokens = sample(self.logits[number % 8], self.answers)
        for answer, token in zip(self.answers, tokens, strict=True):
            answer.append(token)
        seconds = time.thread_time() - begun
        self.answers = [self.begin(i) if each.finish_reason else each for i, each in enumerate(self.answers)]
        return seconds


def timed(function: Callable[[], Any], repeats: int = 1) -> tuple[Any, list[float]]:
    """The last value, and the seconds of each call."""
    seconds = []
    for _ in range(repeats):
        begun = time.thread_time()
        value = function()
        seconds.append(time.thread_time() - begun)
    return value, seconds


def milliseconds(name: str, seconds: list[float], note: str = "") -> Measurement:
    """The median of some calls, and the 10th and 90th percentile."""
    low, median, high = np.percentile(1e3 * np.array(seconds), (10, 50, 90)).tolist()
    return Measurement(name, median, low, high, "ms", len(seconds), note=note)


def before_the_first_token(grammars: Grammars, repeats: int) -> list[Measurement]:
    """What is done once: for the first grammar, and for each."""
    text = {name: json.dumps(schema) for name, schema in SCHEMAS.items()}
    checked(text["any object"])  # imports the library
    _, seconds = timed(partial(getattr, grammars, "vocabulary"))
    measurements = [milliseconds("the first grammar: the vocabulary", seconds, "in a thread of the engine's, once")]
    for name in SCHEMAS:
        grammar, seconds = timed(partial(checked.__wrapped__, text[name]), repeats)  # not what it remembers
        measurements.append(milliseconds(f"{name}: check in the API", seconds, f"{len(text[name])} characters"))
        start, seconds = timed(partial(grammars.compile_now, grammar), repeats)
        measurements.append(milliseconds(f"{name}: compile in the engine's thread", seconds))
        measurements.append(microseconds(f"{name}: a copy for an answer", timed(partial(start.after, ()), 100)[1]))
    return measurements


def measure(folder: Path, counts: tuple[int, ...], steps: int, repeats: int) -> Result:
    """Milliseconds per step of the sampler, by rows and how many of them follow a grammar."""
    tokenizer = Tokenizer(folder)
    vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    result = Result(
        "s09_grammar",
        "A mask costs a walk through the tokens that the grammar lets begin, some 0.1 ms, and the row's logits are "
        "gone through once more. Rows that follow no grammar pay nothing but waiting.",
    )
    grammars = Grammars(tokenizer, vocab_size, tokenizer.eos_token_ids)
    result.measurements += before_the_first_token(grammars, repeats)
    grammar = grammar_of(of(PERSON))
    assert grammar is not None
    start = grammars.compile_now(grammar)
    batches = {
        f"batch of {count}, {bound} with a grammar: sampler": Rows(start, count, bound)
        for count in counts
        for bound in sorted({0, 1, count})
    }
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    for number in range(steps):
        for name, rows in batches.items():  # in turns
            seconds[name].append(rows.step(number))
    note = f"greedy, vocabulary of {vocab_size}"
    result.measurements += [milliseconds(name, each[3:], note) for name, each in seconds.items()]
    result.measurements.append(microseconds("one mask", masks(start, steps)))
    most = counts[-1]
    free, one, every = (result[f"batch of {most}, {n} with a grammar: sampler"].median for n in (0, 1, most))
    result.wins = f"{most} rows take {free:.1f} ms per step if none follows a grammar, {every:.1f} ms if all do."
    result.loses = (
        f"A single one among {most}: {one:.1f} ms; and steps go one after the other while it is there: "
        "the host needs its token before it can say what may follow."
    )
    return result


def masks(start: GrammarConstraint, steps: int) -> list[float]:
    """Seconds of a mask, at places of an answer at random."""
    rows, seconds = Rows(start, 1, 1), []
    for number in range(steps):
        constraint = rows.answers[0].constraint
        assert constraint is not None
        seconds += timed(constraint.allowed)[1]
        rows.step(number)
    return seconds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny vocabulary, few steps: does it run? Keeps nothing")
    parser.add_argument("--out", type=Path, help="folder for the result (default: reference/results)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        out = options.out or (Path(scratch) if options.quick else RESULTS)
        folder = build_tiny("qwen2", Path(scratch) / "tiny") if options.quick else demo_model()
        save(measure(folder, (1, 2), 5, 1) if options.quick else measure(folder, (1, 16), 200, 5), out)


if __name__ == "__main__":
    main()
