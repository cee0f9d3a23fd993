"""y = x W^T + b on a CPU, for few tokens: as fast as the memory delivers W, if every core reads a part of it.

PyTorch's own product leaves that to its libraries. For one token MKL's reads W on one core alone; for two to some
thirty it is faster with the operands exchanged; and a processor without instructions for bf16 is slow at it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 32  # tokens up to which W is the left operand; with more, writing the result the other way round costs as much
NARROW = 3  # tokens up to which bf16 is multiplied as it is: then it is read in half the time, and that decides
TILE = 2**21  # weights that are taken at once: widened to fp32 they are 8 MB, which a cache holds until they are used


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N], as `F.linear`; sums of bf16 are exact to fp32 here.

    In fp32 an x that lies column by column gives a result that does.
    """
    (T, K), narrow = x.shape, weight.dtype != torch.float32
    if not narrow and T > 1 and x.stride(0) == 1:
        turned = (weight @ x.t()).t()
        return turned if bias is None else turned.add_(bias)
    if narrow and (T <= NARROW or multiplies_bf16()):
        return F.linear(x, weight, bias)
    wide, rows = x.float(), max(1, TILE // K)
    if len(weight) <= rows or not (narrow or 1 < T <= FEW):
        out = product(wide, weight.float()).to(x.dtype).contiguous()
    else:
        out = x.new_empty(T, len(weight))
        for tile, place in zip(weight.split(rows), out.split(rows, dim=1), strict=True):
            place.copy_(product(wide, tile.float()))  # [T, rows]
    return out if bias is None else out.add_(bias)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in fp32: x [T, K], weight [N, K] -> [T, N], not always contiguous."""
    (T, K), N = x.shape, len(weight)
    if 1 < T <= FEW:
        # Padded: MKL takes longer for 15 columns than for 16.
        columns = F.pad(x, (0, 0, 0, power_of_two(T) - T)).t()
        return (weight @ columns)[:, :T].t()
    parts = torch.get_num_threads()
    if T != 1 or N % parts:
        return F.linear(x, weight)
    return torch.bmm(weight.view(parts, N // parts, K), x.t().expand(parts, K, 1)).view(1, N)


def power_of_two(number: int) -> int:
    """The least that is not below `number`."""
    return 1 << (number - 1).bit_length()


def multiplies_bf16() -> bool:
    """Has this processor instructions that PyTorch's libraries use for products in bf16?"""
    return torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "SVE"))
