"""What the host sends and what it gets, a step's inputs and its newest tokens, in Triton: one launch each."""

import torch
import triton
import triton.language as tl

from stages.s07_cuda_graph.device_state import DeviceState
from stages.s07_cuda_graph.step_inputs import StepInputs


@triton.jit(do_not_specialize=["num_inputs", "num_edits"])
def _unpack_kernel(sent_ptr, packed_ptr, flat_ptr, num_inputs, num_edits, BLOCK: tl.constexpr):
    """sent: the inputs, the edits' indices, the edits' values. All are asked for at once: they come from the host."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_input, is_edit = place < num_inputs, place < num_edits
    entry = tl.load(sent_ptr + place, mask=is_input)
    where = tl.load(sent_ptr + num_inputs + place, mask=is_edit)
    what = tl.load(sent_ptr + num_inputs + num_edits + place, mask=is_edit)
    tl.store(packed_ptr + place, entry, mask=is_input)
    tl.store(flat_ptr + where, what, mask=is_edit)


def unpack(sent: torch.Tensor, inputs: StepInputs, state: DeviceState, num_inputs: int, num_edits: int) -> None:
    """Scatter int32 `sent`, pinned: `num_inputs` entries of `inputs.packed`, and `num_edits` edits of the state."""
    grid = (triton.cdiv(max(num_inputs, num_edits), 256),)
    _unpack_kernel[grid](sent, inputs.packed, state.flat, num_inputs, num_edits, BLOCK=256, num_warps=8)


def write_out(tokens: torch.Tensor, there: torch.Tensor) -> None:
    """The sampled tokens [N] to pinned memory [N], sooner than a copy, for which the GPU changes to another engine."""
    grid = (triton.cdiv(len(tokens), 256),)
    _unpack_kernel[grid](tokens, there, there, len(tokens), 0, BLOCK=256, num_warps=8)  # the third is for edits: none


@triton.jit(do_not_specialize=["blocks_per_row"])
def _fill_kernel(
    slots_ptr, cu_q_ptr, ids_ptr, input_ids_ptr, positions_ptr, mapping_ptr, seq_lens_ptr, table_ptr, length_ptr,
    last_token_ptr, all_tables_ptr, blocks_per_row, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one row. See `fill` in step_inputs.py."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    first = tl.load(cu_q_ptr + row)
    count = tl.load(cu_q_ptr + row + 1) - first
    start = tl.load(length_ptr + slot)
    newest = tl.maximum(tl.load(last_token_ptr + slot), 0)
    real = slot != 0
    end = tl.where(real, start + count, 0)
    tl.store(seq_lens_ptr + row, end)
    table = all_tables_ptr + slot.to(tl.int64) * blocks_per_row
    mine = table_ptr + row.to(tl.int64) * blocks_per_row
    place = tl.arange(0, BLOCK)
    for at in range(0, tl.cdiv(end, BLOCK_SIZE), BLOCK):
        held = (at + place) * BLOCK_SIZE < end
        tl.store(mine + at + place, tl.load(table + at + place, mask=held), mask=held)
    for at in range(0, count, BLOCK):
        token = at + place
        exists = token < count
        position = tl.where(real, start + token, 0)
        token_id = tl.load(ids_ptr + first + token, mask=exists)
        token_id = tl.where(token_id < 0, newest, token_id)
        tl.store(input_ids_ptr + first + token, token_id.to(tl.int64), mask=exists)
        tl.store(positions_ptr + first + token, position.to(tl.int64), mask=exists)
        block = tl.load(table + position // BLOCK_SIZE, mask=exists).to(tl.int64)
        tl.store(mapping_ptr + first + token, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=exists)
    tl.debug_barrier()  # every thread has read the length
    tl.store(length_ptr + slot, end)


def fill(inputs: StepInputs, state: DeviceState, block_size: int) -> None:
    """As `step_inputs.fill`; of a block table it copies what the row's length needs.

    The first kernel of a step, and launched without programmatic overlap: what the step before wrote is complete.
    """
    _fill_kernel[(inputs.size.rows,)](
        inputs.slots, inputs.cu_q, inputs.ids, inputs.input_ids, inputs.positions, inputs.slot_mapping,
        inputs.seq_lens, inputs.block_table, state.length, state.last_token, state.block_tables,
        state.blocks_per_slot, BLOCK_SIZE=block_size, BLOCK=128, num_warps=4,
    )  # fmt: skip


@triton.jit
def _keep_kernel(tokens_ptr, slots_ptr, last_token_ptr):
    row = tl.program_id(0)
    tl.store(last_token_ptr + tl.load(slots_ptr + row), tl.load(tokens_ptr + row))


def keep_tokens(tokens: torch.Tensor, slots: torch.Tensor, state: DeviceState) -> None:
    """The sampled tokens [N] become the newest of their slots [N]."""
    _keep_kernel[(tokens.shape[0],)](tokens, slots, state.last_token, num_warps=1)
