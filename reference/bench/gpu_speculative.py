"""Guessing ahead on a GPU: `python -m reference.bench gpu-speculative --model-shape qwen2.5-7b`.

Random bf16 weights of the real shape. Before anything is timed, the engine's logits are held against Hugging Face's, in
plain steps and in steps that verify guesses. Then the embedding and the head are made anew, so that each token is all
but certain to be followed by one other: a step takes as long as before, rounding decides no token any more, and a
proposer can know the answers. The token ids of every run are held against plain decoding's.

The result `s08_gpu_<shape>`, written again after each part:

- verify: a step that verifies k guesses for each row against a plain one, by the number of rows;
- acceptance: tokens per second of one request by the share of right guesses;
- rows: the gain by the number of requests, and where it ends;
- loss: what guessing costs when it is on and never right.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from reference.bench.gpu_bench import Bench, add_engine_options, check_device, prepared
from reference.bench.gpu_guesses import MOST, Decoding, Speculation, make_certain
from reference.bench.gpu_runs import replaced
from reference.bench.gpu_shapes import SHAPES
from reference.bench.gpu_verified import check_verified
from reference.bench.harness import Measurement, Result, Timing
from reference.bench.plots import lines
from reference.bench.report import markdown_table
from stages.s08_speculative.pace import Pace

COUNTS = (1, 2, 4, MOST)  # guesses per row
VERIFY_ROWS = (1, 4, 16, 64)
RATES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of right guesses
PAYS_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
USUAL, RATE = 4, 0.8  # guesses and rate where one of both stays as it is
FEW = 4  # rows; up to so many, answers are long
SETTLED = 32  # tokens; after these, guesses that were all wrong have led to a pause


def milliseconds(name: str, seconds: Sequence[float], note: str = "") -> Measurement:
    """A median step."""
    return replace(Measurement.of_timing(name, Timing.of([1000 * each for each in seconds])), unit="ms", note=note)


def measure_verify(spec: Speculation, rows: Sequence[int]) -> list[Measurement]:
    """A step that verifies k guesses per row, none of them right, against a plain one."""
    found = []
    for number in rows:
        plain = 0.0
        for count in (0, *COUNTS):
            run = spec.decode(number, count, 0.0)
            each = milliseconds(f"verify, {number} rows, k={count}", run.cycles)
            plain = plain or each.median
            found.append(replace(each, note=f"{each.median / plain:.2f} times a plain step"))
            if run.gpu:
                found.append(milliseconds(f"verify, {number} rows, k={count}, GPU", run.gpu))
            spec.bench.say(f"{each.name}: {each.median:.3f} ms, {found[-1].name}: {found[-1].median:.3f}")
    return found


def measure_acceptance(spec: Speculation, verify: Mapping[str, float]) -> list[Measurement]:
    """Tokens per second of one request by the share of right guesses, and the same as a multiple of plain decoding.

    The model for it (Leviathan et al. 2023): a step gives (1 - a ** (k + 1)) / (1 - a) tokens.
    """
    tokens = spec.bench.options.loss_tokens
    plain = max(spec.decode(1, 0, 0.0, tokens=tokens).rate for _ in range(2))
    found = [Measurement.single("acceptance, plain decoding", plain, "tok/s")]
    for rate in RATES:
        run = spec.decode(1, USUAL, rate, tokens=tokens)
        assert run.stats is not None
        expected = sum(rate**place for place in range(USUAL + 1))
        note = (
            f"{run.stats.accepted} of {run.stats.drafted} guesses stood, {run.stats.tokens_per_row:.2f} tokens of a "
            f"step; {expected:.2f} expected"
        )
        found.append(Measurement.single(f"acceptance {rate}", run.rate, "tok/s", note=note))
        found.append(Measurement.single(f"acceptance {rate}, gain", run.rate / plain, "x"))
        predicted = expected * verify["plain"] / verify["verified"]
        found.append(Measurement.single(f"acceptance {rate}, gain expected", predicted, "x"))
        spec.bench.say(f"acceptance {rate}: {run.rate:.0f} tok/s, {run.rate / plain:.2f} x; {note}")
    return found


def measure_rows(spec: Speculation, rows: Sequence[int]) -> list[Measurement]:
    """The gain at one acceptance by the number of requests, and the first number at which there is none.

    It is the gain of a step while all requests run: some answers end before others, and what follows has fewer rows.
    """
    found, options = [], spec.bench.options
    for number in rows:
        tokens = options.loss_tokens if number <= FEW else min(options.loss_tokens, 2 * options.tokens)
        plain, guessing = (spec.decode(number, count, RATE, tokens=tokens) for count in (0, USUAL))
        assert guessing.stats is not None
        per_row, (before, now) = guessing.stats.tokens_per_row, map(median, (plain.cycles, guessing.cycles))
        note = (
            f"{per_row:.2f} tokens in {1000 * now:.3f} ms against 1 in {1000 * before:.3f} ms; whole answers: "
            f"{guessing.rate:.0f} tok/s against {plain.rate:.0f}"
        )
        found.append(Measurement.single(f"{number} rows, gain", per_row * before / now, "x", note=note))
        spec.bench.say(f"{found[-1].name}: {found[-1].median:.2f}; {note}")
    losing = [number for number, each in zip(rows, found, strict=True) if each.median < 1]
    note = f"of {', '.join(map(str, rows))}; 0: at none of them"
    found.append(Measurement.single("rows at which it stops paying", losing[0] if losing else 0, "rows", note=note))
    return found


def measure_loss(spec: Speculation) -> list[Measurement]:
    """What guessing costs one request if it is on, never right, and pauses: medians of runs in turns."""
    options = spec.bench.options
    usual = spec.usual
    runs: dict[int, list[Decoding]] = {0: [], USUAL: []}
    for _ in range(options.repeats):
        for count, mine in runs.items():
            pace = Pace(usual.max_rows, usual.least_rate)
            mine.append(spec.decode(1, count, 0.0, pace, tokens=options.loss_tokens))
    off, on = (Timing.of([run.seconds for run in mine]) for mine in runs.values())
    stats = runs[USUAL][0].stats
    assert stats is not None
    note = (
        f"{options.loss_tokens} tokens, {stats.rows} steps with guesses; {off.median:.3f} s off, {on.median:.3f} s on"
    )
    found = [Measurement.single("loss, all guesses wrong", 100 * (on.median / off.median - 1), "%", note=note)]
    settled = min(SETTLED, options.loss_tokens // 3)
    later = [[1000 * sum(run.cycles[settled:]) / len(run.cycles[settled:]) for run in mine] for mine in runs.values()]
    off, on = map(Timing.of, later)
    note = f"{off.median:.3f} ms per token off, {on.median:.3f} ms on, from token {settled} on"
    found.append(Measurement.single("loss, after the pause began", 100 * (on.median / off.median - 1), "%", note=note))
    spec.bench.say(", ".join(f"{each.name}: {each.median:.2f} % ({each.note})" for each in found))
    return found


def measure(bench: Bench) -> Path:
    """All parts. Returns the result's file."""
    options, say = bench.options, bench.say
    result = Result(
        f"s08_gpu_{options.model_shape}",
        "With few rows a step reads all weights for a handful of tokens, so verifying four guesses costs little more "
        "than one token, and guesses of which most stand multiply the speed. With many rows arithmetic is no longer "
        "free: the step grows with its tokens, and guessing stops paying.",
    )
    spec = Speculation(bench)
    say("the engine is up")
    with replaced(spec.guessing, pace=Pace(0, 0.0)):
        agreement = bench.check(spec.llm, thorough=False)
    checks = [check_verified(spec, rows, count) for rows, count in options.checked]
    bench.drop_model()
    count, ours, own = sum(check[0] for check in checks), *(max(check[i] for check in checks) for i in (1, 2))
    say(f"logits of {count} verified tokens agree: {ours:.4f}, Hugging Face's own in bf16 {own:.4f}")
    note = "Hugging Face's own in bf16: {:.4f}; {} tokens"
    result.measurements = [
        Measurement.single(
            "largest relative error of the logits", agreement.ours, "",
            note=note.format(agreement.theirs, agreement.rows),
        ),
        Measurement.single("the same, in steps that verify", ours, "", note=note.format(own, count)),
    ]  # fmt: skip
    make_certain(spec.llm.model)
    spec.learn()
    say("the answers are known")
    spec.warm_up(options.rows, (0, *COUNTS))
    spec.warm_up([rows for rows in options.pays_rows if rows not in options.rows], (0, USUAL))
    say("warm")
    result.measurements += measure_verify(spec, options.rows)
    result.save(options.out)
    names = {"plain": "verify, 1 rows, k=0", "verified": f"verify, 1 rows, k={USUAL}"}
    result.measurements += measure_acceptance(spec, {key: result[name].median for key, name in names.items()})
    result.save(options.out)
    result.measurements += measure_rows(spec, options.pays_rows)
    result.measurements += measure_loss(spec)
    tell(result, options)
    plot(result, options)
    return result.save(options.out)


def tell(result: Result, options: argparse.Namespace) -> None:
    """Where it helps and where it does not, from the figures."""
    result.wins = (
        f"One request, {USUAL} guesses: "
        + ", ".join(f"{result[f'acceptance {rate}, gain'].median:.2f} times plain decoding at {rate}" for rate in RATES)
        + " of the guesses right."
    )
    stops = int(result["rows at which it stops paying"].median)
    result.loses = f"Where few guesses are right, and in large batches: at {RATE} " + (
        f"it stops paying with {stops} rows." if stops else f"it pays up to {max(options.pays_rows)} rows."
    )


def plot(result: Result, options: argparse.Namespace) -> None:
    """Three pictures beside the result."""
    shape, where = options.model_shape, options.out
    counts = (0, *COUNTS)
    steps = {f"{rows} rows": [result[f"verify, {rows} rows, k={k}"] for k in counts] for rows in options.rows}
    lines(steps, counts, "guesses per row, k", f"A step of {shape}").save(where / f"{result.name}_verify.svg")
    gains = {
        name: [result[f"acceptance {rate}, {what}"] for rate in RATES]
        for name, what in (("measured", "gain"), ("from the cost of a step", "gain expected"))
    }
    title = f"One request of {shape}, k = {USUAL}"
    lines(gains, RATES, "right guesses", title).save(where / f"{result.name}_acceptance.svg")
    by_rows = {f"{RATE} of the guesses right": [result[f"{rows} rows, gain"] for rows in options.pays_rows]}
    title = f"{shape} against plain decoding, k = {USUAL}"
    lines(by_rows, options.pays_rows, "requests at once", title, log=True).save(where / f"{result.name}_rows.svg")


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print the result."""
    with prepared(parse(arguments)) as bench:
        print(markdown_table(measure(bench)))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m reference.bench gpu-speculative", description=__doc__)
    parser.add_argument("--model-shape", choices=tuple(SHAPES), required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=VERIFY_ROWS, help="numbers of rows, cost of verifying")
    parser.add_argument("--pays-rows", type=int, nargs="+", default=PAYS_ROWS, help="numbers of requests, gain")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--loss-tokens", type=int, default=320, help="of long answers: one request, and few")
    parser.add_argument("--repeats", type=int, default=3, help="runs of that answer")
    add_engine_options(parser, memory_share=0.6, longest_check=300)
    options = parser.parse_args(arguments)
    check_device(parser, options, trial="--device cpu --model-shape tiny --tokens 8")
    most = max(*options.rows, *options.pays_rows)
    options.stage, options.batched_tokens, options.requests = 8, 8192, most
    options.checked = [(rows, count) for rows, count in ((1, USUAL), (2, 2), (16, USUAL), (64, USUAL)) if rows <= most]
    return options


if __name__ == "__main__":
    main()
