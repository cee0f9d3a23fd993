"""What attention over common keys is held to: exact attention, with NaN wherever nobody must look.

The same cases run in Triton's interpreter (test_common_prefix.py) and on a GPU (`python -m reference.gpu_checks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stages.s03_paged_kv.attention_cases import exact_attention, make_case
from stages.s03_paged_kv.tile_sizes import next_power_of_2
from stages.s07_cuda_graph.padded_plan import padded_plan
from stages.s07_cuda_graph.step_inputs import StepInputs, StepSize, longest_first


@dataclass(frozen=True)
class CommonCase:
    """A decode step: `own` keys of each row, the newest token's included, behind `blocks` common blocks of 16."""

    own: tuple[int, ...]
    blocks: int
    num_kv_heads: int = 1
    group: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    padding: int = 2  # rows

    def __str__(self) -> str:
        rows = f"{len(self.own)} rows with {min(self.own)} to {max(self.own)}" if len(self.own) > 9 else f"{self.own}"
        heads = f"{self.num_kv_heads} x {self.group} heads of {self.head_dim}"
        return f"{rows} after {self.blocks} blocks, {heads}, {str(self.dtype).removeprefix('torch.')}"

    def run(self, device: str = "cpu") -> float:
        """The largest error: with the plan of a graph, padding rows of NaN, and NaN in all blocks that have gone."""
        from stages.s07_cuda_graph.common_kernel import common_attention

        rows, lengths = len(self.own), [16 * self.blocks + own for own in self.own]
        case = make_case(
            [1] * rows, lengths, num_kv_heads=self.num_kv_heads, group=self.group, head_dim=self.head_dim,
            dtype=self.dtype, device=device,
        )  # fmt: skip
        gone = case.block_table[1:, : self.blocks].flatten().long()
        case.k_cache[gone], case.v_cache[gone] = float("nan"), float("nan")
        case.block_table[1:, : self.blocks] = case.block_table[0, : self.blocks]

        longest, padded = next_power_of_2(max(lengths)), rows + self.padding
        inputs = StepInputs(StepSize(padded, padded, queries=1, common=True), longest // 16 + 1, torch.device(device))
        inputs.cu_q.copy_(torch.arange(padded + 1))
        inputs.short_map.copy_(torch.from_numpy(longest_first(dict(enumerate(lengths)), padded)))
        inputs.common.fill_(self.blocks)
        inputs.seq_lens.zero_()
        inputs.seq_lens[:rows] = case.seq_lens
        inputs.block_table[:rows, : case.block_table.shape[1]] = case.block_table[:, : inputs.block_table.shape[1]]
        q = case.q.new_full((padded, *case.q.shape[1:]), float("nan"))
        q[:rows] = case.q
        out = common_attention(
            q, case.k_cache, case.v_cache, inputs.block_table, inputs.seq_lens, inputs.cu_q,
            padded_plan(inputs, case.shape, longest), case.scale,  # type: ignore[arg-type]
        )  # fmt: skip
        return (out[:rows].double() - exact_attention(case)).abs().max().item()


def small_cases() -> Iterator[CommonCase]:
    """For the interpreter. A tile has 64 keys, 4 blocks, and a split two tiles or more."""
    yield CommonCase((1,), 1, padding=0)  # nothing of its own but its newest token
    yield CommonCase((1, 16, 17), 4, group=3)
    yield CommonCase((5, 300), 3, num_kv_heads=2, group=1)  # own keys in several splits
    yield CommonCase((2, 1), 5, group=7, head_dim=80)
    yield CommonCase((9, 1, 33), 8, head_dim=128, dtype=torch.float16)
    yield CommonCase((4, 70), 9, group=1, head_dim=128)
    yield CommonCase(tuple(range(1, 24)), 41, group=3)  # 69 queries: two tiles; 11 tiles of keys, the last ragged
    yield CommonCase((7, 200), 0)  # as in the step that is captured


def large_cases() -> Iterator[CommonCase]:
    """For a GPU: the numbers of rows and the heads of real steps."""
    own = tuple(1 + 37 * number % 150 for number in range(61))
    for kv_heads, group in ((8, 2), (2, 6), (4, 7), (1, 1)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for dim in (64, 80, 128):
                yield CommonCase(own, 131, kv_heads, group, dim, dtype, padding=3)
        yield CommonCase(own[:17] + (3000,), 32, kv_heads, group, 128, torch.bfloat16, padding=6)
        yield CommonCase(own * 4, 600, kv_heads, group, 128, torch.bfloat16, padding=12)
    yield CommonCase(own[:20], 40, 2, 2, 256, torch.bfloat16)
    yield CommonCase(own[:20], 40, 2, 2, 256, torch.float32)
