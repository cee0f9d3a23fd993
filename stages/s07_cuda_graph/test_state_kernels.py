"""The kernels around the state, in Triton's interpreter: exactly what the torch versions do."""

import copy
import importlib.util
from functools import partial

import numpy as np
import pytest
import torch

from stages.s02_kv_cache.kv_store import KVStore
from stages.s03_paged_kv.attention_plan import AttentionShape
from stages.s03_paged_kv.ops import PagedOps
from stages.s07_cuda_graph import step, step_inputs
from stages.s07_cuda_graph.beforehand import beforehand
from stages.s07_cuda_graph.device_state import DUMMY_SLOT, DeviceState
from stages.s07_cuda_graph.fuzz_state import CONFIG, CheckedStep
from stages.s07_cuda_graph.runner import GraphRunner
from stages.s07_cuda_graph.step_inputs import ON_DEVICE, StepInputs, StepSize

pytest_plugins = ["stages.s07_cuda_graph.beforehand"]
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton has no package for this platform, so its kernels cannot run here", allow_module_level=True)

CPU, VOCAB = torch.device("cpu"), 50


def random_step(seed: int, decode: bool, rows: int, padding: int, blocks: int, block_size: int, longest_chunk: int):
    """A state with long and short sequences in random slots, and a step over some of them; all else is garbage."""
    rng = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=rng, dtype=torch.int32)

    state = DeviceState(rows + 3, blocks, VOCAB, CPU)
    state.flat.copy_(draw(-(2**31), 2**31 - 1, state.flat.numel()))
    state.block_tables.copy_(draw(1, 1000, *state.block_tables.shape))
    state.block_tables[DUMMY_SLOT] = 0
    slots = torch.randperm(rows + 3, generator=rng)[:rows].int() + 1
    counts = torch.ones(rows, dtype=torch.int32) if decode else draw(1, longest_chunk + 1, rows)
    state.length.copy_(draw(0, blocks * block_size - longest_chunk, rows + 4))
    state.length[DUMMY_SLOT] = 0
    state.last_token.copy_(draw(-1, VOCAB, rows + 4))
    tokens = int(counts.sum()) + (padding if decode else 3 * padding)
    inputs = StepInputs(StepSize(tokens, rows + padding, decode), blocks, CPU)
    inputs.packed.copy_(draw(0, VOCAB, inputs.packed.numel()))
    inputs.slots.fill_(DUMMY_SLOT)
    inputs.slots[:rows] = slots
    inputs.cu_q.copy_(torch.arange(rows + padding + 1) if decode else torch.tensor(tokens))
    if not decode:
        inputs.cu_q[: rows + 1] = torch.cat((torch.zeros(1), counts.cumsum(0)))
    inputs.ids[draw(0, 2, tokens).bool()] = ON_DEVICE
    for tensor in (inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.seq_lens):
        tensor.fill_(7_777_777)
    inputs.block_table.fill_(7_777_777)
    return state, inputs


def compare_fill(
    seed: int, decode: bool, rows: int, padding: int, blocks: int, block_size: int, longest_chunk: int
) -> tuple[torch.Tensor, ...]:
    """All that the two versions of `fill` make, each as (torch, kernel)."""
    from stages.s07_cuda_graph import state_kernels

    given, results = random_step(seed, decode, rows, padding, blocks, block_size, longest_chunk), []
    for fill in (step_inputs.fill, state_kernels.fill):
        state, inputs = copy.deepcopy(given)
        fill(inputs, state, block_size)
        held = -(-inputs.seq_lens // block_size)  # of the table, what a row's length needs
        table = inputs.block_table.masked_fill(torch.arange(blocks) >= held[:, None], 0)
        made = (inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.seq_lens, table.flatten())
        results.append(torch.cat([*(each.long() for each in made), state.flat.long(), inputs.packed.long()]))
    return tuple(results)


def compare_fills(**case: int) -> list[tuple[torch.Tensor, ...]]:
    return [compare_fill(seed, **case) for seed in range(2)]


@beforehand(lambda **case: (partial(compare_fills, **case),))
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize(
    ("decode", "rows", "padding", "blocks", "longest_chunk"),
    [
        (True, 1, 0, 20, 1),
        (True, 5, 3, 300, 1),  # more blocks than a program copies at once
        (False, 1, 1, 300, 200),  # more tokens than a program fills at once
        (False, 4, 0, 200, 128),
        (False, 6, 5, 140, 129),
    ],
)
def test_fill(answer, block_size, decode, rows, padding, blocks, longest_chunk):
    assert len(answer) == 2
    for ours, kernels in answer:
        assert torch.equal(ours, kernels)


def compare_unpack(num_inputs: int, num_edits: int) -> tuple[torch.Tensor, ...]:
    from stages.s07_cuda_graph import state_kernels

    rng, results = torch.Generator().manual_seed(num_inputs + num_edits), []
    given = DeviceState(30, 20, VOCAB, CPU), StepInputs(StepSize(600, 30, queries=0), 20, CPU)
    given[1].packed.fill_(-9)
    where = torch.randperm(given[0].flat.numel(), generator=rng)[:num_edits].int()
    noise = torch.randint(-(2**31), 2**31 - 1, (num_inputs + num_edits + 700,), generator=rng, dtype=torch.int32)
    sent = torch.cat((noise[:num_inputs], where, noise[num_inputs:]))
    for unpack in (step.unpack, state_kernels.unpack):
        state, inputs = copy.deepcopy(given)
        unpack(sent, inputs, state, num_inputs, num_edits)
        results.append(torch.cat((inputs.packed, state.flat)))
    return (*results, sent)


@beforehand(lambda num_inputs, num_edits: (compare_unpack, num_inputs, num_edits))
@pytest.mark.parametrize(
    ("num_inputs", "num_edits"), [(0, 1), (1, 0), (5, 300), (256, 256), (257, 255), (600, 3), (3, 600), (511, 513)]
)
def test_unpack(answer, num_inputs, num_edits):
    """And what was not sent stays as it was."""
    ours, kernels, sent = answer
    assert torch.equal(ours, kernels)
    assert torch.equal(ours[:num_inputs], sent[:num_inputs])
    inputs, state = ours[: 5 * 30 + 1 + 600], ours[5 * 30 + 1 + 600 :]
    assert (inputs[num_inputs:] == -9).all()
    where, what = sent[num_inputs : num_inputs + 2 * num_edits].split(num_edits) if num_edits else (sent[:0], sent[:0])
    assert torch.equal(state[where.long()], what)


def rings_of_kernels(rounds: int) -> list[list[int]]:
    """A runner whose step has kernels: the edits and inputs that it sent, and the tokens that came."""
    shape, store = AttentionShape(1, 1, 2, 4, 4), KVStore(CONFIG, 1, 4, device="cpu", dtype=torch.float32)
    state, size = DeviceState(300, 2, VOCAB, CPU), StepSize(5, 5, queries=1)
    runner = GraphRunner(CheckedStep(None, PagedOps(), step.step_ops(True), store, shape, state), store, None, 10)
    inputs, came = StepInputs(size, 2, CPU), []
    for n in range(rounds):
        state.edits[n] = -n
        runner.send(inputs, np.full(inputs.packed.numel(), n, np.int32))
        came += runner.bring(torch.arange(n, 300, dtype=torch.int32))[0].tolist()
    return [state.flat[:rounds].tolist(), inputs.packed.tolist(), came]


@beforehand(lambda: (rings_of_kernels, 5))
def test_kernels_use_the_rings_themselves(answer):
    edits, packed, came = answer
    assert edits == [0, -1, -2, -3, -4]
    assert set(packed) == {4}
    assert came == [token for n in range(5) for token in range(n, 300)]


def compare_keep(slots: list[int]) -> list[list[int]]:
    from stages.s07_cuda_graph import state_kernels

    results = []
    for keep in (step.keep_tokens, state_kernels.keep_tokens):
        state = DeviceState(8, 2, VOCAB, CPU)
        state.flat.fill_(-5)
        tokens = torch.arange(10, 10 + len(slots), dtype=torch.int32)
        keep(tokens, torch.tensor(slots, dtype=torch.int32), state)
        state.last_token[DUMMY_SLOT] = 0  # padding rows meet there, in any order
        results.append(state.flat.tolist())
    return results


@beforehand(lambda slots: (compare_keep, slots))
@pytest.mark.parametrize("slots", [[3], [5, 1, 2], [8, 0, 0, 1, 0]], ids=str)
def test_keep_tokens(answer, slots):
    ours, kernels = answer
    assert ours == kernels
    assert [ours[slot] for slot in slots if slot] == [10 + i for i, slot in enumerate(slots) if slot]
