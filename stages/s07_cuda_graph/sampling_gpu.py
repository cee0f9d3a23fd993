"""The sampling kernels on a real GPU: what they are checked for, and how long they take."""

import functools
from collections.abc import Callable, Iterator

import torch

from stages.s01_forward.sampling_params import SamplingParams
from stages.s03_paged_kv.kernel_workloads import time_calls
from stages.s07_cuda_graph import sample_torch
from stages.s07_cuda_graph.sampling_cases import (
    Case,
    Row,
    chi_square,
    draws_case,
    make_case,
    make_columns,
    probabilities,
)

DRAWS = 50_000
QWEN_VOCABULARY = 151_936
WISHES = {
    "temperature": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=0.8, top_k=50),
    "large top-k": SamplingParams(temperature=1.5, top_k=500),
    "top-p": SamplingParams(temperature=1.0, top_p=0.9),
    "min-p": SamplingParams(temperature=1.5, min_p=0.05),
    "all": SamplingParams(temperature=1.2, top_k=200, top_p=0.9, min_p=0.01),
}


def sampling_gpu_cases(device: str = "cuda") -> Iterator[tuple[str, str]]:
    """(name of the check, what is wrong or ""), one at a time."""
    for vocab_size in (7, 130, 1000, 5000):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            name = f"sampling, {vocab_size} tokens, {dtype}"
            yield name, differences(make_case(400, vocab_size, 1, dtype, device))
    for name, case in large_cases(device):
        yield name, differences(case)
    yield "sampling, neighbours", neighbours(device)
    yield "sampling, graph", graph_replays(device)
    for name, params in WISHES.items():
        yield f"sampling, {DRAWS} draws, {name}", distribution(params, device)


def run_kernel(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and the history afterwards; the case stays as it was."""
    from stages.s07_cuda_graph.sample_kernel import sample_rows

    before = case.columns.history.clone()
    token_ids = sample_rows(*case.inputs)
    after = case.columns.history.clone()
    case.columns.history.copy_(before)
    return token_ids, after


def differences(case: Case) -> str:
    """The kernels against torch on the same device: every token, every count, and the logits as they were."""
    logits = case.logits.clone()
    token_ids, history = run_kernel(case)
    if not torch.equal(logits.nan_to_num(), case.logits.nan_to_num()):
        return "the logits have changed"
    expected = torch.cat([
        sample_torch.sample_rows(logits[rows], case.slots[rows], case.positions[rows], case.columns)
        for rows in torch.arange(len(logits), device=logits.device).split(16)  # the torch version takes much memory
    ])  # fmt: skip
    wrong = (token_ids != expected).nonzero().flatten().tolist()
    if wrong:
        each = [f"{case.rows[n].params}: {token_ids[n].item()} for {expected[n].item()}" for n in wrong[:3]]
        return f"{len(wrong)} of {len(logits)} tokens differ: {'; '.join(each)}"
    return "" if torch.equal(history, case.columns.history) else "the histories differ"


def large_cases(device: str) -> Iterator[tuple[str, Case]]:
    """A real vocabulary: rows of every kind, then the filters on bf16 logits that are flat, and that are peaked."""
    for dtype in (torch.float32, torch.bfloat16):
        yield f"sampling, {QWEN_VOCABULARY} tokens, {dtype}", make_case(96, QWEN_VOCABULARY, 2, dtype, device)
    wishes = [*WISHES.values(), SamplingParams(temperature=1.5, top_k=3000)]  # the last is more than can be gathered
    rows = [Row(params, seed=n) for n in range(12) for params in wishes]
    slots = torch.arange(1, len(rows) + 1, dtype=torch.int32, device=device)
    columns = make_columns(rows, slots, QWEN_VOCABULARY)
    for kind in ("flat", "peaked"):
        logits = workload_logits(len(rows), kind, device)
        yield f"sampling, {QWEN_VOCABULARY} tokens, {kind}", Case(rows, logits, slots, slots.long(), columns)


def workload_logits(rows: int, kind: str, device: str) -> torch.Tensor:
    """bf16 [N, V]: "flat" as those of random weights, or "peaked" as a trained model's, 30 tokens above the rest."""
    generator = torch.Generator(device).manual_seed(0)
    logits = 2 * torch.randn(rows, QWEN_VOCABULARY, generator=generator, device=device)
    if kind == "peaked":
        logits[:, torch.arange(30, device=device) * 5003] += 14.0
    return logits.to(torch.bfloat16)


def neighbours(device: str) -> str:
    """A row alone draws what it draws among 400."""
    case = make_case(400, 5000, 5, torch.bfloat16, device)
    together, _ = run_kernel(case)
    for n in range(0, 400, 13):
        one = slice(n, n + 1)
        alone, _ = run_kernel(Case([], case.logits[one], case.slots[one], case.positions[one], case.columns))
        if alone[0] != together[n]:
            return f"row {n} drew {together[n].item()} among others and {alone[0].item()} alone"
    return ""


def graph_replays(device: str) -> str:
    """A captured step draws what an eager one draws, for other logits, slots and positions than at its capture."""
    from stages.s07_cuda_graph.sample_kernel import sample_rows

    case = make_case(64, 5000, 6, torch.bfloat16, device)
    logits, slots, positions, columns = case.inputs
    static = (torch.zeros_like(logits), torch.zeros_like(slots), torch.zeros_like(positions))
    sample_rows(*static, columns)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids = sample_rows(*static, columns)
    before = columns.history.clone()
    for shift in range(3):
        for target, source in zip(static, (logits, slots, positions), strict=True):
            target.copy_(source.roll(shift, 0))
        graph.replay()
        replayed = token_ids.roll(-shift, 0)
        columns.history.copy_(before)
        if not torch.equal(replayed, sample_rows(*case.inputs)):
            return f"replay {shift} differs"
        columns.history.copy_(before)
    return ""


def distribution(params: SamplingParams, device: str) -> str:
    """The kernels' draws against the definition in float64."""
    logits = 2 * torch.randn(1000, generator=torch.Generator().manual_seed(1))
    token_ids, _ = run_kernel(draws_case(logits.to(device), DRAWS, params))
    value = chi_square(token_ids, probabilities(logits, params))
    return "" if abs(value) < 4 else f"chi-square is {value:.1f} times its spread off"


def time_sampling(device: str = "cuda") -> None:
    """Print milliseconds per call, in a CUDA graph of eight calls, over the vocabulary of Qwen in bf16."""
    greedy, plain = SamplingParams(), SamplingParams(temperature=1.0)
    both = SamplingParams(temperature=0.7, top_k=20, top_p=0.95)
    top_p = SamplingParams(temperature=1.0, top_p=0.95)
    penalised = SamplingParams(temperature=1.0, repetition_penalty=1.1)
    settings = [
        ("greedy", greedy, "flat"), ("temperature", plain, "flat"), ("temperature, penalty", penalised, "flat"),
        ("top-k 20, top-p 0.95", both, "peaked"), ("top-k 20, top-p 0.95", both, "flat"),
        ("top-p 0.95", top_p, "peaked"), ("top-p 0.95", top_p, "flat"),
    ]  # fmt: skip
    for count in (1, 16, 64, 256):
        for name, params, kind in settings:
            calls: list[Callable[[], object]] = [timed_call(count, params, kind, device)] * 8
            print(f"{count:4} rows, {name:22} {kind:7} {1e3 * time_calls(calls).median:8.4f} ms", flush=True)


def timed_call(count: int, params: SamplingParams, kind: str, device: str) -> Callable[[], object]:
    """One call for `count` rows of these wishes, each with its own seed."""
    from stages.s07_cuda_graph.sample_kernel import sample_rows

    rows = [Row(params, seed=n) for n in range(count)]
    slots = torch.arange(1, count + 1, dtype=torch.int32, device=device)
    columns = make_columns(rows, slots, QWEN_VOCABULARY)
    return functools.partial(sample_rows, workload_logits(count, kind, device), slots, slots.long(), columns)
