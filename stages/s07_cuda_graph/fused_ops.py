"""The table of operations of this stage: stage 03's, with fused kernels in place of several torch calls each.

On a CPU, with what is faster there: another matrix product, and fewer calls.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import torch

from stages.s03_paged_kv.ops import PagedOps, paged_ops
from stages.s07_cuda_graph import cpu_attention, cpu_forward, cpu_linear


def has_kernels(device: torch.device) -> bool:
    """Can Triton's kernels run there?"""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def fused_ops(device: torch.device, *, fused: bool = True) -> PagedOps:
    """If `fused`: Triton's kernels on a CUDA GPU where Triton is installed, `cpu_*` on a CPU. Else stage 03's table."""
    ops = paged_ops(device)
    if fused and device.type == "cpu":
        return replace(
            ops,
            rms_norm=cpu_forward.rms_norm,
            add_rms_norm=cpu_forward.add_rms_norm,
            linear=cpu_linear.linear,
            make_plan=cpu_attention.make_plan,
            paged_attention=cpu_attention.paged_attention,
        )
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
