"""For checks: the ways of a graph on a machine that has none. Fixed inputs and outputs, padded sizes, and poison.

What a GPU leaves undefined is NaN here: what attention says of padding, the dummy block, and outputs nobody may read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor

from stages.s03_paged_kv.paged_attention import GatherPlan, paged_attention
from stages.s07_cuda_graph.graphs import Captured, Graphs
from stages.s07_cuda_graph.padded_plan import padded_plan
from stages.s07_cuda_graph.step import Step, StepOutputs
from stages.s07_cuda_graph.step_inputs import StepInputs, StepSize

GARBAGE = 77_777_777  # in inputs that were not sent: no token, no block, no slot


def poisoned_attention(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, seq_lens: Tensor, cu_q: Tensor, plan: GatherPlan, scale: float
) -> Tensor:
    """As `paged_attention`, and NaN for tokens of padding rows, which no tile of the kernel computes."""
    out = paged_attention(q, k, v, block_table, seq_lens, cu_q, plan, scale)
    padding = (seq_lens == 0).repeat_interleave(cu_q.diff().long())  # [T]
    return out.masked_fill(padding[:, None, None], float("nan"))


@dataclass
class Replay:
    """Stands where a CUDA graph stands: the same step over the same memory, again."""

    graphs: FakeGraphs
    inputs: StepInputs
    outputs: StepOutputs

    def replay(self) -> None:
        inputs, step, out = self.inputs, self.graphs.step, self.outputs
        inputs.input_ids.fill_(GARBAGE), inputs.positions.fill_(GARBAGE), inputs.slot_mapping.fill_(GARBAGE)
        inputs.seq_lens.fill_(GARBAGE), inputs.block_table.fill_(GARBAGE)
        step.step_ops.fill(inputs, step.state, step.shape.block_size)
        seq_lens, q_lens = inputs.seq_lens.tolist(), inputs.cu_q.diff().tolist()
        rows = len([length for length in seq_lens if length])  # padding comes after all others
        assert not inputs.size.only_chunks or min(q_lens[:rows]) > 1, "no launch has rows of one token there"
        if inputs.size.common:  # the kernel finds these keys by the first row, and every row has others
            lead = int(inputs.common)
            assert lead * step.shape.block_size < min(seq_lens[:rows])
            inputs.block_table[1:rows, :lead] = inputs.block_table[0, :lead]
        plan = step.ops.make_plan(q_lens[:rows], seq_lens[:rows], inputs.block_table[:rows], step.shape)
        new = step.run(inputs, plan)
        for place, value in ((out.hidden, new.hidden), (out.logits, new.logits), (out.tokens, new.tokens)):
            place.copy_(value)


class FakeGraphs(Graphs):
    """Sizes are chosen as on a GPU; a replay is computed in torch. Takes over a step's engine on a CPU."""

    def __init__(self, step: Step, max_num_seqs: int, max_num_tokens: int, longest: int, common: bool = True) -> None:
        with patch.multiple(torch.cuda, graph_pool_handle=lambda: (0, 0), Stream=object):
            super().__init__(step, max_num_seqs, max_num_tokens, longest, common)
        self.step = replace(step, ops=replace(step.ops, paged_attention=poisoned_attention))
        step.store.data[:, :, 0] = float("nan")

    def capture(self, size: StepSize) -> Captured:
        state, model = self.step.state, self.step.model
        inputs = StepInputs(size, state.blocks_per_slot, state.flat.device)
        inputs.packed.fill_(GARBAGE)
        hidden = torch.full((size.tokens, model.config.hidden_size), float("nan"), dtype=self.step.store.data.dtype)
        logits = hidden.new_full((size.samples, model.config.vocab_size), float("nan"))
        outputs = StepOutputs(hidden, logits, torch.full((size.samples,), GARBAGE, dtype=torch.int32))
        graph = Replay(self, inputs, outputs)
        return Captured(inputs, padded_plan(inputs, self.step.shape, self.longest), graph, outputs)  # type: ignore[arg-type]
