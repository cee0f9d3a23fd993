"""A runner that sends the device no more than what changed, replays a graph where there is one, and does not wait."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stages.s01_forward.sampler import sample
from stages.s02_kv_cache.kv_store import KVStore
from stages.s04_continuous_batching.engine import StepHandle
from stages.s04_continuous_batching.plan import Handle, Plan, RowResult, StepResult
from stages.s04_continuous_batching.runner import row_result as full_result
from stages.s07_cuda_graph.common_prefix import common_blocks
from stages.s07_cuda_graph.device_state import DeviceState
from stages.s07_cuda_graph.graphs import Graphs
from stages.s07_cuda_graph.slots import Slots
from stages.s07_cuda_graph.staging import Event, Ring
from stages.s07_cuda_graph.steady import GroupPlan, group_result, row_result
from stages.s07_cuda_graph.step import Step, StepOutputs
from stages.s07_cuda_graph.step_inputs import StepInputs, StepSize, pack

NOTHING = np.empty(0, np.int32)


@dataclass(frozen=True)
class LateHandle:
    """A step that is under way: its tokens are on their way to pinned memory."""

    plan: Plan
    tokens: Tensor  # [R] int32
    arrived: Event
    known: dict[int, RowResult]  # rows whose result the host made

    def wait(self) -> StepResult:
        """The step's result; returns when it is there."""
        self.arrived.synchronize()
        token_ids = self.tokens.tolist()
        if isinstance(self.plan, GroupPlan):
            return group_result(token_ids)
        rows = [
            row_result(token_id) if row.samples else RowResult()
            for row, token_id in zip(self.plan.rows, token_ids, strict=True)
        ]
        for number, result in self.known.items():
            rows[number] = result
        return StepResult(tuple(rows))


def mailbox(state: DeviceState, max_num_tokens: int) -> Ring:
    """Room for all that a step of so many tokens may send.

    Every entry of the state as an edit, each token and a tile for it, and a few numbers for each row.
    """
    return Ring(2 * state.flat.numel() + 3 * max_num_tokens + 2**16, state.flat.device)


class GraphRunner:
    """Does what the plan says, as stage 04's `Runner`, over a state that lives on the device.

    graphs: None: every step is launched operation by operation. queries: tokens of a row that may sample in one step.
    tap: if a list, each step appends the logits [N, V] of the rows that sample (for checks).
    """

    def __init__(
        self, step: Step, host_store: KVStore, graphs: Graphs | None, max_num_tokens: int, queries: int = 1
    ) -> None:
        self.step, self.host_store, self.graphs = step, host_store, graphs
        self.state = step.state
        self.slots = Slots(self.state, step.shape.block_size)
        self.mailbox = mailbox(self.state, max_num_tokens)
        self.out = Ring(self.state.num_slots * queries, self.state.flat.device)
        self.sent: dict[StepSize, tuple[list[int], int]] = {}  # slots and common blocks in a decode graph's inputs
        self.tap: list[Tensor] | None = None

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepHandle:
        """Move blocks, bring the state up to date, start the step. Rows that need the host are waited for."""
        with torch.cuda.device_of(self.state.flat):  # the GPU of kernels, graphs and events
            self.host_store.copy_blocks(plan.swap_out, source=self.step.store)
            self.step.store.copy_blocks(plan.swap_in, source=self.host_store)
            self.step.store.copy_blocks(plan.copies)
            if not plan.rows:
                return Handle(StepResult(()))
            slots = self.slots.follow_group(plan) if isinstance(plan, GroupPlan) else self.slots.follow(plan)
            return self.handle(plan, slots, self.run(plan, slots))

    def run(self, plan: Plan, slots: list[int]) -> StepOutputs:
        """Through a graph, or launch by launch."""
        queries, graphs = self.queries(plan), self.graphs
        if graphs is None:
            return self.launch(plan, slots, queries)
        common = common_blocks(plan, self.step.shape.block_size) if queries == 1 else 0
        size = graphs.size_of(plan, queries, common)
        captured = graphs.get(size) if size else None
        if captured is None:
            return self.launch(plan, slots, queries)
        size = captured.inputs.size
        same = size.decode and self.sent.get(size) == (slots, common)
        self.send(captured.inputs, None if same else self.pack(plan, slots, size, common))
        self.sent[size] = slots, common
        return graphs.replay(captured)

    def launch(self, plan: Plan, slots: list[int], queries: int) -> StepOutputs:
        """Operation by operation, at the plan's own size."""
        size = StepSize(plan.num_tokens, len(slots), queries)
        inputs = StepInputs(size, self.state.blocks_per_slot, self.state.flat.device)
        self.send(inputs, self.pack(plan, slots, size))
        self.step.step_ops.fill(inputs, self.state, self.step.shape.block_size)
        q_lens, seq_lens = [row.span.num_new for row in plan.rows], [row.span.end for row in plan.rows]
        return self.step.run(inputs, self.step.ops.make_plan(q_lens, seq_lens, inputs.block_table, self.step.shape))

    def queries(self, plan: Plan) -> int:
        """1 if every row is one token that samples, else 0; see `StepSize`."""
        return int(isinstance(plan, GroupPlan) or all(row.samples and row.span.num_new == 1 for row in plan.rows))

    def pack(self, plan: Plan, slots: list[int], size: StepSize, common: int = 0) -> np.ndarray:
        """The plan as a step's inputs."""
        return pack(plan, slots, size, common)

    def handle(self, plan: Plan, slots: list[int], outputs: StepOutputs) -> StepHandle:
        """Send the tokens [R] on their way to the host."""
        tokens, arrived = self.bring(outputs.tokens[: len(slots)])
        if self.tap is not None:
            self.tap.append(outputs.logits[[i for i, row in enumerate(plan.rows) if row.samples]].clone())
        return LateHandle(plan, tokens, arrived, self.on_host(plan, slots, outputs))

    def bring(self, tokens: Tensor) -> tuple[Tensor, Event]:
        """Write tokens to pinned memory, in order of the stream: the next step may write over where they were."""
        buffer, arrived = self.out.next()
        there = buffer[: len(tokens)]
        self.step.step_ops.write_out(tokens, there)
        arrived.record()  # once it has happened, the host sees what was written before it
        return there, arrived

    def send(self, inputs: StepInputs, packed: np.ndarray | None) -> None:
        """The step's inputs, if they are not there already, and the edits, if there are any: in one piece."""
        where, what = self.state.take_edits()
        packed = NOTHING if packed is None else packed
        if len(packed) or len(where):
            sent, read = self.mailbox.send([packed, where, what])
            self.step.step_ops.unpack(sent, inputs, self.state, len(packed), len(where))
            read.record()  # behind whoever reads it: until then the buffer may not be filled again

    def on_host(self, plan: Plan, slots: list[int], outputs: StepOutputs) -> dict[int, RowResult]:
        """Results of the rows that the host must see. A token that it chose goes to the device as an edit."""
        if isinstance(plan, GroupPlan) or not any(row.request in self.slots.on_host for row in plan.rows):
            return {}
        rows = [number for number, row in enumerate(plan.rows) if row.request in self.slots.on_host]
        choosing = [n for n in rows if plan.rows[n].samples and plan.rows[n].request.generation.token_limit > 0]
        generations = [plan.rows[n].request.generation for n in choosing]
        tokens = dict(zip(choosing, sample(outputs.logits[choosing], generations), strict=True)) if choosing else {}
        for number, token in tokens.items():
            self.state.edit("last_token", slots[number], token.token_id)
        ends = np.cumsum([row.span.num_new for row in plan.rows])
        hidden = {n: outputs.hidden[ends[n] - plan.rows[n].span.num_new : ends[n]] for n in rows}
        return {n: full_result(self.step.model, tokens.get(n), plan.rows[n], hidden[n]) for n in rows}
