"""`python -m reference.gpu_checks`: every check of the GPU kernels over the whole grid, on a machine with a CUDA GPU.

One command, one report (`reference/results/gpu_checks.json`), exit status 1 if anything failed. The grid: dtypes x
head sizes x group sizes x block sizes, each in four to nine kinds of batch whose lengths lie around multiples of the
block size. In half precision the error against float64 may be at most 1.1 times that of torch's own attention.
"""

import argparse
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from reference import hf
from reference.bench.harness import RESULTS, Measurement, Result
from reference.bench.report import markdown_table
from reference.checkpoints import FAMILIES, build_tiny
from stages.s03_paged_kv import paged_attention as torch_version
from stages.s03_paged_kv.attention_cases import Case, exact_attention, make_case

DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 2, 3, 4, 7, 8)
BLOCK_SIZES = (16, 32, 64)
# The first four with every block size, the others with the smallest.
KINDS = ("decode", "decode_split", "prefill", "chunk", "verify", "verify_split", "chunk_split", "mixed", "long_prompt")
ALLOWED_RATIO = 1.1  # of torch's error, in half precision
ALLOWED_FLOAT32 = 1e-5  # relative, in float32


@dataclass(frozen=True)
class Check:
    """One check: `error` is |out - exact| / |exact|; `torch_error` the same of torch's attention, where compared."""

    name: str
    passed: bool
    error: float = 0.0
    torch_error: float = 0.0
    note: str = ""


def batch(kind: str, block_size: int) -> tuple[list[int], list[int], int | None]:
    """Query lengths, key lengths and forced keys per split of one kind of batch."""
    around = [n + d for n in (block_size, 4 * block_size, 256) for d in (-1, 0, 1)] + [1, 700]
    keys_per_split = 128 if kind.endswith("_split") else None
    if kind.startswith("decode"):  # with a padding row
        return [1] * (len(around) + 1), [*around, 0], keys_per_split
    if kind.startswith("verify"):
        return [min(5, n) for n in around], around, keys_per_split
    if kind == "prefill":
        return around, around, None
    if kind.startswith("chunk"):
        return [max(1, n - n // 3) for n in around], around, keys_per_split
    if kind == "long_prompt":
        return [1100, 40, 1], [2200, 1500, 3000], None
    return [1, 300, 1, 5, 64, 1, 129], [around[0], 300, 513, 77, 900, 0, 130], None


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def attention_checks(setting: tuple[str, int, int, int]) -> list[Check]:
    """All kinds of batch for one (dtype, head size, group, block size)."""
    from stages.s03_paged_kv import kernel

    dtype, head_dim, group, block_size = setting
    checks = []
    for seed, kind in enumerate(KINDS if block_size == BLOCK_SIZES[0] else KINDS[:4]):
        q_lens, kv_lens, keys_per_split = batch(kind, block_size)
        layout = "blocks" if kind == "mixed" else "layers"
        case = make_case(
            q_lens, kv_lens, num_kv_heads=2, group=group, head_dim=head_dim, block_size=block_size,
            dtype=getattr(torch, dtype), device="cuda", layout=layout, seed=seed,
        )  # fmt: skip
        exact = exact_attention(case)
        plan = kernel.make_plan(q_lens, kv_lens, case.block_table, case.shape, keys_per_split=keys_per_split)
        error = relative_error(kernel.paged_attention(*case.inputs, plan, case.scale), exact)
        gather = torch_version.make_plan(q_lens, kv_lens, case.block_table, case.shape)
        torch_error = relative_error(torch_version.paged_attention(*case.inputs, gather, case.scale), exact)
        limit = ALLOWED_FLOAT32 if dtype == "float32" else ALLOWED_RATIO * torch_error
        name = f"{dtype} D{head_dim} G{group} B{block_size} {kind}"
        checks.append(Check(name, error <= limit, error, torch_error))
    return checks


def check_store() -> Check:
    """The written slots equal torch's bit for bit, all others stay as they were."""
    from stages.s03_paged_kv.store_kv import store_kv

    case = make_case([1], [900], num_kv_heads=3, head_dim=80, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 70, 3, 80, device="cuda").to(torch.bfloat16)
    slots = torch.randperm(case.k_cache.shape[0] * 16 - 16, device="cuda")[:70] + 16
    slots[-1] = 0  # a padding token
    caches = [(case.k_cache.clone(), case.v_cache.clone()) for _ in range(2)]
    store_kv(k, v, *caches[0], slots)
    torch_version.store_kv(k, v, *caches[1], slots)
    same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*caches, strict=True))
    return Check("store_kv equals torch", same)


def check_permuted_blocks() -> Check:
    """Where blocks lie physically changes no bit."""
    cases = [make_case([1, 40, 5], [77, 40, 300], dtype=torch.bfloat16, device="cuda", shuffle=n) for n in (1, 2)]
    return Check("permuted blocks", torch.equal(*(run_kernel(case) for case in cases)))


def check_isolation() -> Check:
    """Other contents in the neighbours' blocks change no bit of a row."""
    case = make_case([1] * 4, [500] * 4, dtype=torch.bfloat16, device="cuda")
    before = run_kernel(case)
    for row in (0, 1, 3):
        case.k_cache[case.block_table[row].long()] = 7.0
    after = run_kernel(case)
    return Check("isolation", torch.equal(before[2], after[2]) and not torch.equal(before[1], after[1]))


def run_kernel(case: Case) -> torch.Tensor:
    from stages.s03_paged_kv import kernel

    plan = kernel.make_plan(case.q_lens, case.kv_lens, case.block_table, case.shape)
    out: torch.Tensor = kernel.paged_attention(*case.inputs, plan, case.scale)
    return out


def check_graph() -> Check:
    """A graph captured at the largest lengths serves shorter ones and padding rows, with the write in front."""
    from stages.s03_paged_kv import kernel

    bound = make_case([1] * 8, [2048] * 8, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 8, 2, 64, device="cuda").to(torch.bfloat16)
    slots = torch.zeros(8, dtype=torch.int64, device="cuda")
    plan = kernel.make_plan(bound.q_lens, bound.kv_lens, bound.block_table, bound.shape)

    def step() -> torch.Tensor:
        kernel.store_kv(k, v, bound.k_cache, bound.v_cache, slots)
        return kernel.paged_attention(*bound.inputs, plan, bound.scale)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    worst = 0.0
    for lens in ([5, 17, 1024, 2000, 1, 33, 0, 0], [16, 2048, 15, 300, 301, 302, 303, 0]):
        bound.seq_lens.copy_(torch.tensor(lens))
        last = bound.seq_lens.long().sub(1).clamp(min=0)
        block = bound.block_table.gather(1, (last // 16)[:, None])[:, 0].long() * (bound.seq_lens > 0)
        slots.copy_(block * 16 + last % 16)
        graph.replay()
        now = Case(*bound.inputs, bound.q_lens, tuple(lens), bound.shape, bound.scale)
        worst = max(worst, relative_error(out, exact_attention(now)))
    return Check("graph replay", worst < 5e-3, worst)


def check_engine(family: str) -> Check:
    """Stage 03's engine on the GPU, fp32: Hugging Face's greedy tokens, and its log-probabilities to 1e-4."""
    from stages.s01_forward.sampling_params import SamplingParams
    from stages.s03_paged_kv.llm import LLM

    rng = Random(family)
    with tempfile.TemporaryDirectory() as scratch:
        folder = build_tiny(family, Path(scratch) / family)
        llm = LLM(folder, device="cuda", kv_cache_mb=16)
        prompts = [[rng.randrange(3, 500) for _ in range(rng.randint(1, 60))] for _ in range(20)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, logprobs=0, ignore_eos=True))
        worst, same = 0.0, True
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = hf.logits(folder, prompt + output.token_ids)[len(prompt) - 1 : -1].log_softmax(-1)
            same &= expected.argmax(-1).tolist() == output.token_ids
            for row, entry in zip(expected, output.outputs[0].logprobs or (), strict=True):
                worst = max(worst, abs(entry.logprob - row[entry.token_id].item()))
    return Check(f"engine, {family}", same and worst < 1e-4, worst)


SINGLE_CHECKS: tuple[Callable[[], Check], ...] = (check_store, check_permuted_blocks, check_isolation, check_graph)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the report")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (they compile)")
    parser.add_argument("--every", type=int, default=1, help="take every n-th setting of the grid")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_checks needs a CUDA GPU; on a CPU the same kernels run in Triton's interpreter: pytest stages/03")
        return 2
    began = time.perf_counter()
    settings = list(itertools.product(args.dtypes, HEAD_DIMS, GROUPS, BLOCK_SIZES))[:: args.every]
    with ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        checks: list[Check] = []
        for done, some in enumerate(pool.map(attention_checks, settings), start=1):
            checks += some
            for check in some:
                if not check.passed:
                    print(f"FAILED {check}", flush=True)
            if done % 30 == 0:
                print(f"{done} of {len(settings)} settings, {time.perf_counter() - began:.0f} s", flush=True)
    checks += [check() for check in SINGLE_CHECKS]
    checks += [check_engine(family) for family in FAMILIES]
    failed = [check for check in checks if not check.passed]
    result = report(checks, time.perf_counter() - began)
    print(markdown_table(result.save(args.out)))
    return 1 if failed else 0


def report(checks: list[Check], seconds: float) -> Result:
    """How many checks, which failed, and the worst errors of each dtype."""
    failed = [check.name for check in checks if not check.passed]
    result = Result("gpu_checks", hypothesis=(
        "The attention kernel is as exact as torch's own attention, whatever the shape, the lengths and the layout."
    ))  # fmt: skip
    result.measurements = [
        Measurement.single("checks", len(checks), "", note=f"in {seconds:.0f} s"),
        Measurement.single("failed", len(failed), "", note=", ".join(failed)),
    ]
    engines = [check.error for check in checks if check.name.startswith("engine")]
    name = "largest difference of a log-probability to Hugging Face's, engine in fp32"
    result.measurements.append(Measurement.single(name, max(engines), ""))
    for dtype in DTYPES:
        mine = [check for check in checks if check.name.startswith(dtype)]
        if mine:
            worst, ratio = max(c.error for c in mine), max(c.error / c.torch_error for c in mine)
            result.measurements.append(Measurement.single(f"worst relative error, {dtype}", worst, ""))
            result.measurements.append(Measurement.single(f"worst error against torch's, {dtype}", ratio, "x"))
    return result


if __name__ == "__main__":
    sys.exit(main())
