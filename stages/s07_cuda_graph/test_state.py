"""What lies on the device of each request, and the inputs that a step makes of it."""

from typing import Any

import numpy as np
import pytest
import torch

from stages.s01_forward.generation import Generation
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.kv_store import KVStore
from stages.s03_paged_kv.attention_plan import AttentionShape
from stages.s03_paged_kv.ops import PagedOps
from stages.s04_continuous_batching.plan import Plan, PlannedRow
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.span import Span
from stages.s07_cuda_graph.beforehand import beforehand
from stages.s07_cuda_graph.device_state import DUMMY_SLOT, DeviceState
from stages.s07_cuda_graph.fuzz_state import CONFIG, CheckedStep, StateFuzz
from stages.s07_cuda_graph.runner import GraphRunner
from stages.s07_cuda_graph.slots import Slots, needs_host
from stages.s07_cuda_graph.staging import DEPTH, Ring
from stages.s07_cuda_graph.step import StepOps, keep_tokens, unpack
from stages.s07_cuda_graph.step_inputs import ON_DEVICE, StepInputs, StepSize, fill, pack, tile_maps

pytest_plugins = ["stages.s07_cuda_graph.beforehand"]
CPU, VOCAB, BLOCK = torch.device("cpu"), 50, 4
GARBAGE = 7_777_777


def make_state(slots: int = 4, blocks: int = 6) -> DeviceState:
    return DeviceState(slots, blocks, VOCAB, CPU)


def request(number: int, length: int, blocks: list[int], *, known: int = 0, **keys) -> Request:
    """A running one whose first `known` tokens have K/V."""
    generation = Generation(list(range(length)), SamplingParams(**keys), seed=keys.get("seed", 0), token_limit=9)
    made = Request(number, generation, state="running")
    made.sequence.block_table, made.sequence.num_kv = blocks, known
    return made


def row(entry: Request, start: int, end: int) -> PlannedRow:
    return PlannedRow(entry, Span(entry.sequence, start, end), samples=end == len(entry.sequence.token_ids))


def send(state: DeviceState, inputs: StepInputs, packed: np.ndarray) -> None:
    """As the runner does."""
    where, what = state.take_edits()
    sent = torch.from_numpy(np.concatenate((packed, where, what, np.full(9, GARBAGE, np.int32))))
    unpack(sent, inputs, state, len(packed), len(where))


def inputs_for(state: DeviceState, slots: Slots, plan: Plan, size: StepSize) -> StepInputs:
    """A step's inputs, in memory full of garbage."""
    inputs = StepInputs(size, state.blocks_per_slot, CPU)
    for tensor in (inputs.packed, inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.seq_lens):
        tensor.fill_(GARBAGE)
    inputs.block_table.fill_(GARBAGE)
    places = slots.follow(plan)
    send(state, inputs, pack(plan, places, size))
    fill(inputs, state, BLOCK)
    return inputs


@beforehand(lambda: (StateFuzz(seed=3).run, 1_500))
def test_random_loads(answer):
    """Every input of every step, through padded sizes and exact ones, while requests come, go, and come back."""
    for kind in ("step ahead", "group", "padded step", "preemption", "swap in", "copy", "failed step", "mixed step"):
        assert answer[kind] > 5, kind


class TestColumns:
    def test_floats_are_sent_by_their_bits(self):
        state = make_state()
        values = [0.1, -0.0, 1e6, 1e-45, 3.3e38, float("inf")]
        for slot, value in enumerate(values[:4], start=1):
            state.edit("temperature", slot, value)
            state.edit("presence", slot, values[-slot])
        where, what = state.take_edits()
        state.flat[torch.from_numpy(where).long()] = torch.from_numpy(what)
        expected = torch.tensor([[0.0, *values[:4]], [0.0, *values[:1:-1]]])
        got = torch.stack([state.sampling.temperature, state.sampling.presence])
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32))

    @pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -1, -(2**31), -(2**63)])
    def test_seeds_of_64_bits(self, seed):
        """Other columns and slots stay as they are."""
        state, entry = make_state(), request(0, 3, [1], temperature=0.5)
        entry.generation.seed = seed
        before = state.flat.clone()
        state.edit_sampling(2, entry.generation, on_host=False)
        where, what = state.take_edits()
        state.flat[torch.from_numpy(where).long()] = torch.from_numpy(what)
        low, high = int(state.sampling.seed_low[2]) & 0xFFFF_FFFF, int(state.sampling.seed_high[2])
        assert (high << 32) | low == seed
        changed = (state.flat != before).nonzero()[:, 0].tolist()
        assert all(index % state.num_slots == 2 for index in changed)
        assert max(changed, default=0) < state.num_slots * 11

    def test_edits_are_taken_once_and_the_last_one_counts(self):
        state = make_state()
        state.edit("length", 1, 5)
        state.edit_blocks(1, 4, [8, 9])
        state.edit("length", 1, 6)
        where, what = state.take_edits()
        table = state.num_slots * 11 + 1 * state.blocks_per_slot
        edits = dict(zip(where.tolist(), what.tolist(), strict=True))
        assert edits == {state.num_slots + 1: 6, table + 4: 8, table + 5: 9}
        assert [len(part) for part in state.take_edits()] == [0, 0]

    def test_blocks_that_are_staged_again_before_they_are_sent(self):
        """A step that failed has sent nothing: the next one stages anew, and nothing is sent twice."""
        state = make_state()
        table = state.num_slots * 11 + 2 * state.blocks_per_slot
        for staged, expected in (
            ([(1, [5, 6, 7]), (4, [8])], {1: 5, 2: 6, 3: 7, 4: 8}),  # it grew
            ([(1, [5, 6, 7]), (2, [8])], {1: 5, 2: 8}),  # blocks from the second on were given back
            ([(3, [5, 6]), (0, [7, 8])], {0: 7, 1: 8}),  # somebody else sits there
            ([(0, [5, 6]), (0, [7, 8, 9])], {0: 7, 1: 8, 2: 9}),
        ):
            for first, blocks in staged:
                state.edit_blocks(2, first, blocks)
            where, what = (part.tolist() for part in state.take_edits())
            assert len(set(where)) == len(where)
            assert dict(zip(where, what, strict=True)) == {table + place: block for place, block in expected.items()}

    @pytest.mark.parametrize(
        ("keys", "answer"),
        [
            ({}, False),
            ({"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 1, "n": 2, "stop": ["x"]}, False),
            ({"repetition_penalty": 1.1, "presence_penalty": 1.0, "frequency_penalty": 1.0}, False),
            ({"logprobs": 0}, True),
            ({"prompt_logprobs": 0}, True),
            ({"logit_bias": {3: 1.0}}, True),
            ({"min_tokens": 1}, True),
        ],
        ids=str,
    )
    def test_what_only_the_host_can_do(self, keys, answer):
        assert needs_host(request(0, 3, [1], **keys).generation) is answer

    def test_a_constraint_is_of_the_host(self):
        generation = request(0, 3, [1]).generation
        generation.constraint = object()  # whatever it allows
        assert needs_host(generation)

    def test_whose_tokens_the_host_chooses_is_plain_here(self):
        """A penalty there must not be counted here too."""
        state = make_state()
        keys = {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5}
        for on_host in (False, True):  # the same slot, one after the other
            state.edit_sampling(1, request(0, 3, [1], **keys).generation, on_host)
            where, what = state.take_edits()
            state.flat[torch.from_numpy(where).long()] = torch.from_numpy(what)
        columns = state.sampling
        got = [float(getattr(columns, n)[1]) for n in ("temperature", "top_k", "top_p", "min_p", "repetition")]
        assert got == [0.0, 0, 1.0, 0.0, 1.0]

    def test_history_tells_prompt_from_output(self):
        """1 for the prompt, 2 for each time in the output; of the last one in that slot nothing is left."""
        state, entry = make_state(), request(0, 3, [1], frequency_penalty=0.5)
        state.history[1].fill_(99)
        entry.generation.token_ids = [2, 2, 7]
        state.edit_sampling(1, entry.generation, on_host=False)
        assert {i: n for i, n in enumerate(state.history[1].tolist()) if n} == {0: 1, 1: 1, 2: 5, 7: 2}
        assert not state.history[[0, 2, 3, 4]].any()


class TestSlots:
    def test_who_stays_costs_nothing(self):
        """A steady decode sends no edit at all; a new block sends one."""
        state = make_state()
        slots, entry = Slots(state, 4), request(0, 4, [3])
        assert slots.follow(Plan((row(entry, 0, 4),))) == [1]
        state.take_edits()
        for length in (5, 6, 7):
            entry.sequence.token_ids.append(-1)
            assert slots.follow(Plan((row(entry, length - 1, length),))) == [1]
            assert [len(part) for part in state.take_edits()] == [0, 0]
        entry.sequence.block_table.append(5)
        slots.follow(Plan((row(entry, 6, 7),)))
        where, what = state.take_edits()
        assert (where.tolist(), what.tolist()) == ([state.num_slots * 11 + state.blocks_per_slot + 1], [5])

    def test_slots_are_given_back_and_never_shared(self):
        state = make_state(slots=2)
        slots = Slots(state, 4)
        a, b, c = (request(i, 3, [i + 1]) for i in range(3))
        assert set(slots.follow(Plan((row(a, 0, 3), row(b, 0, 3))))) == {1, 2}
        a.state = "finished"
        (again,) = slots.follow(Plan((row(c, 0, 3),)))
        assert again != slots.seats[b].slot
        assert DUMMY_SLOT not in (again, slots.seats[b].slot)
        assert set(slots.seats) == {b, c}

    def test_who_was_preempted_comes_anew(self):
        """All of its state is sent again: length, blocks, and its newest token, which the host knows by now."""
        state = make_state()
        slots, entry = Slots(state, 4), request(0, 3, [1])
        slots.follow(Plan((row(entry, 0, 3),)))
        entry.num_preemptions += 1
        entry.sequence.token_ids.append(17)
        entry.sequence.block_table = [4]
        inputs = inputs_for(state, slots, Plan((row(entry, 3, 4),)), StepSize(1, 1, queries=1))
        assert (inputs.input_ids.tolist(), inputs.positions.tolist()) == ([17], [3])
        assert inputs.slot_mapping.tolist() == [4 * BLOCK + 3]

    def test_a_block_in_the_middle_may_change(self):
        """Copy-on-write: the whole table is sent again."""
        state = make_state()
        slots, entry = Slots(state, 4), request(0, 6, [3, 4])
        size = StepSize(1, 1, queries=1)
        inputs_for(state, slots, Plan((row(entry, 0, 6),)), StepSize(6, 1, queries=0))
        entry.sequence.token_ids.append(-1)
        entry.sequence.block_table[1] = 9
        inputs = inputs_for(state, slots, Plan((row(entry, 6, 7),), copies=((4, 9),)), size)
        assert inputs.slot_mapping.tolist() == [9 * BLOCK + 2]
        assert inputs.block_table[0, :2].tolist() == [3, 9]

    def test_nothing_of_the_last_one_in_a_slot_is_left(self):
        """It had more blocks, a longer sequence, and wishes of its own."""
        state = make_state(slots=1)
        slots = Slots(state, 4)
        keys = {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": -5, "presence_penalty": 1.0}
        first, second = request(0, 20, [1, 2, 3, 4, 5], **keys), request(1, 3, [6])
        inputs_for(state, slots, Plan((row(first, 0, 20),)), StepSize(20, 1, queries=0))
        first.state = "finished"
        inputs = inputs_for(state, slots, Plan((row(second, 0, 3),)), StepSize(3, 1, queries=0))
        assert inputs.positions.tolist() == [0, 1, 2]
        assert inputs.slot_mapping.tolist() == [24, 25, 26]
        assert inputs.seq_lens.tolist() == [3]
        got = [float(getattr(state.sampling, name)[1]) for name in ("temperature", "top_k", "top_p", "presence")]
        assert got == [0.0, 0, 1.0, 0.0]
        assert [int(state.sampling.seed_low[1]), int(state.sampling.seed_high[1])] == [0, 0]


class TestInputs:
    @pytest.mark.parametrize("rows", [1, 2, 3, 4])
    @pytest.mark.parametrize("bucket", [4, 5, 8])
    def test_a_decode_step_of_any_padding(self, rows, bucket):
        """Padding rows have no key and write to the dummy block; what was in the inputs before is gone."""
        state = make_state(slots=4)
        slots = Slots(state, 4)
        entries = [request(i, 5 + i, [2 * i + 1, 2 * i + 2]) for i in range(rows)]
        plan = Plan(tuple(row(entry, 4 + i, 5 + i) for i, entry in enumerate(entries)))
        inputs = inputs_for(state, slots, plan, StepSize(bucket, bucket, queries=1))
        pad = [0] * (bucket - rows)
        assert inputs.input_ids.tolist()[:rows] == [4 + i for i in range(rows)]
        assert inputs.positions.tolist() == [4 + i for i in range(rows)] + pad
        assert inputs.seq_lens.tolist() == [5 + i for i in range(rows)] + pad
        where = [(2 * i + 1 + (4 + i) // BLOCK) * BLOCK + (4 + i) % BLOCK for i in range(rows)]
        assert inputs.slot_mapping.tolist() == where + pad
        assert inputs.cu_q.tolist() == list(range(bucket + 1))
        assert not inputs.block_table[rows:].any()
        assert state.length.tolist() == [0] + [5 + i for i in range(rows)] + [0] * (4 - rows)

    def test_batches_shrink_and_grow(self):
        """4, 1 and 4 blocks wide, 3, 1 and 3 rows, in the same memory. GeeeekExplorer/nano-vllm#258."""
        state = make_state(slots=3)
        slots, size = Slots(state, 4), StepSize(4, 4, queries=1)
        long = request(0, 16, [1, 2, 3, 4])
        short, other = request(1, 2, [5]), request(2, 3, [6])
        inputs = StepInputs(size, state.blocks_per_slot, CPU)
        for entries in ((long, short, other), (short,), (other, long, short), (long,)):
            plan = Plan(tuple(row(e, len(e.sequence.token_ids) - 1, len(e.sequence.token_ids)) for e in entries))
            send(state, inputs, pack(plan, slots.follow(plan), size))
            fill(inputs, state, BLOCK)
            lengths = [len(entry.sequence.token_ids) for entry in entries]
            assert inputs.seq_lens.tolist() == lengths + [0] * (4 - len(entries))
            for number, entry in enumerate(entries):
                table = entry.sequence.block_table
                assert inputs.block_table[number].tolist() == table + [0] * (6 - len(table))
            keep_tokens(torch.tensor([8, 8, 8, 8], dtype=torch.int32), inputs.sample_slots, state)
            for entry in entries:
                entry.sequence.token_ids.append(-1)
                if len(entry.sequence.token_ids) > BLOCK * len(entry.sequence.block_table):
                    entry.sequence.block_table.append(7 + entry.id)

    @pytest.mark.parametrize("extra", [0, 1, 20])
    def test_a_mixed_step(self, extra):
        """A decode, a chunk, the last token of a prompt, a whole prompt: and padding behind them."""
        state = make_state(slots=4)
        slots = Slots(state, 4)
        decode, chunk, last, whole = (request(i, n, [2 * i + 1, 2 * i + 2]) for i, n in enumerate((5, 8, 6, 3)))
        inputs_for(state, slots, Plan((row(decode, 0, 5),)), StepSize(5, 1, queries=0))
        keep_tokens(torch.tensor([33], dtype=torch.int32), torch.tensor([slots.seats[decode].slot]), state)
        decode.sequence.token_ids.append(ON_DEVICE)
        plan = Plan((row(decode, 5, 6), row(last, 5, 6), row(chunk, 2, 5), row(whole, 0, 3)))
        size = StepSize(8 + extra, 4 + bool(extra) + extra // 10, queries=0, long_tiles=6, queries_per_tile=2)
        inputs = inputs_for(state, slots, plan, size)
        assert inputs.input_ids.tolist()[:8] == [33, 5, 2, 3, 4, 0, 1, 2]
        assert all(0 <= token < VOCAB for token in inputs.input_ids.tolist()[8:])
        assert inputs.positions.tolist() == [5, 5, 2, 3, 4, 0, 1, 2] + [0] * extra
        assert inputs.slot_mapping.tolist() == [9, 25, 14, 15, 16, 28, 29, 30] + [0] * extra
        assert inputs.seq_lens.tolist() == [6, 6, 5, 3] + [0] * (size.rows - 4)
        assert inputs.cu_q.tolist() == [0, 1, 2, 5, 8] + [8 + extra] * (size.rows - 4)
        places = [slots.seats[entry].slot for entry in (decode, last, chunk, whole)]
        sampling = [places[0], places[1], DUMMY_SLOT, places[3]] + [DUMMY_SLOT] * (size.rows - 4)
        assert inputs.sample_slots.tolist() == sampling, "a chunk does not sample"
        assert inputs.short_map[0].tolist() == [0, 1] + [-1] * (size.rows - 2)
        tiles = list(zip(*inputs.long_map.tolist(), strict=True))
        assert sorted(tiles[:4]) == [(2, 0), (2, 2), (3, 0), (3, 2)]
        assert tiles[0] == (2, 2), "the tile with most keys goes first"
        assert [number for number, _ in tiles[4:]] == [-1, -1]

    def test_padding_changes_nobody(self):
        """Its token and its place are those of the dummy slot, whatever a step of padding rows has left there."""
        state = make_state(slots=2)
        slots, entry = Slots(state, 4), request(0, 3, [5])
        state.last_token[DUMMY_SLOT] = -1  # a padding row's logits may be NaN
        inputs = inputs_for(state, slots, Plan((row(entry, 2, 3),)), StepSize(8, 8, queries=1))
        before = state.flat.clone()
        tokens = torch.tensor([9, *range(20, 27)], dtype=torch.int32)
        keep_tokens(tokens, inputs.sample_slots, state)
        changed = (state.flat != before).nonzero()[:, 0].tolist()
        assert set(changed) <= {DUMMY_SLOT, slots.seats[entry].slot}
        assert int(state.last_token[slots.seats[entry].slot]) == 9
        fill(inputs, state, BLOCK)
        assert inputs.positions.tolist() == [3] + [0] * 7
        assert (inputs.slot_mapping[1:] == 0).all()

    def test_every_way_to_cut_a_step_finds_its_tiles(self):
        """Each query of each row with several tokens is in exactly one tile, however the tokens are shared out."""
        rng = np.random.default_rng(1)
        for _ in range(200):
            tokens, queries = int(rng.integers(2, 40)), int(rng.integers(1, 9))
            cuts = sorted(rng.choice(tokens - 1, size=int(rng.integers(0, min(tokens - 1, 6) + 1)), replace=False) + 1)
            counts = np.diff([0, *cuts, tokens]).tolist()
            entries = [request(i, count, [1] * 10) for i, count in enumerate(counts)]
            plan = Plan(tuple(row(entry, 0, count) for entry, count in zip(entries, counts, strict=True)))
            room = -(-tokens // queries) + len(counts) + 1
            size = StepSize(tokens, len(counts) + 1, queries=0, long_tiles=room, queries_per_tile=queries)
            short, long = tile_maps(plan, size)
            covered = [number for number in short[0].tolist() if number >= 0]
            assert covered == [number for number, count in enumerate(counts) if count == 1]
            found = [
                (number, first + query)
                for number, first in long.T.tolist()
                if number >= 0
                for query in range(min(queries, counts[number] - first))
            ]
            assert sorted(found) == [(n, q) for n, c in enumerate(counts) if c > 1 for q in range(c)]


class Event:
    """A GPU that is done when it is asked to be."""

    def __init__(self) -> None:
        self.pending, self.waits = False, 0

    def record(self) -> None:
        self.pending = True

    def synchronize(self) -> None:
        self.waits += self.pending
        self.pending = False


class TestStaging:
    def test_a_buffer_is_free_when_its_event_has_happened(self):
        ring = Ring(5, CPU)
        ring.events = [Event() for _ in range(DEPTH)]
        seen = []
        for turn in range(3 * DEPTH):
            buffer, event = ring.next()
            assert not event.pending, "the GPU still reads it"
            seen.append(buffer.data_ptr())
            event.record()
            assert sum(each.waits for each in ring.events) == max(0, turn - DEPTH + 1)
        assert len(set(seen[:DEPTH])) == DEPTH
        assert seen == seen[:DEPTH] * 3

    def test_two_steps_under_way_and_one_in_the_making_have_their_own(self):
        assert DEPTH >= 3
        ring = Ring(5, CPU)
        buffers = [ring.next()[0] for _ in range(3)]
        for value, buffer in enumerate(buffers):
            buffer.fill_(value)
        assert [buffer.tolist() for buffer in buffers] == [[value] * 5 for value in range(3)]

    @pytest.mark.parametrize("tokens", [10, 100_000])
    def test_the_largest_step_fits_with_all_that_can_change(self, tokens):
        """However large the budget of a step is against the state."""
        blocks = -(-tokens // 64)
        state, store = make_state(slots=1, blocks=blocks), KVStore(CONFIG, 1, 64, device="cpu", dtype=torch.float32)
        step = CheckedStep(None, PagedOps(), StepOps(), store, AttentionShape(1, 1, 2, 64, 4), state)
        runner = GraphRunner(step, store, None, tokens)
        entry = request(0, tokens, list(range(blocks)))
        plan, size = Plan((row(entry, 0, tokens),)), StepSize(tokens, 1, queries=0)
        slots = runner.slots.follow(plan)
        for index in range(state.num_slots * 11):
            state.edits.setdefault(index, 3)
        state.edit_blocks(0, 0, [3] * blocks)
        inputs = StepInputs(size, blocks, CPU)
        runner.send(inputs, pack(plan, slots, size))
        assert inputs.ids.tolist() == list(range(tokens))
        assert state.block_tables[1].tolist() == list(range(blocks))

    def test_parts_arrive_one_after_the_other(self):
        ring = Ring(8, CPU)
        for _ in range(4):
            for parts in ([[1, 2], [3], [4, 5]], [[], [], []], [[-1], [2**31 - 1], [-(2**31)]]):
                sent, event = ring.send([np.array(part, np.int32) for part in parts])
                assert sent.tolist() == [value for part in parts for value in part]
                assert event is ring.events[ring.turn]

    def test_what_was_sent_is_read_before_the_buffer_is_filled_again(self):
        """The host is far ahead of a GPU that works when somebody waits for it, in order, and no further."""
        queue: list[Any] = []

        class LateEvent:
            behind = 0

            def record(self):
                self.behind = len(queue)

            def synchronize(self):
                while len(done) < self.behind:
                    done.append(queue[len(done)]())

        def late(*arguments):
            queue.append(lambda: unpack(*arguments))

        done: list[None] = []
        state, store = make_state(), KVStore(CONFIG, 1, BLOCK, device="cpu", dtype=torch.float32)
        step = CheckedStep(None, PagedOps(), StepOps(late), store, AttentionShape(1, 1, 2, BLOCK, 4), state)
        runner = GraphRunner(step, store, None, 10)
        runner.mailbox.events = [LateEvent() for _ in range(DEPTH)]
        size = StepSize(3, 3, queries=1)
        inputs = [StepInputs(size, state.blocks_per_slot, CPU) for _ in range(4 * DEPTH)]
        for n, each in enumerate(inputs):
            state.edits[n] = 100 + n
            runner.send(each, np.full(each.packed.numel(), n, np.int32))
            assert len(queue) - len(done) == min(n + 1, DEPTH), "it waits for a buffer, and for nothing else"
        runner.mailbox.events[runner.mailbox.turn].synchronize()
        assert state.flat[: len(inputs)].tolist() == [100 + n for n in range(len(inputs))]
        assert all((each.packed == n).all() for n, each in enumerate(inputs))
