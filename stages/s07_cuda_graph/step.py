"""One step on the device, from the host's packed inputs to sampled tokens: all that a CUDA graph holds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stages.s01_forward.model import Model
from stages.s02_kv_cache.kv_store import KVStore
from stages.s03_paged_kv.attention_plan import AttentionShape
from stages.s03_paged_kv.context import PagedContext
from stages.s03_paged_kv.ops import PagedOps
from stages.s07_cuda_graph import cpu_compiled, cpu_forward, sample_torch, step_inputs
from stages.s07_cuda_graph.chunk_context import ChunkContext
from stages.s07_cuda_graph.device_state import DeviceState
from stages.s07_cuda_graph.padded_plan import ChunkPlan, CommonPlan
from stages.s07_cuda_graph.step_inputs import StepInputs


def unpack(sent: Tensor, inputs: StepInputs, state: DeviceState, num_inputs: int, num_edits: int) -> None:
    """What the host sent goes to its places: `num_inputs` entries of `packed`, then the edits' indices and values."""
    sent = sent.to(state.flat.device, non_blocking=True)
    packed, where, what = sent[: num_inputs + 2 * num_edits].split((num_inputs, num_edits, num_edits))
    inputs.packed[:num_inputs] = packed
    state.flat[where.long()] = what


def keep_tokens(tokens: Tensor, slots: Tensor, state: DeviceState) -> None:
    """The sampled tokens [N] become the newest of their slots [N]."""
    state.last_token[slots.long()] = tokens


def write_out(tokens: Tensor, there: Tensor) -> None:
    """The sampled tokens [N] go to the host's memory [N], behind the step and without a wait."""
    there.copy_(tokens, non_blocking=True)


@dataclass(frozen=True)
class StepOps:
    """What surrounds the model within a step; the defaults are the torch versions."""

    unpack: Callable[[Tensor, StepInputs, DeviceState, int, int], None] = unpack
    fill: Callable[[StepInputs, DeviceState, int], None] = step_inputs.fill
    sample: Callable[..., Tensor] = sample_torch.sample_rows
    keep: Callable[[Tensor, Tensor, DeviceState], None] = keep_tokens
    write_out: Callable[[Tensor, Tensor], None] = write_out


def step_ops(kernels: bool) -> StepOps:
    """The Triton versions, or plain torch."""
    if not kernels:
        return StepOps()
    from stages.s07_cuda_graph import sample_kernel, state_kernels

    return StepOps(
        state_kernels.unpack, state_kernels.fill, sample_kernel.sample_rows, state_kernels.keep_tokens,
        state_kernels.write_out,
    )  # fmt: skip


@dataclass(frozen=True)
class StepOutputs:
    """In a graph these are overwritten by the next step, of whatever size."""

    hidden: Tensor  # [T, H]
    logits: Tensor  # [N, V], of each row's last token or of all tokens
    tokens: Tensor  # [N] int32, -1: no token can be chosen


@dataclass(frozen=True)
class FewRows:
    """Another way through the model's weights, for decode steps of at most `most` rows."""

    forward: Callable[[Model, Tensor, Tensor, PagedContext, int], Tensor]  # the last: tokens of a row, at most
    logits: Callable[[Model, Tensor], Tensor]
    most: int


def few_rows(model: Model, compiled: bool = False) -> tuple[FewRows, ...]:
    """`few_rows.py` and from there on `many_rows.py`, where they can serve this model; on a CPU `cpu_*.py`.

    compiled: on a CPU, compile the layers first, for a few rows.
    """
    if model.embed_tokens.weight.device.type == "cpu":
        any_rows = FewRows(cpu_forward.forward, Model.logits, sys.maxsize)
        made = cpu_compiled.compile_layers(model) if compiled else None
        return (FewRows(made.forward, made.logits, made.rows[-1]), any_rows) if made else (any_rows,)
    from stages.s07_cuda_graph import few_rows as few
    from stages.s07_cuda_graph import many_rows as many

    if few.supports(model):
        return ()
    return (
        FewRows(few.forward_few, few.logits_few, few.most_rows(model)),
        FewRows(many.forward_many, Model.logits, many.MOST_ROWS),
    )


@dataclass(frozen=True)
class Step:
    """The parts that a step goes through."""

    model: Model
    ops: PagedOps
    step_ops: StepOps
    store: KVStore
    shape: AttentionShape
    state: DeviceState
    few: tuple[FewRows, ...] = ()  # the first that has room for a step's tokens serves it

    @torch.inference_mode()
    def run(self, inputs: StepInputs, plan: Any) -> StepOutputs:
        """`inputs.packed` and the state -> tokens; the state moves on. `plan`: of the attention op, for these inputs.

        The inputs have been filled already where the plan was made from them.
        """
        context = ChunkContext if isinstance(plan, ChunkPlan) else PagedContext
        ops = self.ops
        if isinstance(plan, CommonPlan):
            from stages.s07_cuda_graph.common_kernel import common_attention

            ops = replace(ops, paged_attention=common_attention)
        ctx = context(
            self.store, ops, inputs.slot_mapping, inputs.block_table, inputs.seq_lens, inputs.cu_q, plan,
            self.shape.head_dim**-0.5,
        )  # fmt: skip
        size = inputs.size
        few = next((few for few in self.few if size.queries and size.tokens <= few.most), None)
        if few:
            hidden = few.forward(self.model, inputs.input_ids, inputs.positions, ctx, size.queries)  # [T, H]
            logits = few.logits(self.model, hidden)  # [N, V]
        else:
            hidden = self.model(inputs.input_ids, inputs.positions, ctx)  # [T, H]
            last = hidden if size.queries else hidden[inputs.cu_q[1:].long() - 1]  # [N, H]
            logits = self.model.logits(last)
        places = inputs.positions + 1 if size.queries > 1 else inputs.seq_lens  # [N]: where the new tokens will stand
        tokens = self.step_ops.sample(logits, inputs.sample_slots, places, self.state.sampling)
        self.step_ops.keep(tokens, inputs.sample_slots, self.state)
        return StepOutputs(hidden, logits, tokens)
