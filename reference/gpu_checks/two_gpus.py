"""Engines on a GPU that is not PyTorch's current one: the same tokens as ever, and the current GPU is left alone.

In fp32, against stage 06 on the CPU. What is not about memory runs on a CPU as well.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from reference.gpu_checks.check import Check
from reference.gpu_checks.fast_engine import Part, expected, ids, prompts, ragged, same, tiny
from stages.s03_paged_kv.llm import LLM as Stage03
from stages.s04_continuous_batching.llm import LLM as Stage04
from stages.s07_cuda_graph.llm import LLM as Stage07
from stages.s08_speculative.llm import LLM as Stage08
from stages.s09_server.llm import LLM as Stage09

GUESSING: dict[str, Any] = {"speculative": "layers:1", "speculative_least_rate": 0.0, "speculative_max_rows": 12}
ENGINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "stage 03": (Stage03, {}),
    "stage 04, swapping": (Stage04, {"kv_cache_mb": 0.2, "swap_mb": 4.0, "max_model_len": 80}),
    "stage 07": (Stage07, {}),
    "stage 07, captured at start": (Stage07, {"capture": "start", "max_num_batched_tokens": 96, "max_num_seqs": 6}),
    "stage 07, no graphs": (Stage07, {"graphs": False}),
    "stage 07, no overlap": (Stage07, {"overlap": False}),
    "stage 08, a draft model": (Stage08, GUESSING),
    "stage 09": (Stage09, {}),
}


def check_engines(device: str) -> list[Check]:
    """Each kind of engine there, with a cache as large as its memory allows: the CPU's tokens."""
    checks = []
    with tiny("qwen3") as folder:
        asked, params = prompts(12), ragged(12)
        wanted = expected(folder, asked, params)
        for name, (llm_class, options) in ENGINES.items():
            llm = llm_class(folder, device=device, dtype="float32", **options)
            checks.append(same(f"{name} on {device}", ids(llm, asked, params), wanted))
    return checks


def check_left_alone(device: str) -> list[Check]:
    """`check_engines`, while cuda:0 is current: it gets no memory, and stays current."""
    before = allocations(0)
    checks, more = check_engines(device), allocations(0) - before
    current = torch.cuda.current_device()
    return [
        *checks,
        Check(f"{device} used, nothing allocated on cuda:0", more == 0, note=f"{more} allocations"),
        Check(f"{device} used, cuda:0 still current", current == 0, note=f"cuda:{current}"),
    ]


def allocations(index: int) -> int:
    """How many tensors this process has ever made on a GPU."""
    found: int = torch.cuda.memory_stats(index).get("allocation.all.allocated", 0)
    return found


def check_turns(devices: Sequence[str]) -> list[Check]:
    """An engine on each, all in this thread: their streams are read in turns, token by token."""
    checks = []
    with tiny("qwen3") as folder:
        asked, params = prompts(12), ragged(12)
        wanted = expected(folder, asked, params)
        for name, (llm_class, options) in ENGINES.items():
            llms = [llm_class(folder, device=device, dtype="float32", **options) for device in devices]
            answers = [[list[int]() for _ in asked] for _ in llms]
            for events in zip_longest(*(llm.stream(asked, params) for llm in llms)):
                for told, event in zip(answers, events, strict=True):
                    if event is not None:
                        told[event.request].append(event.token_id)
            for device, told in zip(devices, answers, strict=True):
                checks.append(same(f"{name}, in turns, on {device}", told, wanted))
    return checks


def check_current(index: int) -> list[Check]:
    """ "cuda" is the GPU that is current when the engine is made, and stays it."""
    with tiny("qwen3") as folder:
        asked, params = prompts(12), ragged(12)
        wanted = expected(folder, asked, params)
        with torch.cuda.device(index):
            llm = Stage07(folder, device="cuda", dtype="float32")
        checks = [same("made while another GPU was current", ids(llm, asked, params), wanted)]
    return [*checks, Check("it has a number", llm.device == torch.device("cuda", index), note=str(llm.device))]


def parts() -> list[Part]:
    """Everything that needs two GPUs."""
    return [(check_left_alone, ("cuda:1",)), (check_turns, (("cuda:0", "cuda:1"),)), (check_current, (1,))]
