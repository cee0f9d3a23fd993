"""`python -m reference.bench NAME ...`: the benchmarks that belong to no stage alone. Each tells its options."""

import importlib
import sys

NAMES = {
    "cpu": "three workloads on a CPU, beside transformers and llama.cpp",
    "first-step": "what the host does for 64 prompts before their first step, without a model",
    "gpu": "the table of one shape on a GPU: five workloads, where a step's time goes; ablation, batch sizes",
    "gpu-scaling": "a decode step against running requests and context, and what memory holds",
    "gpu-server": "the server on a GPU: what HTTP costs, latencies by load",
    "gpu-speculative": "guessing ahead on a GPU: cost of verifying, gain by acceptance and by rows",
    "lines": "lines of code of the engine, stage by stage",
    "peers": "other engines' figures and ours, as a table",
    "report": "a result as a table",
    "small-card": "a model in 5.1 GB of device memory",
    "startup": "from weights on disk to the first token, in a fresh process",
    "tables": "what several results make together: cells, split, ablation, lines",
    "trace": "steady steps as the profiler saw them, and a picture",
    "waiting": "what a long queue costs the host, without a model",
}


def main() -> None:
    """Hand the rest of the command line to the benchmark that it names."""
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        lines = "\n".join(f"  {name:16} {text}" for name, text in NAMES.items())
        sys.exit(f"usage: python -m reference.bench NAME [options]\n{lines}")
    module = importlib.import_module(f"reference.bench.{sys.argv[1].replace('-', '_')}")
    module.main(sys.argv[2:])


if __name__ == "__main__":
    main()
