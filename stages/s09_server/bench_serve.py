"""`stepinfer bench serve`: load any OpenAI-compatible server and tell latencies, throughput and failures.

Options are named as those of `vllm bench serve` where they mean the same.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from stages.cli.numbers import above, above_or_inf, at_least, at_least_and_below

app = typer.Typer(help="Measure a server.", no_args_is_help=True)
RESERVED = ("model", "prompt", "messages", "max_tokens", "stream", "stream_options", "n")


@app.callback()
def bench() -> None:
    """Measure a server."""


@app.command()
def serve(
    base_url: Annotated[
        str, typer.Option("--base-url", "--url", help="Where the server is; with /v1 at its end or not.")
    ] = "http://127.0.0.1:8000",
    endpoint: Annotated[str, typer.Option(help="/v1/completions or /v1/chat/completions")] = "/v1/completions",
    model: Annotated[str | None, typer.Option(help="The first that the server lists, if left out.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=["STEPINFER_API_KEY", "OPENAI_API_KEY"], show_envvar=True)
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests: 100, or all of the dataset, if left out.")
    ] = None,
    request_rate: Annotated[
        float,
        typer.Option(callback=above_or_inf(0), help="Arrivals per second, as a Poisson process; inf: all at once."),
    ] = math.inf,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="At most so many requests under way; others wait.")
    ] = None,
    random_input_len: Annotated[int, typer.Option(help="Words of a random prompt, mostly a token each.")] = 128,
    random_output_len: Annotated[int, typer.Option(help="Tokens of an answer, at most.")] = 32,
    random_range_ratio: Annotated[
        float, typer.Option(callback=at_least_and_below(0, 1), help="Lengths are drawn from length * (1 ± this).")
    ] = 0.0,
    random_prefix_len: Annotated[int, typer.Option(help="Words that all random prompts begin with, on top.")] = 0,
    dataset_path: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help='JSONL of {"prompt": text} or {"messages": [...]}.')
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same prompts and arrivals.")] = 0,
    temperature: Annotated[float, typer.Option(callback=at_least(0))] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for answers of full length; not every server knows it.")
    ] = False,
    extra_body: Annotated[str | None, typer.Option(help="JSON object of further fields of each request.")] = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="Trial requests that do not count.")] = 1,
    timeout: Annotated[
        float, typer.Option(callback=above(0), help="Seconds until a request counts as failed.")
    ] = 600.0,
    goodput: Annotated[
        list[str] | None, typer.Option(help="ttft:MS, itl:MS, tpot:MS or e2el:MS; repeat it for several goals.")
    ] = None,
    percentiles: Annotated[
        str, typer.Option("--metric-percentiles", "--percentiles", help="Of each latency, with commas.")
    ] = "50,90,99",
    save_result: Annotated[Path | None, typer.Option(help="Write figures and every request to this JSON file.")] = None,
) -> None:
    """Send requests to an OpenAI-compatible server, and tell what they met.

    The exit code is 1 if a request failed.
    """
    from stages.cli.errors import plain_errors

    with plain_errors():
        from rich.console import Console

        from stages.s09_server.load import arrivals, drive, run_on_loop, warm_up
        from stages.s09_server.load_prompts import Lengths, bodies, random_questions, read_questions
        from stages.s09_server.load_report import read_goals, read_percentiles, summarise
        from stages.s09_server.load_table import as_json, show
        from stages.s09_server.load_target import Target

        target = Target(base_url, endpoint, api_key, timeout)
        goals, asked = read_goals(goodput or []), read_percentiles(percentiles)
        lengths = Lengths(random_input_len, random_output_len, random_range_ratio, random_prefix_len)
        rng = Random(seed)
        if dataset_path is None:
            questions = random_questions(num_prompts or 100, lengths, rng)
        else:
            questions = read_questions(dataset_path, num_prompts, random_output_len)
        due = arrivals(len(questions), request_rate, rng)
        if save_result is not None and not save_result.parent.is_dir():
            raise ValueError(f"there is no folder {save_result.parent} to save the result in")
        further = _further_fields(extra_body)

        async def measure() -> Any:
            name = model or await target.first_model()
            fields = {"model": name, "temperature": temperature, "stream": True, **further}
            fields["stream_options"] = {"include_usage": True}
            if ignore_eos:
                fields["ignore_eos"] = True
            sent = bodies(questions, target.chat, fields)
            trials = random_questions(num_warmups, lengths, Random(f"trial {seed}"))
            await warm_up(target, bodies(trials, target.chat, fields))
            with _progress(len(sent)) as done:
                return name, await drive(target, sent, due, max_concurrency, done)

        name, run = run_on_loop(measure())
        report = summarise(run, goals, asked)
        show(report, Console())
        if save_result is not None:
            settings = {
                "base_url": base_url, "endpoint": endpoint, "model": name, "num_prompts": len(questions),
                "request_rate": request_rate if math.isfinite(request_rate) else "inf",
                "max_concurrency": max_concurrency, "random": None if dataset_path else vars(lengths),
                "dataset": dataset_path and dataset_path.name, "seed": seed, "temperature": temperature,
                "ignore_eos": ignore_eos, "extra_body": further, "date": datetime.now(UTC).isoformat("T", "seconds"),
            }  # fmt: skip
            content = {"settings": settings, **as_json(report, run)}
            save_result.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8", newline="\n")
        if report.failed:
            raise typer.Exit(1)


def _further_fields(given: str | None) -> dict[str, Any]:
    """The object of --extra-body; it must not say what other options say, nor ask for several answers."""
    try:
        fields = json.loads(given or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"--extra-body must be a JSON object, got {given!r}: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"--extra-body must be a JSON object, got {given!r}")
    if taken := [name for name in RESERVED if name in fields]:
        raise ValueError(f"--extra-body must not set {', '.join(taken)}")
    return fields


class _progress:
    """A bar on a terminal, nothing elsewhere; inside the block, the function to call after each response."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        # Drawn twice a second: the client's time is for the answers.
        self._bar = Progress(console=Console(stderr=True), refresh_per_second=2, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("requests", total=total)

    def __enter__(self) -> Callable[[], None]:
        self._bar.start()
        return lambda: self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


if __name__ == "__main__":
    app(prog_name="stepinfer bench")
