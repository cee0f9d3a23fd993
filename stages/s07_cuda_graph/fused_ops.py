"""The table of operations of this stage: stage 03's, with the fused kernels in place of several torch calls each."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import torch

from stages.s03_paged_kv.ops import PagedOps, paged_ops


def has_kernels(device: torch.device) -> bool:
    """Can Triton's kernels run there?"""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def fused_ops(device: torch.device, *, fused: bool = True) -> PagedOps:
    """Fused Triton kernels on a CUDA GPU where Triton is installed and `fused` is set; stage 03's table otherwise."""
    ops = paged_ops(device)
    if not fused or not has_kernels(device):
        return ops
    from stages.s07_cuda_graph import norm_kernel, rope_kernel, silu_kernel

    return replace(
        ops,
        rms_norm=norm_kernel.rms_norm,
        add_rms_norm=norm_kernel.add_rms_norm,
        norm_rope=rope_kernel.norm_rope,
        silu_mul=silu_kernel.silu_mul,
    )
