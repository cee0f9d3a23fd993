"""The figures of a load as tables for a terminal, and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stages.s09_server.load import Run
from stages.s09_server.load_report import Report, Spread
from stages.s09_server.load_request import Trace


def show(report: Report, console: Console) -> None:
    """Print the tables: counts and rates, latencies, failures, and what spoils the figures."""
    console.print(_counts(report), _latencies(report))
    if report.errors:
        table = Table("failure", "requests", "first words", title="Failed requests")
        for kind, (count, words) in report.errors.items():
            table.add_row(kind, str(count), Text(words))  # a Text: what a server says is no markup
        console.print(table)
    for warning in report.warnings:
        console.print(f"[yellow]warning:[/] {warning}")


def _counts(report: Report) -> Table:
    table = Table(title="Load", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    rows: dict[str, Any] = {
        "Completed requests": f"{report.completed:,}",
        "Failed requests": f"[red]{report.failed:,}[/]" if report.failed else "0",
        "Duration, s": f"{report.seconds:.2f}",
        "Requests/s": f"{report.per_second(report.completed):.2f}",
        "Prompt tokens": f"{report.prompt_tokens:,}" if report.counted else "not told",
        "Output tokens": f"{report.output_tokens:,}",
        "Output tokens/s": f"{report.per_second(report.output_tokens):,.1f}",
        "Tokens per chunk": f"{report.output_tokens / report.chunks:.2f}" if report.chunks else "no chunk",
    }
    if report.good is not None:
        wanted = ", ".join(f"{name} <= {1e3 * most:g} ms" for name, most in report.goals.items())
        rows[f"Goodput, requests/s with {wanted}"] = f"{report.per_second(report.good):.2f} ({report.good:,} requests)"
    if report.loop_delay is not None:
        rows["Client's loop late by, ms (p99)"] = f"{1e3 * report.loop_delay.percentiles[99.0]:.2f}"
    rows["Client's CPU, % of a core"] = f"{100 * report.client_cpu:.0f}"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _latencies(report: Report) -> Table:
    table = Table(title="Latency, ms")
    some = next((spread for spread in report.latencies.values() if spread is not None), None)
    asked = list(some.percentiles) if some else []
    table.add_column("", no_wrap=True)
    for name in ("mean", *(f"p{at:g}" for at in asked), "longest", "of"):
        table.add_column(name, justify="right")
    for short, spread in report.latencies.items():
        if spread is not None:
            figures = [1e3 * value for value in (spread.mean, *spread.percentiles.values(), spread.longest)]
            table.add_row(short.upper(), *(f"{value:,.2f}" for value in figures), f"{spread.count:,}")
    return table


def as_json(report: Report, run: Run) -> dict[str, Any]:
    """The figures, milliseconds and rates, and for each request what it met, in seconds from the start."""

    def milliseconds(spread: Spread | None) -> dict[str, float] | None:
        if spread is None:
            return None
        percentiles = {f"p{at:g}": 1e3 * value for at, value in spread.percentiles.items()}
        return {"mean": 1e3 * spread.mean, **percentiles, "longest": 1e3 * spread.longest, "count": spread.count}

    start = min((trace.due for trace in run.traces), default=0.0)
    return {
        "completed": report.completed,
        "failed": report.failed,
        "duration_s": report.seconds,
        "request_throughput": report.per_second(report.completed),
        "output_throughput": report.per_second(report.output_tokens),
        "request_goodput": None if report.good is None else report.per_second(report.good),
        "goals_ms": {name: 1e3 * most for name, most in report.goals.items()},
        "prompt_tokens": report.prompt_tokens if report.counted else None,
        "output_tokens": report.output_tokens,
        "chunks": report.chunks,
        "latency_ms": {name: milliseconds(spread) for name, spread in report.latencies.items()},
        "errors": {kind: {"count": count, "first": words} for kind, (count, words) in report.errors.items()},
        "client": {
            "late_ms": milliseconds(report.lateness),
            "loop_late_ms": milliseconds(report.loop_delay),
            "cpu_share": report.client_cpu,
        },
        "warnings": report.warnings,
        "requests": [_request(trace, start) for trace in run.traces],
    }


def _request(trace: Trace, start: float) -> dict[str, Any]:
    told: dict[str, Any] = {"due": trace.due - start, "sent": trace.sent - start if trace.sent else None}
    if trace.error is not None:
        return {**told, "error": trace.error, "detail": trace.detail}
    prompt = trace.usage.prompt_tokens if trace.usage else None
    counts = {"prompt_tokens": prompt, "output_tokens": trace.output_tokens, "finish_reason": trace.finish_reason}
    return {**told, **counts, "ttft": trace.ttft, "itl": trace.gaps, "e2el": trace.e2el}
