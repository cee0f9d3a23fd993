"""What `forward_many` is held to: the model's own forward pass; and the norm that adds parts up: float64.

The same cases run in Triton's interpreter (test_many_rows.py) and on a GPU (`gpu_cases`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stages.s01_forward import layers
from stages.s07_cuda_graph.few_cases import ALLOWED, EPS, GAP, relative_error
from stages.s07_cuda_graph.few_model_cases import ALLOWED_MODEL, SHAPES, ModelCase, config_of, model_cases


@dataclass(frozen=True)
class PartsCase:
    """One call of `norm_kernel.add_rms_norm` with x in parts."""

    parts: int
    rows: int
    size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"norm of {self.parts} parts {self.rows}x{self.size} {str(self.dtype).removeprefix('torch.')}"

    def error(self, device: torch.device) -> float:
        """Relative, the larger one of the sum and its norm; infinite if the sum is not in the residual's place."""
        from stages.s07_cuda_graph.norm_kernel import add_rms_norm

        draw = torch.Generator().manual_seed(self.parts + self.size)
        parts = torch.randn(self.parts, self.rows, self.size, generator=draw).to(device)
        buffer = torch.full((self.rows + 2, self.size + 8), GAP, dtype=self.dtype, device=device)
        residual = buffer[1:-1, : self.size].copy_(torch.randn(self.rows, self.size, generator=draw))
        weight = (1 + 0.3 * torch.randn(self.size, generator=draw)).to(device, self.dtype)
        total = parts.double().sum(0) + residual.double()
        exact = layers.rms_norm(total, weight.double(), EPS)
        out, where = add_rms_norm(parts, residual, weight, EPS)
        kept = where.data_ptr() == residual.data_ptr() and bool(buffer[:, self.size :].isnan().all())
        return max(relative_error(out, exact), relative_error(where, total)) if kept else float("inf")


@dataclass(frozen=True)
class ManyCase:
    """`forward_many` in place of `forward_few`, on one of its cases."""

    case: ModelCase

    @property
    def dtype(self) -> torch.dtype:
        return self.case.dtype

    def __str__(self) -> str:
        return str(self.case).replace("forward_few", "forward_many")

    def error(self, device: torch.device) -> float:
        """As the case's."""
        from stages.s07_cuda_graph.fused_ops import fused_ops
        from stages.s07_cuda_graph.many_rows import forward_many

        return self.case.error(device, fused_ops(device) if device.type == "cuda" else None, forward_many)


def small_cases() -> Iterator[PartsCase | ManyCase]:
    """For the interpreter."""
    for parts, rows, size in ((1, 3, 40), (2, 5, 24), (3, 1, 100)):
        yield PartsCase(parts, rows, size, (torch.float32, torch.float16)[parts % 2])
    yield from map(ManyCase, model_cases())


def large_cases() -> Iterator[PartsCase | ManyCase]:
    """Two layers of each benchmark model, 17 to 380 rows."""
    for name in SHAPES:
        config = config_of(name)
        hidden = config.hidden_size
        yield PartsCase(2, 200, hidden, torch.bfloat16)
        for lens in ((9, 0, 16, 200) * 4 + (5,), (30, 1, 12, 8) * 25, (1, 64) * 128, (1, 9) * 190):
            for dtype in (torch.bfloat16, torch.float32) if hidden < 3584 else (torch.bfloat16,):
                yield ManyCase(ModelCase(name, config, lens, dtype))


def run_case(case: PartsCase | ManyCase) -> tuple[str, float, float]:
    """Runs a case on the GPU: (name, error, allowed)."""
    allowed = ALLOWED if isinstance(case, PartsCase) else ALLOWED_MODEL
    return str(case), case.error(torch.device("cuda")), allowed[case.dtype]


def gpu_cases() -> Iterator[tuple[str, float, float]]:
    """Runs all cases on the GPU: (name, error, allowed)."""
    yield from map(run_case, (*small_cases(), *large_cases()))


def case_error(case: PartsCase | ManyCase) -> float:
    """For the interpreter's process."""
    return case.error(torch.device("cpu"))
