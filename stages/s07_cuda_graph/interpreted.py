"""This stage's kernels in Triton's interpreter; each function here runs in the process of `interpreter()`."""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from stages.s03_paged_kv.interpreted import interpreter as interpreter
from stages.s07_cuda_graph.norm_cases import Errors, NormCase
from stages.s07_cuda_graph.sampling_cases import Case


def run_norm(op: str, *arguments: Any) -> Any:
    """What the kernel that serves `op` returns."""
    return _norm_kernel(op)(*arguments)


def compare_norm(case: NormCase, many: int = 4096) -> Errors:
    """The kernel against the torch function, with several rows in a program from `many` rows on."""
    from stages.s07_cuda_graph import norm_kernel, rope_kernel

    with patch.object(norm_kernel, "MANY_ROWS", many), patch.object(rope_kernel, "MANY_TOKENS", many):
        return case.compare(_norm_kernel(case.op), torch.device("cpu"))


def _norm_kernel(op: str) -> Callable[..., Any]:
    from stages.s07_cuda_graph import norm_kernel, rope_kernel, silu_kernel

    modules = {"norm_rope": rope_kernel, "silu_mul": silu_kernel}
    return getattr(modules.get(op, norm_kernel), op)


SMALL = {"chunk": 256, "tile": 256, "candidates": 64}  # many chunks and tiles, and more logits than there is room for


def run_sample(case: Case, **sizes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The token ids [N] that the sampling kernels choose, and history [S, V] and logits [N, V] afterwards."""
    from stages.s07_cuda_graph.row_kernel import Sizes
    from stages.s07_cuda_graph.sample_kernel import sample_rows

    case = copy.deepcopy(case)  # tensors from another process are shared with it
    return sample_rows(*case.inputs, Sizes(**(SMALL | sizes))), case.columns.history, case.logits


def run_filter(case: Case, **sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the filter kernel cuts each row: floors and limits [N]."""
    from stages.s07_cuda_graph.filter_kernel import filter_rows
    from stages.s07_cuda_graph.row_kernel import Sizes

    return filter_rows(case.logits, case.slots, case.columns, Sizes(**(SMALL | sizes)))
