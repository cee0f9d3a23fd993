"""Stage 03 on a GPU: the attention kernel over the whole grid of shapes, what is around it, and the engine.

The grid: dtypes x head sizes x group sizes x block sizes, each in four to nine kinds of batch whose lengths lie around
multiples of the block size. In half precision the error against float64 may be at most 1.1 times that of torch's own
attention.
"""

import itertools
import tempfile
from pathlib import Path
from random import Random

import torch

from reference import hf
from reference.checkpoints import FAMILIES, build_tiny
from reference.gpu_checks.check import Check, relative_error, within
from stages.s03_paged_kv import paged_attention as torch_version
from stages.s03_paged_kv.attention_cases import Case, exact_attention, make_case

Setting = tuple[str, int, int, int]  # dtype, head size, group, block size
DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 2, 3, 4, 7, 8)
BLOCK_SIZES = (16, 32, 64)
# The first four with every block size, the others with the smallest.
KINDS = ("decode", "decode_split", "prefill", "chunk", "verify", "verify_split", "chunk_split", "mixed", "long_prompt")
ALLOWED_RATIO = 1.1  # of torch's error, in half precision
ALLOWED_FLOAT32 = 1e-5  # relative, in float32


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


def attention_checks(setting: Setting) -> list[Check]:
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
        allowed = ALLOWED_FLOAT32 if dtype == "float32" else ALLOWED_RATIO * torch_error
        checks.append(within(f"{dtype} D{head_dim} G{group} B{block_size} {kind}", error, allowed, dtype))
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
    return within("graph replay", worst, 5e-3)


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
    return Check(f"engine, {family}", same and worst < 1e-4, worst, 1e-4, "log-probability, engine in fp32")


def grid(dtypes: tuple[str, ...] = DTYPES, every: int = 1) -> list[Setting]:
    """All settings, or every n-th."""
    return list(itertools.product(dtypes, HEAD_DIMS, GROUPS, BLOCK_SIZES))[::every]


def engine_checks() -> list[Check]:
    """The checks around the grid."""
    return [
        *(check() for check in (check_store, check_permuted_blocks, check_isolation, check_graph)),
        *(check_engine(family) for family in FAMILIES),
    ]
