"""Qwen2.5-1.5B in bf16 on a small card: `python -m reference.bench small-card`.

The allocator may take 5.1 GB of the GPU, as if the card had no more, and 8 answers must grow at once to 2,048 tokens
each: weights, K/V, activations and graphs together. The engine runs in a process of its own.
"""

import argparse
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import torch

from reference.bench.fresh import in_fresh_process, write_checkpoint
from reference.bench.gpu_shapes import SHAPES
from reference.bench.harness import RESULTS, Measurement, Result
from reference.bench.report import markdown_table
from reference.bench.workloads import LARGEST_ID

LIMIT = 5.1e9  # bytes
STREAMS, CONTEXT, ANSWER = 8, 2048, 64
STEP_TOKENS = 1024


def fill_small_card(folder: Path, device: str, context: int) -> dict[str, Any]:
    """Run the streams under the limit. Raises RuntimeError unless all were there at once, to their last token."""
    from stages.s01_forward.sampling_params import SamplingParams
    from stages.s07_cuda_graph.llm import LLM

    memory: dict[str, Any] = {"kv_cache_mb": 64}
    if device == "cuda":
        share = LIMIT / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(share)
        memory = {"memory_share": share}
    llm: Any = LLM(
        folder, device=device, dtype="bfloat16", max_model_len=context, max_num_seqs=STREAMS,
        max_num_batched_tokens=min(STEP_TOKENS, context), capture="start", **memory,
    )  # fmt: skip
    rng, answer = Random(0), min(ANSWER, context // 2)
    prompts = [[rng.randint(0, LARGEST_ID) for _ in range(context - answer)] for _ in range(STREAMS)]
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    rows: list[int] = []
    execute = llm.engine.runner.execute

    def counted(plan: Any) -> Any:
        rows.append(len(plan.rows))
        return execute(plan)

    llm.engine.runner.execute = counted
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    scheduler, graphs = llm.engine.scheduler, llm.engine.runner.graphs
    lengths = [len(output.prompt_token_ids) + len(output.token_ids) for output in outputs]
    if lengths != [context] * STREAMS or scheduler.num_preemptions or max(rows) != STREAMS:
        raise RuntimeError(
            f"lengths of {lengths} tokens, {scheduler.num_preemptions} preemptions, at most {max(rows)} rows at once; "
            f"wanted: {STREAMS} times {context} at once, and no preemption"
        )
    on_gpu = device == "cuda"
    return {
        "reserved": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "allocated": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "weights": sum(each.numel() * each.itemsize for each in llm.model.parameters()),
        "room": (scheduler.cache.pool.num_blocks - 1) * scheduler.cache.block_size,
        "graphs": len(graphs.captured) if graphs else 0,
        "tokens": STREAMS * answer,
        "seconds": seconds,
    }


def measure_small_card(options: argparse.Namespace) -> Result:
    """The figures of a run that went well."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch) / "model"
        in_fresh_process(write_checkpoint, options.model_shape, folder, options.device)
        found = in_fresh_process(fill_small_card, folder, options.device, options.context)
    result = Result(
        f"s07_small_card_{options.model_shape}",
        "3.1 GB of weights and 0.5 GB of K/V leave 1.5 GB for activations, graphs and what libraries take: 8 answers "
        "of 2,048 tokens fit.",
    )
    if options.context != CONTEXT:
        result.hypothesis = f"A trial with {STREAMS} answers of {options.context} tokens."
    limit = f"of {LIMIT / 1e9} GB that the allocator may take" if options.device == "cuda" else "no limit on a CPU"
    result.measurements = [
        Measurement.single("device memory taken at the peak", found["reserved"] / 1e9, "GB", note=limit),
        Measurement.single("... in use of it at the peak", found["allocated"] / 1e9, "GB"),
        Measurement.single("weights", found["weights"] / 1e9, "GB"),
        Measurement.single("room in the cache", found["room"], "tokens", note=f"{found['graphs']} graphs captured"),
        Measurement.single(f"answers at once, of {options.context} tokens each", STREAMS, ""),
        Measurement.single("output", found["tokens"] / found["seconds"], "tok/s", note="prompts included in the time"),
    ]
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measure, save, print."""
    parser = argparse.ArgumentParser(prog="python -m reference.bench small-card", description=__doc__)
    parser.add_argument("--model-shape", choices=tuple(SHAPES), default="qwen2.5-1.5b")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of each answer with its prompt")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU is here; `--device cpu --model-shape tiny --context 64` tries the rest")
    print(markdown_table(measure_small_card(options).save(options.out)))


if __name__ == "__main__":
    main()
