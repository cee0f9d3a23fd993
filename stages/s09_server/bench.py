"""The server's cost, and its latency under load: `python -m stages.s09_server.bench`.

Three results in reference/results: `s09_dry_run` (tokens per second with HTTP and without, and where the time goes),
`s09_load` (time to first token and inter-token latency against request rate, beside the servers of transformers and
llama.cpp) and `s09_load_batching` (the same beside transformers' server in its batching mode, for few and short
requests, since on a CPU it takes long). llama.cpp takes part if `llama-server` is on the path, or the environment
variable LLAMA_SERVER names it.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from reference.bench.harness import RESULTS, Result
from reference.bench.plots import bars, lines
from reference.checkpoints import build_tiny, demo_model
from stages.s02_kv_cache.bench import THREADS, save
from stages.s09_server.bench_dry_run import DryLoad, measure_dry_run
from stages.s09_server.bench_load import HF, HF_BATCHING, LLAMA, OURS, WHAT, RatedLoad, measure_load, series_of
from stages.s09_server.load_prompts import Lengths

PARTS = ("dry", "load", "batching")
PEERS = (HF, LLAMA)
LOAD = (
    "While a server keeps up, the first token takes as long as its prompt, and a token as long as a step; beyond, "
    "requests queue. A server that batches keeps up for longer than one that answers a request at a time, and its "
    "tokens come more slowly, since its steps serve several."
)
BATCHING = (
    "transformers' server in its batching mode is made for GPUs: on a CPU a step takes time for all blocks of the KV "
    "cache, used or not. So it has eight blocks of 256 tokens here, and four short requests."
)


def plot_dry_run(result: Result, out: Path) -> None:
    rates = [each for each in result.measurements if each.unit == "tokens/s"]
    bars(rates, "64 streams of a dry run").save(out / "s09_dry_run.svg")
    inside = "API process, in "
    found = [each for each in result.measurements if each.name.startswith(inside)]
    if profile := [replace(each, name=each.name.removeprefix(inside)) for each in found]:
        bars(profile, "Time of the API process").save(out / "s09_dry_run_profile.svg")


def plot_load(result: Result, rates: list[float], out: Path) -> None:
    for short, what in WHAT.items():
        title = f"{what.capitalize()}: median, 10th to 90th percentile"
        lines(series_of(result, what, rates), rates, "requests per second", title, log=True).save(
            out / f"s09_{short}.svg"
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, few requests, no peers. Keeps nothing")
    parser.add_argument("--only", choices=PARTS, help="this part alone")
    parser.add_argument("--out", type=Path, help="folder for the results (default: reference/results)")
    parser.add_argument("--without", choices=PEERS, action="append", default=[], help="leave this peer out")
    options = parser.parse_args(arguments)
    quick = options.quick
    torch.set_num_threads(1 if quick else THREADS)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        out = options.out or (Path(scratch) if quick else RESULTS)
        folder = build_tiny("llama", Path(scratch) / "tiny") if quick else demo_model()
        if options.only in (None, "dry"):
            dry = DryLoad(4, 20, 1, (0.0,), 1) if quick else DryLoad()
            result = measure_dry_run(str(folder), dry)
            save(result, out)
            plot_dry_run(result, out)
        if options.only in (None, "load"):
            load = RatedLoad({20.0: 5}, Lengths(8, 4)) if quick else RatedLoad({0.25: 5, 0.5: 9, 1.0: 16, 2.0: 30})
            names = [OURS] if quick else [each for each in (OURS, *PEERS) if each not in options.without]
            result = Result("s09_load", LOAD)
            measure_load(result, folder, load, 1 if quick else THREADS, names)
            save(result, out)
            plot_load(result, list(load.rates), out)
        if options.only in (None, "batching") and not quick:
            result = Result("s09_load_batching", BATCHING)
            measure_load(result, folder, RatedLoad({0.1: 4}, Lengths(64, 8)), THREADS, [OURS, HF_BATCHING], blocks=8)
            save(result, out)


if __name__ == "__main__":
    main()
