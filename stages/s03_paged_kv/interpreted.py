"""The Triton kernels on a machine without a GPU: Triton's interpreter runs them in numpy, slowly and exactly.

Triton reads `TRITON_INTERPRET` when a kernel is defined, so this needs a process that has not imported Triton yet:

    with interpreter() as pool:
        out = pool.submit(run_attention, arguments).result()
"""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from stages.s03_paged_kv.attention_cases import make_case


def interpreter() -> ProcessPoolExecutor:
    """One process in which kernels are interpreted."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_interpret)


def _interpret() -> None:
    if "triton" in sys.modules:
        raise RuntimeError("Triton was imported before TRITON_INTERPRET could be set")
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def run_attention(arguments: dict[str, Any], **overrides: Any) -> torch.Tensor:
    """The kernel's answer for `make_case(**arguments)`; `overrides` go to `make_plan`. Returns [T, Hq, D]."""
    from stages.s03_paged_kv import kernel

    case = make_case(**arguments)
    planned: dict[str, Any] = {"q_lens": case.q_lens, "seq_lens": case.kv_lens, "shape": case.shape} | overrides
    plan = kernel.make_plan(block_table=case.block_table, **planned)
    return kernel.paged_attention(*case.inputs, plan, case.scale)


def run_store(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`cache` [2, NB, BS, Hkv, D] after the kernel wrote k and v [T, Hkv, D] to the slots [T]."""
    from stages.s03_paged_kv.store_kv import store_kv

    store_kv(k, v, cache[0], cache[1], slots)
    return cache
