"""What guessing ahead buys on a CPU, and where it loses: `python -m stages.s08_speculative.bench`.

The result `s08_cpu`: tokens per second and acceptance against the number of guesses k, for n-grams on a prompt whose
answer repeats it and on an open one, and for drafts made of the model's first layers; and what guessing costs when it
is on and never right. Every run's token ids are held against plain decoding's.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from reference.bench.harness import RESULTS, Measurement, Result, Timing
from reference.bench.plots import lines
from reference.checkpoints import build_tiny, demo_model
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.bench import QUESTION, THREADS, save
from stages.s08_speculative.llm import LLM
from stages.s08_speculative.pace import Pace
from stages.s08_speculative.set_acceptance import SetAcceptance
from stages.s08_speculative.speculative_engine import SpeculationStats

TEXT = (
    "The old lighthouse stood on a cliff above the grey sea. Every evening, Mara climbed its hundred and twelve steps "
    "to light the lamp. One night a storm tore the shutters from the windows, and the flame went out three times. She "
    "relit it three times, shielding it with her coat, until the fishing boats had found their way back into the "
    "harbour."
)
PROMPTS = {"repeat": f"Repeat the following text word for word:\n\n{TEXT}", "open": QUESTION}
COUNTS = (1, 2, 4, 8)  # guesses
LAYERS = (12, 29)  # of the demo model's 30
SETTLED = 32  # tokens; after these, guesses that were all wrong have led to a pause


@dataclass(frozen=True)
class Answer:
    """One run: its ids, when each token came, in seconds from the start, and what became of the guesses."""

    token_ids: list[int]
    times: list[float]
    stats: SpeculationStats | None

    def seconds(self, first: int = 0) -> float:
        """From token number `first` to the last."""
        return self.times[-1] - self.times[first]

    @property
    def note(self) -> str:
        """Acceptance, in words."""
        if self.stats is None:
            return "plain decoding"
        stats = self.stats
        return f"{stats.accepted} of {stats.drafted} guesses stood, {stats.rows} steps with guesses"


class Bench:
    """Engines over one model folder: one that never guesses, and one for each kind of guess."""

    def __init__(self, folder: Path, layers: Sequence[int], most: int, max_model_len: int) -> None:
        kinds = {"off": None, "n-gram": "ngram", **{f"{count} layers": f"layers:{count}" for count in layers}}
        options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_mb": 128, "prefix_cache": "off"}
        options["max_model_len"] = max_model_len
        self.llms = {
            kind: LLM(folder, speculative=value, num_draft_tokens=most, **options) for kind, value in kinds.items()
        }
        self.plain: dict[tuple[int, ...], list[int]] = {}  # answers of plain decoding

    def run(self, kind: str, prompt: Sequence[int], tokens: int, most: int = 0) -> Answer:
        """Answer with at most so many guesses per step. Raises RuntimeError for ids that are not plain decoding's."""
        llm = self.llms[kind]
        engine: Any = llm.engine
        if kind != "off":
            engine.runner.most, engine.stats = most, SpeculationStats()
        start = time.perf_counter()
        events = llm.stream([list(prompt)], SamplingParams(max_tokens=tokens))
        came = [(event.token_id, time.perf_counter() - start) for event in events]
        ids, times = [token for token, _ in came], [seconds for _, seconds in came]
        known = self.plain.setdefault((*prompt, tokens), ids)
        if ids != known:
            raise RuntimeError(f"{kind}, {most} guesses: the answer is not that of plain decoding: {ids}, {known}")
        return Answer(ids, times, None if kind == "off" else engine.stats)

    @contextmanager
    def without_pauses(self, kind: str) -> Iterator[None]:
        """Guess always, whether it pays or not."""
        engine: Any = self.llms[kind].engine
        pace = engine.pace
        engine.pace = Pace(pace.max_rows, least_rate=0.0)
        try:
            yield
        finally:
            engine.pace = pace

    @contextmanager
    def always_wrong(self, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[None]:
        """The n-grams' engine with guesses of which none is right."""
        llm = self.llms["n-gram"]
        engine: Any = llm.engine
        proposer = engine.proposer
        engine.proposer = SetAcceptance({tuple(prompt): answer}, 0.0, llm.config.vocab_size)
        try:
            yield
        finally:
            engine.proposer = proposer


def sweep(bench: Bench, name: str, kind: str, prompt: Sequence[int], options: argparse.Namespace) -> list[Measurement]:
    """Tokens per second for k = 0 (plain decoding) and `COUNTS`, in turns; and the share of the guesses that stood."""
    counts = [count for count in COUNTS if count <= options.most]
    runs: dict[int, list[Answer]] = {count: [] for count in (0, *counts)}
    for _ in range(options.repeats):
        for count, mine in runs.items():
            mine.append(bench.run(kind if count else "off", prompt, options.tokens, count))
    found, amount = [], len(runs[0][0].token_ids) - 1
    for count, mine in runs.items():
        timing = Timing.of([run.seconds() for run in mine])
        found.append(Measurement.rate(f"{name}, k={count}", timing, amount, "tok/s", note=mine[0].note))
    for count in counts:
        stats = runs[count][0].stats
        assert stats is not None
        note = f"{stats.tokens_per_row:.2f} tokens of a step with guesses"
        found.append(Measurement.single(f"{name}, k={count}, acceptance", 100 * stats.acceptance_rate, "%", note=note))
    return found


def loss(bench: Bench, name: str, prompt: Sequence[int], options: argparse.Namespace) -> list[Measurement]:
    """How much more time an answer takes when guessing is on: the median of pairs of runs, off and on in turns."""
    runs: dict[str, list[Answer]] = {"off": [], "n-gram": []}
    for _ in range(options.repeats):
        for kind, mine in runs.items():
            mine.append(bench.run(kind, prompt, options.loss_tokens, options.most_usual))
    found = []
    settled = min(SETTLED, options.loss_tokens // 2)
    for what, first in ((name, 0), (f"{name}, after the pause began", settled)):
        off, on = ([run.seconds(first) for run in mine] for mine in runs.values())
        pairs = Timing.of([100 * (with_guesses / plain - 1) for plain, with_guesses in zip(off, on, strict=True)])
        note = f"{median(off):.3f} s off, {median(on):.3f} s on; {runs['n-gram'][0].note}"
        found.append(Measurement(f"{what}, loss", pairs.median, pairs.min, pairs.max, "%", options.repeats, note=note))
    return found


def measure(folder: Path, options: argparse.Namespace, out: Path) -> Result:
    """All of it; what there is so far is written after each part."""
    result = Result(
        "s08_cpu",
        "A CPU step of several tokens takes about twice as long as one of one token, and hardly longer with more: the "
        "weights are read once, but matrix products replace matrix-vector products. So n-grams pay where an answer "
        "repeats its prompt, and more with more guesses. A draft of the model's own layers costs their share of a step "
        "for every guess: it loses unless nearly all are right.",
    )
    bench = Bench(folder, options.layers, options.most, options.max_model_len)
    llm = bench.llms["off"]
    prompts = {
        name: llm.chat_ids([{"role": "user", "content": text}])[-options.prompt_tokens :]
        for name, text in PROMPTS.items()
    }
    for kind in bench.llms:
        bench.run(kind, prompts["open"], 8, min(2, options.most))  # warm-up

    def add(found: list[Measurement]) -> None:
        result.measurements.extend(found)
        result.save(out)
        for each in found:
            print(f"{each.name}: {each.median:.4g} {each.unit} ({each.note})", file=sys.stderr, flush=True)

    for name, prompt in prompts.items():
        add(sweep(bench, f"{name}, n-gram", "n-gram", prompt, options))
    for count in options.layers:
        kind = f"{count} layers"
        with bench.without_pauses(kind):
            short = argparse.Namespace(**{**vars(options), "tokens": options.layer_tokens, "repeats": 1})
            add(sweep(bench, f"open, {kind}", kind, prompts["open"], short))
    add(loss(bench, "open, n-gram", prompts["open"], options))
    answer = bench.plain[(*prompts["open"], options.loss_tokens)]
    with bench.always_wrong(prompts["open"], answer):
        add(loss(bench, "open, all guesses wrong", prompts["open"], options))
    tell(result, options)
    return result


def tell(result: Result, options: argparse.Namespace) -> None:
    """Where it helps and where it does not, from the figures."""

    def times(name: str) -> dict[int, float]:
        counts = [count for count in COUNTS if count <= options.most]
        return {count: result[f"{name}, k={count}"].median / result[f"{name}, k=0"].median for count in counts}

    repeated, opened = times("repeat, n-gram"), times("open, n-gram")
    result.wins = "An answer that repeats its prompt, n-grams: " + ", ".join(
        f"{ratio:.2f} times plain decoding with k = {count}" for count, ratio in repeated.items()
    )
    worst = {f"{count} layers": min(times(f"open, {count} layers").values()) for count in options.layers}
    result.loses = "An open question: " + ", ".join(
        [f"n-grams {opened[options.most_usual]:.2f} times plain decoding with k = {options.most_usual}"]
        + [f"a draft of {kind} down to {ratio:.2f} times" for kind, ratio in worst.items()]
    )


def plot(result: Result, options: argparse.Namespace, out: Path) -> None:
    """Speed and acceptance against k."""
    counts = [count for count in COUNTS if count <= options.most]
    names = ["repeat, n-gram", "open, n-gram", *(f"open, {count} layers" for count in options.layers)]
    speed = {}
    for name in names:
        plain = result[f"{name}, k=0"].median
        each = [result[f"{name}, k={count}"] for count in (0, *counts)]
        speed[name] = [
            Measurement(m.name, m.median / plain, m.low / plain, m.high / plain, "times plain decoding") for m in each
        ]
    lines(speed, (0, *counts), "guesses per step, k", "Speed of an answer").save(out / "s08_cpu.svg")
    accepted = {name: [result[f"{name}, k={count}, acceptance"] for count in counts] for name in names}
    lines(accepted, counts, "guesses per step, k", "Guesses that stood").save(out / "s08_cpu_acceptance.svg")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and one repeat: does it run? Keeps nothing")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for the results (default: reference/results)")
    options = parser.parse_args(arguments)
    sizes: dict[str, Any] = {
        "most": 8, "most_usual": 4, "layers": LAYERS, "tokens": 128, "layer_tokens": 64, "loss_tokens": 320,
        "max_model_len": 1024, "prompt_tokens": 1024,
    }  # fmt: skip
    if options.quick:
        sizes = {
            "most": 2, "most_usual": 2, "layers": (1,), "tokens": 12, "layer_tokens": 8, "loss_tokens": 16,
            "max_model_len": 128, "prompt_tokens": 64,
        }  # fmt: skip
        options.repeats = 1
    vars(options).update(sizes)
    torch.set_num_threads(1 if options.quick else THREADS)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        out = options.out or (Path(scratch) if options.quick else RESULTS)
        folder = build_tiny("llama", Path(scratch) / "tiny") if options.quick else demo_model()
        result = measure(folder, options, out)
        save(result, out)
        plot(result, options, out)


if __name__ == "__main__":
    main()
