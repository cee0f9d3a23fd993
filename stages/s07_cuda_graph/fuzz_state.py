"""`python -m stages.s07_cuda_graph.fuzz_state`: the same random loads, and what the device knows of them at each step.

The real runner packs every plan, sends its edits and fills the inputs, through graphs or without. In place of the model
stands a check of each input against the books of the host, and the token that stage 04's stand-in gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from stages.s01_forward.generation import Generation
from stages.s02_kv_cache.kv_store import KVStore
from stages.s03_paged_kv.attention_plan import AttentionShape
from stages.s03_paged_kv.ops import PagedOps
from stages.s04_continuous_batching.engine import Engine, StepHandle
from stages.s04_continuous_batching.fake_runner import VOCAB, FakeRunner
from stages.s04_continuous_batching.fuzz_scheduler import main
from stages.s04_continuous_batching.plan import Handle, Plan, StepResult
from stages.s04_continuous_batching.request import Request
from stages.s07_cuda_graph.ahead_scheduler import AheadScheduler
from stages.s07_cuda_graph.device_state import DUMMY_SLOT, DeviceState
from stages.s07_cuda_graph.fake_graphs import FakeGraphs
from stages.s07_cuda_graph.fuzz_ahead import AheadFuzz, Late, LateRunner
from stages.s07_cuda_graph.overlap_engine import OverlapEngine
from stages.s07_cuda_graph.runner import GraphRunner
from stages.s07_cuda_graph.sample_torch import count
from stages.s07_cuda_graph.slots import needs_host
from stages.s07_cuda_graph.step import Step, StepOps, StepOutputs
from stages.s07_cuda_graph.step_inputs import StepInputs

CONFIG: Any = SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=2, hidden_size=1, vocab_size=VOCAB)


@dataclass(frozen=True)
class CheckedStep(Step):
    """A step without a model: `answer` checks its inputs, and says what each row [R] gives."""

    answer: Callable[[StepInputs], Tensor] | None = None

    def run(self, inputs: StepInputs, plan: Any) -> StepOutputs:
        assert self.answer is not None
        tokens = self.answer(inputs)
        self.step_ops.keep(tokens, inputs.sample_slots, self.state)
        logits = torch.full((len(tokens), VOCAB), float("-inf"))  # for the rows whose tokens the host chooses
        logits[torch.arange(len(tokens)), tokens.long().clamp(min=0)] = 1.0
        logits[tokens < 0] = float("nan")
        return StepOutputs(torch.zeros(inputs.size.tokens, 1), logits, tokens)


@dataclass(frozen=True)
class Both(Late):
    """The device's answer, which must be that of the stand-in."""

    handle: StepHandle

    def wait(self) -> StepResult:
        expected = super().wait()
        for ours, theirs in zip(self.handle.wait().rows, expected.rows, strict=True):
            given, wanted = ([(t.token_id, t.error is None) for t in row.tokens] for row in (ours, theirs))
            assert given == wanted
        return expected


class StateRunner(LateRunner):
    """Beside the stand-in, the real runner over a real state."""

    def __init__(self, fuzz: StateFuzz, num_host_blocks: int) -> None:
        super().__init__(fuzz.cache, num_host_blocks, fuzz.check_plan)
        seqs, num_blocks, block_size = fuzz.scheduler.max_num_seqs, fuzz.cache.pool.num_blocks, fuzz.cache.block_size
        where: Any = {"device": "cpu", "dtype": torch.float32}
        store, host_store = (KVStore(CONFIG, blocks, block_size, **where) for blocks in (num_blocks, num_host_blocks))
        self.state = DeviceState(seqs, num_blocks - 1, VOCAB, torch.device("cpu"))
        shape = AttentionShape(1, 1, 2, block_size, 4)
        model: Any = SimpleNamespace(config=CONFIG, parameters=list)
        step = CheckedStep(model, PagedOps(), StepOps(), store, shape, self.state, answer=self.answer)
        budget, longest = fuzz.scheduler.max_num_batched_tokens, (num_blocks - 1) * block_size
        self.real = GraphRunner(step, host_store, None, budget)
        if fuzz.rng.random() < 0.7:
            self.real.graphs = FakeGraphs(step, seqs, budget, longest)
        self.fuzz, self.plan, self.given = fuzz, Plan(()), StepResult(())

    def execute(self, plan: Plan) -> Handle:
        late = cast(Late, super().execute(plan))
        self.plan, self.given = plan, late.result
        handle = self.real.execute(plan)
        self.check_rest()
        return Both(late.result, self, plan, late.fails, handle)

    def answer(self, inputs: StepInputs) -> Tensor:
        """Every input of every row, and of the padding; then the tokens."""
        if self.fuzz.rng.random() < self.fuzz.fault_rate / 3:
            raise MemoryError("a rigged failure")  # the edits have been made
        rows, size, block_size = self.plan.rows, inputs.size, self.block_size
        ids, positions, mapping = (x.tolist() for x in (inputs.input_ids, inputs.positions, inputs.slot_mapping))
        cu_q, seq_lens, slots = (x.tolist() for x in (inputs.cu_q, inputs.seq_lens, inputs.sample_slots))
        tokens = torch.full((size.rows,), 7, dtype=torch.int32)
        for number, (row, given) in enumerate(zip(rows, self.given.rows, strict=True)):
            span, first, end = row.span, cu_q[number], cu_q[number + 1]
            place = list(range(span.start, span.end))
            # After a token that could not be chosen a row in vain may follow: it takes any token that there is.
            assert ids[first:end] == [max(token, 0) for token in self.tokens_of(row.request)[span.start : span.end]]
            assert positions[first:end] == place
            blocks = [span.block_table[position // block_size] for position in place]
            assert mapping[first:end] == [b * block_size + i % block_size for b, i in zip(blocks, place, strict=True)]
            assert seq_lens[number] == span.end
            held = -(-span.end // block_size)
            assert inputs.block_table[number, :held].tolist() == span.block_table[:held]
            assert (slots[number] != DUMMY_SLOT) == row.samples
            if row.samples:
                self.check_columns(row.request, slots[number])
            if given.tokens:
                tokens[number] = given.tokens[0].token_id
        if size.common:
            self.check_common(int(inputs.common), [(row.span.block_table, row.span.end) for row in rows])
        used = cu_q[len(rows)]
        assert cu_q[-1] == size.tokens
        assert set(seq_lens[len(rows) :]) | set(positions[used:]) | set(mapping[used:]) <= {0}
        assert all(0 <= token_id < VOCAB for token_id in ids[used:])
        real = [slot for slot in slots if slot]
        assert len(set(real)) == len(real), "two requests in one slot"
        where, columns = inputs.sample_slots.long(), self.state.sampling
        penalties = columns.repetition[where] - 1, columns.presence[where], columns.frequency[where]
        count(tokens.long(), where, torch.stack(penalties).any(0), self.state.history)
        self.fuzz.done["padded step"] += size.rows > len(rows)
        return tokens

    def check_common(self, blocks: int, rows: list[tuple[list[int], int]]) -> None:
        """Tables and lengths: all rows begin with so many blocks and no more, and have tokens behind them."""
        assert len({tuple(table[:blocks]) for table, _ in rows}) == 1
        assert len({tuple(table[: blocks + 1]) for table, _ in rows}) > 1, "a group's rows never come to share more"
        assert blocks * self.block_size < min(end for _, end in rows)
        self.fuzz.done["common prefix"] += 1

    def check_columns(self, request: Request, slot: int) -> None:
        """How its tokens are chosen, to the last bit; and what it has seen, if that matters."""
        generation, columns = request.generation, self.state.sampling
        params, on_host = generation.params, needs_host(generation)
        plain = on_host or params.greedy
        expected = {
            "temperature": 0.0 if plain else params.temperature,
            "top_p": 1.0 if plain else params.top_p,
            "min_p": 0.0 if plain else params.min_p,
            "repetition": 1.0 if on_host else params.repetition_penalty,
            "presence": 0.0 if on_host else params.presence_penalty,
            "frequency": 0.0 if on_host else params.frequency_penalty,
        }
        got = torch.stack([getattr(columns, name)[slot] for name in expected])
        assert torch.equal(got, torch.tensor(list(expected.values()), dtype=torch.float32))
        assert int(columns.top_k[slot]) == (0 if plain else min(params.top_k, 2**31 - 1))
        seed = (int(columns.seed_high[slot]) << 32) | (int(columns.seed_low[slot]) & 0xFFFF_FFFF)
        assert seed == generation.seed
        if not on_host and (params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty):
            seen = [0] * VOCAB
            for token_id in generation.prompt_token_ids:
                seen[token_id] = 1
            for token_id in self.made.get(request, [])[:-1]:  # the last of them is given by this very step
                seen[token_id] += 2 * (token_id >= 0)
            assert columns.history[slot].tolist() == seen

    def check_rest(self) -> None:
        """After the step: lengths and newest tokens of all who sit, in it or not; and the dummy."""
        lengths, newest = self.state.length.tolist(), self.state.last_token.tolist()
        for request, seat in self.real.slots.seats.items():
            if request.state == "running" and seat.stay == request.num_preemptions:
                assert lengths[seat.slot] == request.sequence.num_kv
                if seat.sampled and not needs_host(request.generation):
                    assert newest[seat.slot] == self.tokens_of(request)[-1]
        assert lengths[DUMMY_SLOT] == 0
        assert not self.state.block_tables[DUMMY_SLOT].any()
        assert not self.state.history[DUMMY_SLOT].any()


class StateFuzz(AheadFuzz):
    """Requests want their tokens chosen in all ways, some of them by the host."""

    runner: StateRunner

    def make_engine(self, num_host_blocks: int) -> tuple[FakeRunner, Engine]:
        self.host_bound = self.rng.random() < 0.3
        runner = StateRunner(self, num_host_blocks)
        return runner, OverlapEngine(cast(AheadScheduler, self.scheduler), runner, self.rng.choice((0, 1, 1, 1)))

    def answers(self, prompt: list[int], limit: int, n: int) -> list[Generation]:
        rng, on_host = self.rng, self.host_bound and self.rng.random() < 0.3
        self.host_bound, kept = False, self.host_bound
        answers = super().answers(prompt, limit, n)
        self.host_bound = kept
        for generation in answers:
            generation.params = replace(
                generation.params,
                temperature=rng.choice((0.0, 0.7, 1e6, 1e-6)),
                top_k=rng.choice((0, 5, 2**40)),
                top_p=rng.choice((1.0, 0.3)),
                min_p=rng.choice((0.0, 0.1)),
                repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
                presence_penalty=rng.choice((0.0, 0.0, -1.1)),
                frequency_penalty=rng.choice((0.0, 0.0, 0.2)),
                logprobs=0 if on_host else None,
            )
            generation.seed = rng.choice((generation.seed, -generation.seed, -1, 2**63 - 1, -(2**63)))
        return answers


if __name__ == "__main__":
    main(StateFuzz)
