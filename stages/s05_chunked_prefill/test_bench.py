"""What the figures of latency rest on, and a quick run from end to end."""

import pytest

from reference.bench.harness import Result
from stages.s04_continuous_batching.llm import LLM as Whole
from stages.s05_chunked_prefill import bench
from stages.s05_chunked_prefill.bench import Arrivals, replay
from stages.s05_chunked_prefill.llm import LLM

ARRIVALS = Arrivals(readers=3, tokens=20, long_prompt=60, at=(4, 9))


@pytest.mark.parametrize(("budget", "largest"), [(None, 63), (16, 16), (5, 5)])
def test_no_step_that_decodes_is_larger_than_its_budget(tiny, budget, largest):
    """Whole: the long prompt beside three decodes. In chunks: the budget."""
    options = {"device": "cpu", "max_model_len": 64, "kv_cache_mb": 8, "max_num_seqs": 5}
    folder = tiny("llama")
    llm = LLM(folder, max_num_batched_tokens=budget, **options) if budget else Whole(folder, **options)
    trace = replay(llm, ARRIVALS)
    assert trace.waits == largest
    assert len(trace.gaps) == 3 * 19 and len(trace.first_tokens) == 2
    assert all(gap > 0 for _, gap in trace.gaps) and trace.seconds >= max(when for when, _ in trace.gaps)
    assert not llm.engine.has_work and not llm.inboxes


def test_quick_run(tmp_path):
    bench.main(["--quick", "--out", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s05_gaps.svg", "s05_latency.json", "s05_latency.svg"]
    result = Result.load("s05_latency", tmp_path)
    notes = {name: result[f"inter-token latency, p99, {name}"].note for name in (bench.WHOLE, "budget 16")}
    assert "at most 102 tokens" in notes[bench.WHOLE] and "at most 16 tokens" in notes["budget 16"]
