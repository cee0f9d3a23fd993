"""Parts of 07a and 07c alone and by hand: what is sent, what the device makes of it, what is pending, what is read."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stages.s01_forward.generation import Generation
from stages.s01_forward.outputs import SampledToken
from stages.s01_forward.sampling_params import SamplingParams
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.plan import Plan, PlannedRow, RowResult, StepResult
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Step
from stages.s04_continuous_batching.span import Span
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s07_cuda_graph.ahead_scheduler import PENDING, AheadScheduler
from stages.s07_cuda_graph.device_state import DeviceState
from stages.s07_cuda_graph.overlap_engine import OverlapEngine
from stages.s07_cuda_graph.slots import Slots
from stages.s07_cuda_graph.steady import GroupPlan
from stages.s07_cuda_graph.step_inputs import NO_ROW, ON_DEVICE, StepInputs, StepSize, fill, pack

CPU = torch.device("cpu")


def ask(number, prompt, limit=8, *, table=(), **keys) -> Request:
    """A running request with this prompt and these blocks."""
    params = SamplingParams(max_tokens=limit, **keys)
    request = Request(number, Generation(list(prompt), params, seed=number, token_limit=limit))
    request.state, request.sequence.block_table = "running", list(table)
    return request


def row(request, start, end) -> PlannedRow:
    """Positions [start, end); it samples if these are the last that are known."""
    return PlannedRow(request, Span(request.sequence, start, end), end == len(request.sequence.token_ids))


class TestFollow:
    """Three slots and the dummy, four blocks each."""

    def setup_method(self):
        self.state = DeviceState(3, 4, 32, CPU)
        self.slots = Slots(self.state, 4)

    def follow(self, *rows, **keys) -> tuple[list[int], dict[int, int]]:
        """The slots, and the edits, which are made at once."""
        slots = self.slots.follow(Plan(rows, **keys))
        where, what = self.state.take_edits()
        self.state.flat[torch.from_numpy(where).long()] = torch.from_numpy(what)
        return slots, dict(zip(where.tolist(), what.tolist(), strict=True))

    def test_who_comes_is_told_whole(self):
        a, b = ask(1, [5, 6, 7], table=[3, 7]), ask(2, [8, 9], table=[2], temperature=0.5)
        slots, _ = self.follow(row(b, 0, 2), row(a, 1, 3))  # a has found its first token in the prefix cache
        assert sorted(slots) == [1, 2]
        assert self.state.block_tables[slots[1]].tolist()[:2] == [3, 7]
        assert self.state.block_tables[slots[0]].tolist()[:1] == [2]
        assert self.state.length[slots].tolist() == [0, 1]
        assert self.state.sampling.temperature[slots].tolist() == [0.5, 0.0]

    def test_of_a_table_only_what_is_new_is_sent(self):
        a = ask(1, [5, 6, 7], table=[3])
        ((slot,), _) = self.follow(row(a, 0, 3))
        a.sequence.token_ids.append(PENDING)
        assert self.follow(row(a, 3, 4)) == ([slot], {})
        a.sequence.token_ids.append(PENDING)
        a.sequence.block_table.append(9)
        place = 11 * 4 + slot * 4 + 1  # eleven columns of four slots, then four blocks per slot
        assert self.follow(row(a, 4, 5)) == ([slot], {place: 9})

    def test_after_copies_the_table_is_sent_again(self):
        a = ask(1, [5, 6, 7, 8, 9], table=[3, 4])
        ((slot,), _) = self.follow(row(a, 0, 5))
        a.sequence.token_ids.append(PENDING)
        a.sequence.block_table[1] = 6
        self.follow(row(a, 5, 6), copies=((4, 6),))
        assert self.state.block_tables[slot].tolist()[:2] == [3, 6]

    def test_who_leaves_makes_room(self):
        """Three slots, all taken: one ends and one steps back before two others come. One of them needed the host."""
        a, b, c = (ask(number, [5, 6], table=[number], logprobs=1 if number == 2 else None) for number in (1, 2, 3))
        slots, _ = self.follow(row(a, 0, 2), row(b, 0, 2), row(c, 0, 2))
        assert self.slots.on_host == {b}
        a.state, b.state = "finished", "waiting"
        d, e = ask(4, [7], table=[8]), ask(5, [7], table=[9])
        again, _ = self.follow(row(d, 0, 1), row(c, 2, 3), row(e, 0, 1))
        assert again[1] == slots[2]
        assert {again[0], again[2]} == set(slots[:2])
        assert not self.slots.on_host

    def test_who_comes_back_is_told_anew(self):
        """Preempted and started again between two plans, with other blocks, from position 0."""
        a = ask(1, [5, 6, 7], table=[3])
        ((slot,), _) = self.follow(row(a, 0, 3))
        a.num_preemptions, a.sequence.block_table = 1, [4]
        a.sequence.token_ids.append(9)
        self.state.length[slot] = 3
        self.follow(row(a, 0, 4))
        assert self.state.length[slot] == 0
        assert self.state.block_tables[slot, 0] == 4

    def test_the_newest_token_is_sent_unless_the_device_has_it(self):
        a = ask(1, [5, 6, 7, 8], table=[3, 4])
        ((slot,), _) = self.follow(row(a, 0, 3))  # a chunk
        self.follow(row(a, 3, 4))  # the last one, of one token
        assert self.state.last_token[slot] == 8
        self.state.last_token[slot] = 21  # sampled, on the device
        a.sequence.token_ids.append(PENDING)
        self.follow(row(a, 4, 5))
        assert self.state.last_token[slot] == 21


def unpacked(plan, slots, size) -> StepInputs:
    """The inputs as they arrive on the device."""
    inputs, packed = StepInputs(size, 4, CPU), pack(plan, slots, size)
    assert packed.dtype == np.int32
    assert len(packed) == len(inputs.packed)
    inputs.packed.copy_(torch.from_numpy(packed))
    return inputs


class TestPack:
    def test_three_decode_rows_in_a_bucket_of_four(self):
        rows = []
        for number in (1, 2, 3):
            request = ask(number, [5, 6, 7])
            request.sequence.token_ids.append(PENDING)
            rows.append(row(request, 3, 4))
        inputs = unpacked(Plan(tuple(rows)), [2, 1, 3], StepSize(4, 4, queries=1))
        assert inputs.slots.tolist() == inputs.sample_slots.tolist() == [2, 1, 3, 0]
        assert inputs.cu_q.tolist() == [0, 1, 2, 3, 4]
        assert inputs.ids.tolist() == [ON_DEVICE] * 4

    @pytest.mark.parametrize("grouped", [False, True])
    def test_the_longest_row_is_the_first_tile(self, grouped):
        """The order of the rows stays. A row of padding is no tile."""
        rows = []
        for number, length in ((1, 3), (2, 9), (3, 5)):
            request = ask(number, range(length))
            request.sequence.token_ids.append(PENDING)
            rows.append(row(request, length, length + 1))
        plan: Plan = Plan(tuple(rows))
        if grouped:
            plan = GroupPlan(rows, group=None, lengths=[4, 10, 6], begin=[], full=[], end=())
        inputs = unpacked(plan, [2, 1, 3], StepSize(4, 4, queries=1))
        assert inputs.slots.tolist() == [2, 1, 3, 0]
        assert inputs.short_map.tolist() == [[1, 2, 0, NO_ROW], [0, 0, 0, 0]]

    def test_a_mixed_step(self):
        """A decode, a chunk in the middle, a whole prompt, and a chunk of one token; room for three tokens more."""
        a, b, c, d = ask(1, [5, 6]), ask(2, range(10, 20)), ask(3, [7, 8, 9]), ask(4, [21, 22, 23, 24])
        a.sequence.token_ids.append(PENDING)
        plan = Plan((row(a, 2, 3), row(b, 4, 6), row(c, 0, 3), row(d, 2, 3)))
        inputs = unpacked(plan, [4, 1, 3, 2], StepSize(10, 6, queries=0))
        assert inputs.slots.tolist() == [4, 1, 3, 2, 0, 0]
        assert inputs.sample_slots.tolist() == [4, 0, 3, 0, 0, 0]
        assert inputs.cu_q.tolist() == [0, 1, 3, 6, 7, 10, 10]
        assert inputs.ids.tolist()[:7] == [ON_DEVICE, 14, 15, 7, 8, 9, 23]
        assert inputs.short_map[0].tolist() == [0, 3, *[NO_ROW] * 4]

    def test_a_row_with_guesses_samples_after_each_of_its_tokens(self):
        """Stage 08: up to three tokens in a row; one of two rows has guesses, and the tokens of padding a row."""
        a, b = ask(1, [5, 6]), ask(2, [7, 8, 9])
        guesses = PlannedRow(a, Span(a.sequence, 1, 4), samples=True, drafts=(31, 32))
        inputs = unpacked(Plan((guesses, row(b, 2, 3))), [2, 1], StepSize(6, 3, queries=3))
        assert inputs.slots.tolist() == [2, 1, 0]
        assert inputs.cu_q.tolist() == [0, 3, 4, 6]
        assert inputs.sample_slots.tolist() == [2, 2, 2, 1, 0, 0]
        assert inputs.ids.tolist()[:4] == [6, 31, 32, ON_DEVICE]

    def test_tiles_of_attention(self):
        """Rows of one token in one map; the others' tiles of two queries in the other, most keys first."""
        a, b, c = ask(1, [5, 6]), ask(2, range(10, 20)), ask(3, [7, 8, 9])
        plan = Plan((row(c, 0, 3), row(a, 1, 2), row(b, 4, 6)))
        inputs = unpacked(plan, [1, 2, 3], StepSize(8, 4, queries=0, long_tiles=5, queries_per_tile=2))
        assert inputs.short_map.tolist() == [[1, NO_ROW, NO_ROW, NO_ROW], [0, 0, 0, 0]]
        assert inputs.long_map.tolist() == [[2, 0, 0, NO_ROW, NO_ROW], [0, 2, 0, 0, 0]]


class TestFill:
    """The lesson's example: blocks of 4, three requests."""

    def setup_method(self):
        self.state = DeviceState(3, 4, 100, CPU)
        self.state.last_token[1:] = torch.tensor([71, 40, 12])
        self.state.length[1:] = torch.tensor([5, 8, 3])
        for slot, table in enumerate(([3, 7], [2, 5, 6], [4, 8]), start=1):
            self.state.block_tables[slot, : len(table)] = torch.tensor(table)

    def inputs(self, size, slots, cu_q, ids) -> StepInputs:
        inputs = StepInputs(size, 4, CPU)
        inputs.slots.copy_(torch.tensor(slots))
        inputs.cu_q.copy_(torch.tensor(cu_q))
        inputs.ids.copy_(torch.tensor(ids))
        return inputs

    def test_a_decode_step_and_the_next(self):
        inputs = self.inputs(StepSize(4, 4, queries=1), [1, 2, 3, 0], [0, 1, 2, 3, 4], [ON_DEVICE] * 4)
        places = [inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.seq_lens, inputs.block_table]
        fill(inputs, self.state, 4)
        assert places[0].tolist() == [71, 40, 12, 0]
        assert places[1].tolist() == [5, 8, 3, 0]
        assert places[2].tolist() == [29, 24, 19, 0]
        assert places[3].tolist() == [6, 9, 4, 0]
        assert places[4].tolist() == [[3, 7, 0, 0], [2, 5, 6, 0], [4, 8, 0, 0], [0, 0, 0, 0]]
        assert self.state.length.tolist() == [0, 6, 9, 4]
        self.state.last_token[1:] = torch.tensor([72, -1, 13])  # for the second none could be chosen
        fill(inputs, self.state, 4)
        assert places[0].tolist() == [72, 0, 13, 0]
        assert places[1].tolist() == [6, 9, 4, 0]
        assert places[2].tolist() == [30, 25, 32, 0]
        assert self.state.length.tolist() == [0, 7, 10, 5]

    def test_a_mixed_step(self):
        """A decode, a chunk of three, and two padding tokens in a padding row."""
        ids = [ON_DEVICE, 31, 32, 33, 0, 0]
        inputs = self.inputs(StepSize(6, 4, queries=0), [2, 1, 0, 0], [0, 1, 4, 6, 6], ids)
        fill(inputs, self.state, 4)
        assert inputs.input_ids.tolist() == [40, 31, 32, 33, 0, 0]
        assert inputs.positions.tolist() == [8, 5, 6, 7, 0, 0]
        assert inputs.slot_mapping.tolist() == [24, 29, 30, 31, 0, 0]
        assert inputs.seq_lens.tolist() == [9, 8, 0, 0]
        assert self.state.length.tolist() == [0, 8, 9, 3]


class TestAwaitToken:
    def setup_method(self):
        self.scheduler = AheadScheduler(PagedCache(3, 4), SwapSpace(0), 4, 16)  # two blocks, and the dummy
        self.step = Step()

    def test_a_row_that_samples_makes_its_sequence_longer_at_once(self):
        a = ask(1, [5, 6, 7])
        assert self.scheduler.try_row(a, 3, self.step) is True
        assert a.sequence.token_ids == [5, 6, 7, PENDING]
        assert a.sequence.num_new == 1
        assert a.generation.token_ids == []
        assert self.step.rows == [PlannedRow(a, Span(a.sequence, 0, 3), samples=True)]

    def test_a_chunk_brings_no_token(self):
        a, b = ask(1, [5, 6, 7, 8]), ask(2, [9])
        assert self.scheduler.try_row(a, 3, self.step)
        assert a.sequence.token_ids == [5, 6, 7, 8]
        assert self.scheduler.try_row(b, 1, self.step)
        assert b.sequence.token_ids == [9, PENDING]

    def test_without_blocks_nothing_is_pending(self):
        a, b = ask(1, [5, 6, 7]), ask(2, range(10, 18))
        assert self.scheduler.try_row(a, 3, self.step)
        assert self.scheduler.try_row(b, 8, self.step) is False
        assert b.sequence.token_ids == list(range(10, 18))
        assert a.sequence.token_ids == [5, 6, 7, PENDING]

    def test_who_wants_no_token_gets_none(self):
        a = ask(1, [5, 6, 7], limit=0, prompt_logprobs=1)
        assert self.scheduler.try_row(a, 3, self.step)
        assert a.sequence.token_ids == [5, 6, 7]


@dataclass
class Under:
    """A step under way."""

    token: int
    error: BaseException | None = None
    waited: int = field(default=0)

    def wait(self) -> StepResult:
        self.waited += 1
        if self.error:
            raise self.error
        return StepResult((RowResult((SampledToken(self.token),)),))


class TestRead:
    """Three steps of one request each are under way; the scheduler only notes what it is told."""

    def setup_method(self):
        self.requests = [ask(number, [5]) for number in range(3)]
        scheduler = SimpleNamespace(waiting=[], abort=lambda request: setattr(request, "state", "finished"))
        scheduler.update = lambda plan, result: [(plan.rows[0].request, result.rows[0].tokens[0].token_id)]
        self.engine = OverlapEngine(scheduler, SimpleNamespace())
        self.handles = [Under(token) for token in (10, 11, 12)]
        for request, handle in zip(self.requests, self.handles, strict=True):
            self.engine.under_way.append((Plan((row(request, 0, 1),)), handle))

    @pytest.mark.parametrize("lag", [0, 1, 2, 3])
    def test_all_but_the_last(self, lag):
        events = ["before"]
        self.engine.read(lag, events)
        assert events == ["before", *((self.requests[i], 10 + i) for i in range(3 - lag))]
        assert [handle.waited for handle in self.handles] == [int(i < 3 - lag) for i in range(3)]
        assert [handle for _, handle in self.engine.under_way] == self.handles[3 - lag :]

    @pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()])
    def test_a_failed_step_takes_those_behind_it_along(self, error):
        self.handles[1].error = error
        with pytest.raises(type(error)):
            self.engine.read(1, ["before"])
        before, first, *others = self.engine.failed
        assert before == "before"
        assert first == (self.requests[0], 10)
        assert [request for request, _ in others] == self.requests[1:]
        assert {event.finish_reason for _, event in others} == {"error"}
        assert all(type(error).__name__ in request.generation.error for request in self.requests[1:])
        assert [request.state for request in self.requests] == ["running", "finished", "finished"]
        assert not self.engine.under_way
        assert self.handles[2].waited == 0
