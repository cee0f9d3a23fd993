"""The operations that this stage adds to the table: writing K/V to slots, and attention through block tables."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.s01_forward.ops import Ops
from stages.s03_paged_kv import paged_attention as in_torch


@dataclass(frozen=True)
class PagedOps(Ops):
    """The defaults are the torch versions. `make_plan` does, once per step, what all layers would do alike."""

    make_plan: Callable[..., Any] = in_torch.make_plan
    store_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] = in_torch.store_kv
    paged_attention: Callable[..., Tensor] = in_torch.paged_attention


def paged_ops(device: torch.device) -> PagedOps:
    """Triton kernels on a CUDA GPU where Triton is installed, plain torch everywhere else."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return PagedOps()
    from stages.s03_paged_kv import kernel

    return PagedOps(make_plan=kernel.make_plan, store_kv=kernel.store_kv, paged_attention=kernel.paged_attention)
