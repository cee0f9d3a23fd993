"""The runner: a plan made by hand in, tokens out."""

import pytest
import torch

from stages.s01_forward.llm import hidden_states
from stages.s01_forward.sampling_params import SamplingParams
from stages.s04_continuous_batching.llm import LLM
from stages.s04_continuous_batching.plan import Plan, PlannedRow, StepResult
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.span import Span


@pytest.fixture
def llm(tiny) -> LLM:
    return LLM(tiny("qwen2"), device="cpu", dtype="float32", block_size=4, swap_mb=0.1)


def row(llm, prompt, start, end, **keys) -> PlannedRow:
    """Positions [start, end) of a new request; what comes before is computed first, in a step of its own."""
    params = SamplingParams(**{"max_tokens": 4, **keys})
    (generation,) = llm.requests.build([prompt], params)[0].generations
    request = Request(0, generation)
    copies = llm.engine.scheduler.cache.reserve(request.sequence, end)
    assert copies == []
    if start:
        before = Plan((PlannedRow(request, Span(request.sequence, 0, start), samples=False),))
        assert llm.engine.runner.execute(before).wait().rows[0].tokens == ()
    return PlannedRow(request, Span(request.sequence, start, end), samples=end == len(prompt))


def best(llm, prompt) -> int:
    """The likeliest token after a prompt, from a computation without a cache."""
    return llm.model.logits(hidden_states(llm.model, prompt)[-1:])[0].argmax().item()


PROMPTS = [[5, 6, 7, 8, 9], [10], list(range(20, 33)), [40, 41, 42], [50, 51]]


class TestExecute:
    def test_rows_that_end_with_their_newest_token_sample(self, llm):
        """A decode, a whole prompt, the first part of one, the last part of another; each in its place."""
        rows = (
            row(llm, PROMPTS[0], 4, 5),
            row(llm, PROMPTS[1], 0, 1),
            row(llm, PROMPTS[2], 0, 6),
            row(llm, PROMPTS[3], 2, 3),
            row(llm, PROMPTS[4], 0, 2),
        )
        result = llm.engine.runner.execute(Plan(rows)).wait()
        expected = [[best(llm, prompt)] for prompt in PROMPTS]
        expected[2] = []
        assert [[token.token_id for token in each.tokens] for each in result.rows] == expected

    def test_an_answer_without_tokens_gets_none(self, llm):
        rows = (
            row(llm, PROMPTS[0], 0, 5, max_tokens=0, prompt_logprobs=0),
            row(llm, PROMPTS[3], 0, 3),
        )
        result = llm.engine.runner.execute(Plan(rows)).wait()
        assert [[token.token_id for token in each.tokens] for each in result.rows] == [[], [best(llm, PROMPTS[3])]]

    def test_log_probabilities_of_a_prompt_come_with_their_own_row(self, llm):
        """Of the tokens after those computed, and of the prompt alone. vllm-project/vllm#5846."""
        rows = (
            row(llm, PROMPTS[0], 0, 5),
            row(llm, PROMPTS[2], 0, 6, prompt_logprobs=0),
            row(llm, PROMPTS[3], 0, 3, prompt_logprobs=0),
        )
        result = llm.engine.runner.execute(Plan(rows)).wait()
        for each, prompt, following in zip(result.rows, (PROMPTS[0], *PROMPTS[2:4]), (0, 6, 2), strict=True):
            expected = llm.model.logits(hidden_states(llm.model, prompt)).log_softmax(-1)
            assert [entry.token_id for entry in each.prompt_logprobs] == prompt[1 : 1 + following]
            for t, entry in enumerate(each.prompt_logprobs):
                assert entry.logprob == pytest.approx(expected[t, prompt[t + 1]].item(), abs=1e-4)

    def test_blocks_move_out_then_in_then_within(self, llm):
        """Block 1 leaves for host block 0, which fills block 2, which is copied to block 3; no row is computed."""
        data = llm.engine.runner.store.data
        data.copy_(torch.randn_like(data))
        before = data.clone()
        plan = Plan((), swap_out=((1, 0),), swap_in=((0, 2),), copies=((2, 3),))
        assert llm.engine.runner.execute(plan).wait() == StepResult(())
        for block, source in ((0, 0), (1, 1), (2, 1), (3, 1), (4, 4)):
            assert torch.equal(data[:, :, block], before[:, :, source])
