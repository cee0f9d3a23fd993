"""Read later: how many blocks the KV cache gets, known before any of it is taken."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from stages.s01_forward.model import Model
from stages.s01_forward.sampling_params import check_float

CPU_SHARE = 0.5  # of the memory that is free: other programs live here too
MARGIN = 256 * 2**20  # bytes left alone on a GPU, for what the allocator rounds up and libraries take


def kv_budget_mb(
    model: Model, *, kv_cache_mb: float | None, memory_share: float, num_tokens: int, num_rows: int, reserved: int = 0
) -> float:
    """The cache's budget in units of 2^20 bytes: as the caller says, else what the memory leaves.

    On a GPU: `memory_share` of the whole card, minus what is in use (the weights), the activations of the largest step
    (`num_tokens` tokens, `num_rows` rows; measured by running it), `reserved` bytes and a margin. On a CPU: half of
    what is free, at most 4 GiB.
    """
    if kv_cache_mb is not None:
        check_float("kv_cache_mb", kv_cache_mb, 0, open_low=True)
        return kv_cache_mb
    check_float("memory_share", memory_share, 0, 1, open_low=True)
    device = model.cos.device
    if device.type != "cuda":
        return min(4096.0, CPU_SHARE * free_host_bytes() / 2**20)
    peak = largest_step_bytes(model, num_tokens, num_rows)
    free, total = torch.cuda.mem_get_info(device)
    budget = total * memory_share - (total - free) - peak - reserved - MARGIN
    if budget <= 0:
        raise ValueError(
            f"memory_share {memory_share} of {total / 2**20:.0f} MB leaves nothing for the KV cache: "
            f"{(total - free) / 2**20:.0f} MB are in use and the largest step takes {peak / 2**20:.0f} MB"
        )
    return budget / 2**20


@torch.inference_mode()
def largest_step_bytes(model: Model, num_tokens: int, num_rows: int) -> int:
    """Device memory that the largest step takes at its peak beyond what was there before, found by running it."""
    device = model.cos.device
    num_tokens = min(num_tokens, len(model.cos))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    positions = torch.arange(num_tokens, device=device)
    with torch.cuda.device_of(positions):  # the GPU on which Triton's kernels run
        hidden = model(torch.zeros_like(positions), positions, NoAttention())
    logits = model.logits(hidden[-1:].expand(num_rows, -1)).float()  # [N, V]
    logits.sort(dim=-1)  # the sampler's largest step
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


class NoAttention:
    """A context that stands in for attention where only the size of things matters."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Something of the right shape."""
        return torch.zeros_like(q)


def free_host_bytes() -> float:
    """Memory that programs can have, in bytes; where the system does not say, 4 GiB.

    Files that were read, the weights' among them, stay in memory until somebody needs it: that counts as free.
    """
    try:
        table = Path("/proc/meminfo").read_text(encoding="ascii")
        return 1024.0 * int(table.partition("MemAvailable:")[2].split()[0])
    except (OSError, ValueError, IndexError):  # Windows, macOS
        return 4.0 * 2**30
