"""What the host does for many prompts before their first step, without a model: `python -m reference.bench first-step`.

The 64 prompts of `shared_prefix` through `LLM.generate`, up to where a GPU would begin to compute: requests are made of
ids and queued, prefixes looked up, the step planned, its inputs put together and sent. It is a dry run (stage 09), and
beside it all that stage 07's runner derives from a plan, on the CPU. Found: all but each prompt's last block is in the
cache, as in the workload's second run. Not found: nothing is, so the first step has four whole prompts. Both with the
radix tree and with hashes. The ids are objects of their own, as they come from a tokenizer. Result: `speed_first_step`.
"""

import argparse
import gc
import json
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from reference.bench.gpu_runs import MAX_MODEL_LEN, MAX_NUM_SEQS, TEMPERATURE, forget, replaced
from reference.bench.gpu_shapes import SHAPES
from reference.bench.harness import RESULTS, Measurement, Result, Timing
from reference.bench.report import markdown_table
from reference.bench.workloads import workloads
from stages.s01_forward.sampling_params import SamplingParams
from stages.s04_continuous_batching.plan import Plan
from stages.s04_continuous_batching.scheduler_cost import BLOCK_SIZE, CPU, SHAPE
from stages.s07_cuda_graph.device_state import DeviceState
from stages.s07_cuda_graph.padded_plan import mixed_size
from stages.s07_cuda_graph.runner import mailbox
from stages.s07_cuda_graph.slots import Slots
from stages.s07_cuda_graph.step_inputs import pack
from stages.s09_server.dry_run import DryLLM

PARTS = ("make", "queue", "look up", "plan", "edits", "inputs", "send")
BUDGET, MEMORY_MB, REPEATS = 8192, 112 * 1024, 30  # 112 GiB that nobody allocates: 65,536 blocks
WARM = 2  # runs that do not count: the first fills the cache, the second is the first that finds
PARAMS = SamplingParams(temperature=TEMPERATURE, max_tokens=32, ignore_eos=True)


class Stopwatch:
    """Seconds spent in each part so far."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.start = time.perf_counter()

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time counts for a part."""

        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            self.spent[part] += time.perf_counter() - start
            return result

        return call

    def parts(self) -> dict[str, float]:
        """Up to now: all, and of what it consists."""
        spent = defaultdict(float, self.spent)
        spent["all"] = time.perf_counter() - self.start
        spent["plan"] -= spent["look up"]
        spent["make"] = spent["all"] - sum(spent[part] for part in PARTS)
        return spent


class Sender:
    """What `GraphRunner` does of a step before its graph is replayed."""

    def __init__(self) -> None:
        self.state = DeviceState(MAX_NUM_SEQS, MAX_MODEL_LEN // BLOCK_SIZE, 1, CPU)
        self.slots = Slots(self.state, BLOCK_SIZE)
        self.mailbox = mailbox(self.state, BUDGET)

    def send(self, plan: Plan, watch: Stopwatch) -> None:
        """Edits of the state and the step's inputs, in one piece."""
        slots = watch.around("edits", self.slots.follow)(plan)
        where, what = watch.around("edits", self.state.take_edits)()
        size = mixed_size(plan.num_tokens, len(plan.rows) + 1, SHAPE, MAX_MODEL_LEN)
        packed = watch.around("inputs", pack)(plan, slots, size)
        watch.around("send", self.mailbox.send)([packed, where, what])


def first_step(llm: DryLLM, prompts: Sequence[list[int]]) -> tuple[dict[str, float], Plan]:
    """Seconds of each part and of all until the first step is sent, and its plan; then all answers are run to the end.

    make: all that is in no other part, most of it `RequestBuilder.build`.
    """
    scheduler, runner, sender = llm.engine.scheduler, llm.engine.runner, Sender()
    dry_run, watch = runner.execute, Stopwatch()
    found: list[tuple[dict[str, float], Plan]] = []

    def execute(plan: Plan) -> Any:
        if not found:
            sender.send(plan, watch)
            found.append((watch.parts(), plan))
        return dry_run(plan)

    gc.collect()
    with (
        replaced(llm, add=watch.around("queue", llm.add)),
        replaced(scheduler, schedule=watch.around("plan", scheduler.schedule)),
        replaced(scheduler.cache, match=watch.around("look up", scheduler.cache.match)),
        replaced(runner, execute=execute),
    ):
        watch.start = time.perf_counter()
        outputs = llm.generate(prompts, PARAMS)
    if any(len(output.token_ids) != PARAMS.max_tokens for output in outputs):
        raise RuntimeError(f"not every answer has {PARAMS.max_tokens} tokens")
    return found[0]


def new_ids(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The same ids as objects that nobody else holds."""
    return [array("q", prompt).tolist() for prompt in prompts]


def measure_case(llm: DryLLM, found: bool, prompts: Sequence[Sequence[int]], repeats: int) -> list[Measurement]:
    """Milliseconds of all parts, from so many runs. found: are the prompts in the cache, all but their last blocks?"""
    runs = []
    for _ in range(WARM + repeats):
        if not found:
            forget(llm)
        runs.append(first_step(llm, new_ids(prompts)))
    plan = runs[-1][1]
    note = f"{sum(row.span.start for row in plan.rows)} of {sum(map(len, prompts))} tokens found, {len(plan.rows)} rows"
    label, measurements = f"{llm.prefix_cache}, {'found' if found else 'not found'}", []
    for part in ("all", *PARTS):
        times = [1000 * seconds[part] for seconds, _ in runs[WARM:]]
        timing = Timing.of(times)
        measurements.append(
            Measurement(f"{label}: {part}", timing.median, timing.min, timing.max, "ms", repeats, note=note)
        )
    return measurements


def measure(name: str = "speed_first_step", requests: int = 64, repeats: int = REPEATS) -> Result:
    """All four cases."""
    prompts = workloads()["shared_prefix"].prompts[:requests]
    result = Result(
        name,
        "Nothing that the host does for a prompt before its first step need take longer than reading its ids a few "
        "times: the beginning of `shared_prefix` takes a few milliseconds, not 20.",
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]), encoding="utf-8")
        for found in (True, False):
            for kind in ("radix", "chain"):
                llm = DryLLM(
                    folder, device="cpu", max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS,
                    max_num_batched_tokens=BUDGET, kv_cache_mb=MEMORY_MB, prefix_cache=kind,
                )  # fmt: skip
                result.measurements += measure_case(llm, found, prompts, repeats)
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measure, save, print."""
    parser = argparse.ArgumentParser(prog="python -m reference.bench first-step", description=__doc__)
    parser.add_argument("--requests", type=int, default=64, help="of the workload's")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of each case")
    parser.add_argument("--name", default="speed_first_step", help="of the result, to keep two states apart")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args(arguments)
    if not 1 <= options.requests <= 64 or options.repeats < 1:
        parser.error(f"--requests must be 1 to 64, --repeats 1 or more, got {options.requests} and {options.repeats}")
    torch.set_num_threads(1)
    print(markdown_table(measure(options.name, options.requests, options.repeats).save(options.out)))


if __name__ == "__main__":
    main()
