"""`python -m stages.s09_server.openapi_cases`: 2,000 requests that schemathesis makes up from a server's own document.

The server is `stepinfer serve` with a tiny model of random weights. Half of the requests are as the document says they
may be, half are not. Every response must be as the document says: its status, its type, its form, none of 500 or more.
In the end nothing may be left of them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from stages.s09_server.errors import ErrorBody
from stages.s09_server.server_process import ServerProcess, busy

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
SHARES = {"/v1/chat/completions": 6, "/v1/completions": 6, "/tokenize": 2, "/detokenize": 2}  # of all others: 1
LENGTH = 64  # of the model: an answer that nobody limits ends soon


class Cases:
    """Asks a server, one request after the other. `outcomes`: how often each operation gave each status."""

    def __init__(self, url: str, seed: int, key: str | None = None) -> None:
        self.seed, self.outcomes = seed, Counter[tuple[str, int]]()
        self.session = requests.Session()
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        document: Any = schemathesis.openapi.from_url(f"{url}/openapi.json")
        self.operations = [result.ok() for result in document.get_all_operations()]

    def run(self, count: int) -> None:
        """At least `count` requests; the first response that is wrong raises, with a curl command that repeats it.

        A small operation has few that differ: what it leaves over is shared out again, with the next seed.
        """
        total = sum(SHARES.get(operation.path, 1) for operation in self.operations)
        while (left := count - self.outcomes.total()) > 0:
            for operation in self.operations:
                share = -(-left * SHARES.get(operation.path, 1) // (2 * total))
                self.ask(operation, GenerationMode.POSITIVE, share)
                if len(operation.body) or len(operation.query):  # else there is nothing to get wrong
                    self.ask(operation, GenerationMode.NEGATIVE, share)
            self.seed += 1

    def ask(self, operation: Any, mode: GenerationMode, count: int) -> None:
        """Up to so many of one kind."""

        @seeded(self.seed)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode))
        def ask_one(case: schemathesis.Case) -> None:
            response = case.call(session=self.session, headers=self.headers, timeout=60)
            self.outcomes[operation.label, response.status_code] += 1
            case.validate_response(response, checks=CHECKS, headers=self.headers)
            if response.status_code >= 400:
                ErrorBody.model_validate_json(response.content, strict=True)

        ask_one()


def main() -> None:
    """The command. Raises for the first response that is wrong, and for anything that is left of the requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the result (default: reference/results)")
    parser.add_argument("--url", help="ask a server that runs already, and print how often which status came")
    parser.add_argument("--key", help="its API key")
    arguments = parser.parse_args()
    if arguments.url is None:
        ask_a_server_of_ours(arguments.cases, arguments.seed, arguments.out)
    else:
        cases = Cases(arguments.url, arguments.seed, arguments.key)
        cases.run(arguments.cases)
        for (name, status), count in sorted(cases.outcomes.items()):
            print(name, status, count)


def ask_a_server_of_ours(count: int, seed: int, out: Path | None) -> None:
    """Start it, ask so many, and save what came of it in a folder."""
    from reference.bench.harness import RESULTS, Measurement, Result  # torch comes with it: seconds
    from reference.checkpoints import build_tiny

    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny("qwen2", Path(folder) / "tiny")
        with ServerProcess(model, "--max-model-len", LENGTH, "--max-num-seqs", 64, "--kv-cache-mb", 8) as server:
            cases, began = Cases(server.url, seed), time.perf_counter()
            cases.run(count)
            seconds = time.perf_counter() - began
            if left := busy(server.url):
                raise RuntimeError(f"something is left of the requests: {left}")
            if "Traceback" in server.output:
                raise RuntimeError(f"the server is not well:\n{server.output}")
    result = Result(
        "s09_openapi", "Whatever a request is like, the answer is one that the document tells of, and no 5xx."
    )
    counts = sorted(cases.outcomes.items())
    result.measurements = [
        Measurement.single(f"{name}: {status}", times, "responses") for (name, status), times in counts
    ]
    total, failed = cases.outcomes.total(), sum(times for (_, status), times in counts if status >= 500)
    note = f"in {seconds:.0f} s, by schemathesis {version('schemathesis')}, seed {seed}"
    result.measurements.append(Measurement.single("all", total, "responses", note=note))
    result.wins = f"{total} requests, {failed} of them answered with a 5xx; nothing was left running, waiting or held."
    result.loses = "One request after the other: what many do at once is not tried here."
    result.save(out or RESULTS)
    print(result.wins)


if __name__ == "__main__":
    main()
