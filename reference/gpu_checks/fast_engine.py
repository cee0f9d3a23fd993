"""Stage 07's engine against itself and against stage 06's on the CPU: whatever is switched on, the same tokens.

All in fp32, where no choice among these models' tokens is a near tie, so ids must be equal; where two paths run the
same kernels over the same sizes, logits must be equal bit for bit, in bf16 too. Those checks that need no CUDA graph
run on a CPU as well.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from reference.bench.gpu_runs import forget, replaced
from reference.checkpoints import FAMILIES, build_tiny
from reference.gpu_checks.check import Check, within
from stages.s01_forward.sampling_params import SamplingParams
from stages.s06_prefix_cache.llm import LLM as Stage06
from stages.s07_cuda_graph import common_prefix, few_rows
from stages.s07_cuda_graph.graphs import decode_size
from stages.s07_cuda_graph.llm import LLM
from stages.s07_cuda_graph.skinny_linear import MOST_ROWS
from stages.s07_cuda_graph.step_inputs import StepInputs

Ids = list[list[int]]
VARIANTS: dict[str, dict[str, Any]] = {  # parts of the stage switched off
    "all on": {},
    "no graphs": {"graphs": False},
    "no fused kernels": {"fused": False},
    "no few-row kernels": {"few_rows": False},
    "few-row kernels wherever they can": {"everywhere": True},
    "no overlap": {"overlap": False},
    "captured at start": {"capture": "start"},
}
AROUND_BUCKETS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 25)  # rows


@contextmanager
def tiny(family: str) -> Iterator[Path]:
    """A random checkpoint that is gone afterwards."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        yield build_tiny(family, Path(scratch) / family)


def engine(folder: Path, device: str, everywhere: bool = False, **options: Any) -> Any:
    """Stage 07's, small."""
    usual: dict[str, Any] = {"dtype": "float32", "kv_cache_mb": 16, "max_num_seqs": 25, "max_num_batched_tokens": 96}
    with few_rows_everywhere() if everywhere else nullcontext():
        return LLM(folder, device=device, **(usual | options))


@contextmanager
def few_rows_everywhere() -> Iterator[None]:
    """An engine that is built inside takes few-row kernels for all steps that they can serve, measured or not."""
    with patch.object(few_rows, "most_rows", lambda model: MOST_ROWS):
        yield


def prompts(count: int, longest: int = 60, seed: int = 0) -> Ids:
    """Of 1 to `longest` tokens; none is token 0, which belongs to padding."""
    rng = Random(seed)
    return [[rng.randrange(3, 500) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def ids(llm: Any, asked: Ids, params: Any) -> Ids:
    """What it answers."""
    return [output.token_ids for output in llm.generate(asked, params)]


def expected(folder: Path, asked: Ids, params: Any) -> Ids:
    """The same from stage 06 on the CPU."""
    return ids(Stage06(folder, device="cpu", dtype="float32", kv_cache_mb=16), asked, params)


def same(name: str, found: Ids, wanted: Ids) -> Check:
    """Are all answers equal? If not, where the first differs."""
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            tokens = f"{a[at : at + 3]} instead of {b[at : at + 3]}"  # none: it had ended, with an error perhaps
            return Check(name, False, note=f"answer {number} of {len(wanted)} differs from token {at} on: {tokens}")
    return Check(name, True)


def ragged(count: int, longest: int = 24) -> list[SamplingParams]:
    """Answers of different lengths: the batch shrinks by ones, and waiting requests make it grow."""
    return [SamplingParams(max_tokens=1 + 5 * n % longest, ignore_eos=True) for n in range(count)]


def check_variants(device: str, family: str) -> list[Check]:
    """Each part off in turn: stage 06's ids of 40 answers of many lengths, 25 at once at most, prompts in chunks."""
    checks = []
    with tiny(family) as folder:
        asked, params = prompts(40, 150), ragged(40)
        wanted = expected(folder, asked, params)
        for name, options in VARIANTS.items():
            checks.append(same(f"{family}, {name}", ids(engine(folder, device, **options), asked, params), wanted))
    return checks


def check_buckets(device: str) -> list[Check]:
    """Batches of just a bucket's rows, one less and one more; the same engine for all, so graphs are used again."""
    checks = []
    with tiny("qwen2") as folder:
        llm, asked = engine(folder, device), prompts(max(AROUND_BUCKETS))
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        wanted = expected(folder, asked, params)
        for rows in (*AROUND_BUCKETS, *AROUND_BUCKETS[::-1]):
            checks.append(same(f"{rows} rows", ids(llm, asked[:rows], params), wanted[:rows]))
        if device == "cuda":
            used = llm.engine.runner.graphs.replays
            checks.append(Check("graphs were replayed", used > 4 * len(checks), note=f"{used} times"))
    return checks


def check_host_bound(device: str) -> list[Check]:
    """Requests whose tokens the host must see, among others that it need not see."""
    with tiny("llama") as folder:
        asked = prompts(8)
        plain = SamplingParams(max_tokens=12, ignore_eos=True)
        params = [
            plain, replace(plain, logprobs=2), replace(plain, logit_bias={7: 3.0}),
            replace(plain, repetition_penalty=1.3), plain, replace(plain, min_tokens=5, ignore_eos=False),
            replace(plain, presence_penalty=0.5, frequency_penalty=0.2), replace(plain, prompt_logprobs=0),
        ]  # fmt: skip
        found = ids(engine(folder, device), asked, params)
        return [same("requests that need the host, beside others", found, expected(folder, asked, params))]


def check_preemption(device: str) -> list[Check]:
    """A cache that holds a third of what is asked for: answers lose their blocks, and come back in other slots."""
    checks = []
    with tiny("qwen2") as folder:
        asked, params = prompts(12, 30), SamplingParams(max_tokens=40, ignore_eos=True)
        wanted = expected(folder, asked, params)
        for name, swap_mb in (("computed again", 0.0), ("swapped out and in", 4.0)):
            llm = engine(folder, device, kv_cache_mb=0.2, max_model_len=80, swap_mb=swap_mb)
            checks.append(same(f"preempted, {name}", ids(llm, asked, params), wanted))
            count = llm.engine.scheduler.num_preemptions
            checks.append(Check(f"there were preemptions, {name}", count > 3, note=f"{count} of them"))
    return checks


def check_overlap(device: str) -> list[Check]:
    """1,000 steps and more of random answers with ends that nobody foresees: the same with overlap and without."""
    with tiny("qwen3") as folder:
        asked = prompts(128, 40)
        params = [
            SamplingParams(max_tokens=120, temperature=1.0, seed=n, stop_token_ids=[n, n + 100, n + 200])
            for n in range(len(asked))
        ]
        found, steps = [], []
        for overlap in (True, False):
            llm = engine(folder, device, overlap=overlap, max_num_seqs=8)
            with counted_steps(llm) as count:
                found.append(ids(llm, asked, params))
            steps.append(len(count))
        stopped = sum(len(answer) < 120 for answer in found[1])
        note = f"{steps[0]} steps with overlap, {steps[1]} without; {stopped} answers stopped early"
        return [
            replace(same("overlap against one after the other", *found), note=note),
            Check("1,000 steps, and early ends", min(steps) >= 1000 and stopped > 20, note=note),
        ]


@contextmanager
def counted_steps(llm: Any) -> Iterator[list[None]]:
    """One entry per step that the runner is given."""
    count: list[None] = []
    execute = llm.engine.runner.execute

    def counted(plan: Any) -> Any:
        count.append(None)
        return execute(plan)

    with replaced(llm.engine.runner, execute=counted):
        yield count


def check_neighbours(device: str) -> list[Check]:
    """A seed gives the same tokens alone and in a full batch, in any order."""
    with tiny("qwen2") as folder:
        llm, asked = engine(folder, device), prompts(20)
        params = [SamplingParams(max_tokens=16, temperature=1.0, top_p=0.9, seed=n, ignore_eos=True) for n in range(20)]
        together = ids(llm, asked, params)
        alone = [ids(llm, [prompt], each)[0] for prompt, each in zip(asked, params, strict=True)]
        backwards = ids(llm, asked[::-1], params[::-1])[::-1]
        return [same("seeds, alone", alone, together), same("seeds, in another order", backwards, together)]


def check_padding(device: str) -> list[Check]:
    """Padding that is NaN throughout, and a dummy block that is NaN before every step, reach nobody."""
    with tiny("llama") as folder:
        llm, asked, params = engine(folder, device), prompts(11), ragged(11)
        wanted = expected(folder, asked, params)
        if any(0 in answer for answer in wanted):
            raise RuntimeError("an answer holds token 0, which this check needs for padding: take another seed")
        runner = llm.engine.runner
        execute = runner.execute
        seen: list[torch.Tensor] = []

        def poisoned(plan: Any) -> Any:
            runner.step.store.data[:, :, 0] = float("nan")  # [L, 2, NB, BS, Hkv, D]
            return execute(plan)

        with replaced(runner, execute=poisoned, tap=seen):
            clean = ids(llm, asked, params)
            forget(llm)  # else the same prompts would take other steps
            with torch.inference_mode():
                llm.model.embed_tokens.weight[0] = float("nan")  # padding tokens have id 0
            dirty = ids(llm, asked, params)
    half = len(seen) // 2
    equal = all(torch.equal(a, b) for a, b in zip(seen[:half], seen[half:], strict=True))
    return [
        same("a dummy block of NaN", clean, wanted),
        same("padding of NaN", dirty, wanted),
        Check("padding changes no bit of a logit", equal and half > 10, note=f"{half} steps"),
    ]


def check_bits(device: str, dtype: str) -> list[Check]:
    """Each replay against the same launches without a graph, over the same padded sizes: logits bit for bit."""
    with tiny("qwen3") as folder:
        asked, params = prompts(30, 90), ragged(30)
        logits, answers = [], []
        for eager in (False, True):
            llm = engine(folder, device, dtype=dtype)
            graphs = llm.engine.runner.graphs
            taps: list[torch.Tensor] = []

            def launched(captured: Any, graphs: Any = graphs) -> Any:
                return graphs.run(captured.inputs, captured.plan)

            with replaced(graphs, **({"replay": launched} if eager else {})), replaced(llm.engine.runner, tap=taps):
                answers.append(ids(llm, asked, params))
            logits.append(taps)
    equal = [torch.equal(a, b) for a, b in zip(*logits, strict=True)]
    return [
        Check(f"graph against eager, {dtype}, bit for bit", all(equal), note=f"{len(equal)} steps"),
        same(f"graph against eager, {dtype}, ids", *answers),
    ]


def check_no_sync(device: str) -> list[Check]:
    """40 steady steps, over borders of blocks, in which torch must not wait for the GPU by itself."""
    with tiny("qwen2") as folder:
        llm = engine(folder, device)
        params = SamplingParams(max_tokens=90, temperature=0.8, ignore_eos=True)
        stream = llm.stream(prompts(9), params)
        for _ in range(9 * 20):  # all graphs are there by now
            next(stream)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(9 * 40):
                next(stream)
        except RuntimeError as error:
            return [Check("no hidden wait in a steady step", False, note=str(error))]
        finally:
            torch.cuda.set_sync_debug_mode("default")
            stream.close()
    return [Check("no hidden wait in a steady step", True)]


def check_delays(device: str) -> list[Check]:
    """The GPU held up by more than a step, before it reads what is sent, or writes what comes back: late, not wrong."""
    with tiny("qwen2") as folder:
        asked, params = prompts(14, 50), ragged(14)
        wanted = expected(folder, asked, params)
        llm = engine(folder, device, max_num_seqs=6)
        llm.generate(asked, params)  # captures
        runner, checks = llm.engine.runner, []
        for name, ring in (("what is sent", runner.mailbox), ("what comes back", runner.out)):
            take = ring.next

            def late(take: Callable[[], Any] = take) -> Any:
                taken = take()
                torch.cuda._sleep(10_000_000)  # cycles: some 5 ms
                return taken

            with replaced(ring, next=late):
                checks.append(same(f"a GPU that is late with {name}", ids(llm, asked, params), wanted))
    return checks


def check_far_ahead(device: str) -> list[Check]:
    """Sends without a wait for any step, and tokens, each kernel held up: nothing is filled again before it was read,
    and nothing read before it was written. The engine waits for each step's tokens, so it would hardly ever show.
    """

    def late(kernel: Callable[..., None]) -> Callable[..., None]:
        def wait(*arguments: Any) -> None:
            torch.cuda._sleep(10_000_000)  # cycles: some 5 ms
            kernel(*arguments)

        return wait

    with tiny("qwen2") as folder:
        runner = engine(folder, device).engine.runner
    step, state, size = runner.step, runner.state, decode_size(8, queries=1)
    inputs = [StepInputs(size, state.blocks_per_slot, state.flat.device) for _ in range(30)]
    ops, came = step.step_ops, []
    slow = replace(step, step_ops=replace(ops, unpack=late(ops.unpack), write_out=late(ops.write_out)))
    with torch.inference_mode(), replaced(runner, step=slow):
        for n, each in enumerate(inputs):
            state.edits[n] = 1000 + n
            runner.send(each, np.full(each.packed.numel(), n, np.int32))
        for n in range(len(inputs)):
            tokens, arrived = runner.bring(torch.full((runner.out.buffers[0].numel(),), n, device=device).int())
            arrived.synchronize()
            came.append(set(tokens.tolist()))
    edits = state.flat[: len(inputs)].tolist()
    return [
        Check("edits sent far ahead", edits == [1000 + n for n in range(len(inputs))], note=str(edits)),
        Check("inputs sent far ahead", all(bool((each.packed == n).all()) for n, each in enumerate(inputs))),
        Check("tokens are there when their event is", came == [{n} for n in range(len(inputs))], note=str(came)),
    ]


def check_lack_of_memory(device: str) -> list[Check]:
    """No memory in the middle of a capture, of the first or of a later one: that size is launched, all others are
    replayed, and nothing is held of what was begun.
    """
    lacking, checks = decode_size(4, queries=1), []
    with tiny("qwen2") as folder:
        asked, params = prompts(9), ragged(9)
        wanted = expected(folder, asked, params)
        for name in ("the first", "a later"):
            llm = engine(folder, device)
            graphs = llm.engine.runner.graphs
            run = graphs.run

            def scarce(inputs: Any, plan: Any, run: Callable[..., Any] = run) -> Any:
                outputs = run(inputs, plan)
                if inputs.size == lacking and torch.cuda.is_current_stream_capturing():
                    torch.empty(2**50, dtype=torch.int8, device=device)
                return outputs

            if name == "a later":
                llm.generate(asked[:5], params[:5])
                graphs.captured.pop(lacking, None)
            before = torch.cuda.memory_allocated(device)
            with replaced(graphs, run=scarce):
                graphs.prepare(lacking)
                kept = torch.cuda.memory_allocated(device) - before
                checks.append(same(f"no memory for {name} capture", ids(llm, asked, params), wanted))
            counts = f"{graphs.replays} replays, {dict(graphs.eager)} launched"
            alone = graphs.no_memory == {lacking} and graphs.replays > 10 and graphs.eager.total() > 0
            checks.append(Check(f"no memory for {name} capture, that size alone", alone, note=counts))
            if name == "a later":  # with the first, cuBLAS takes memory of its own
                checks.append(Check("no memory for a capture, none is held", kept == 0, note=f"{kept} bytes"))
    return checks


def check_reference_logits(device: str, family: str) -> list[Check]:
    """Log-probabilities of greedy answers, all kernels on, against stage 06's on the CPU."""
    with tiny(family) as folder:
        asked = prompts(20)
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        llm = engine(folder, device)
        taps: list[torch.Tensor] = []
        with replaced(llm.engine.runner, tap=taps):
            answers = ids(llm, asked[:1], params)
        cpu = Stage06(folder, device="cpu", dtype="float32", kv_cache_mb=16)
        scores = cpu.generate(asked[:1], replace(params, logprobs=0))[0].outputs[0].logprobs or []
        found = [each[0].float().log_softmax(-1)[token].item() for each, token in zip(taps, answers[0], strict=False)]
        worst = max(abs(a - b.logprob) for a, b in zip(found, scores, strict=True))
        return [within(f"log-probabilities, {family}", worst, 1e-4, "log-probability, engine in fp32")]


def check_common_prefix(device: str, family: str) -> list[Check]:
    """24 answers behind one prompt: its keys read once for all rows, and by each row; ids and log-probabilities."""
    rng, checks = Random(1), []
    system = [rng.randrange(3, 500) for _ in range(170)]  # of the model's 256
    with tiny(family) as folder, replaced(common_prefix, LEAST_KEYS=len(system) // 4):
        asked = [system + own for own in prompts(24, 50)]
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        cpu = Stage06(folder, device="cpu", dtype="float32", kv_cache_mb=16)
        answers = [output.outputs[0] for output in cpu.generate(asked, replace(params, logprobs=0))]
        wanted, scores = [answer.token_ids for answer in answers], [answer.logprobs or [] for answer in answers]
        for common in (True, False):
            llm = engine(folder, device, max_num_batched_tokens=2048, common_prefix=common)
            llm.generate([system], replace(params, max_tokens=1))
            taps: list[torch.Tensor] = []
            with replaced(llm.engine.runner, tap=taps):
                found = ids(llm, asked, params)
            logits = torch.stack(taps).float().log_softmax(-1)  # [steps, rows, V]: all rows begin and end together
            worst = max(
                abs(logits[step, row, token].item() - scores[row][step].logprob)
                for row, answer in enumerate(found)
                for step, token in enumerate(answer)
            )
            name = f"a common prefix, {family}, read {'once' if common else 'by each row'}"
            checks += [
                same(name, found, wanted),
                within(f"{name}: log-probabilities", worst, 1e-4, "log-probability, engine in fp32"),
            ]
            graphs = llm.engine.runner.graphs  # a step with routed experts cannot be recorded, and has none
            used = any(size.common for size in graphs.captured)
            checks.append(Check(f"{name}: by a graph of its own", used == (common and not graphs.refused)))
    return checks


Part = tuple[Callable[..., list[Check]], Sequence[Any]]


def parts(device: str) -> list[Part]:
    """Everything that runs on the device, in pieces that know nothing of each other."""
    common: list[Part] = [(check, (device,)) for check in (
        check_overlap, check_buckets, check_host_bound, check_preemption, check_neighbours, check_padding,
    )]  # fmt: skip
    common += [(check_variants, (device, family)) for family in FAMILIES]
    common += [(check_reference_logits, (device, family)) for family in FAMILIES]
    if device == "cuda":
        common += [(check_bits, (device, dtype)) for dtype in ("float32", "bfloat16")]
        from reference.gpu_checks.leftovers import check_leftovers  # Gluon comes with it

        common += [(check_common_prefix, (device, family)) for family in FAMILIES]
        common += [(check_leftovers, (device, family, False)) for family in FAMILIES]
        common += [(check, (device,)) for check in (
            check_no_sync, check_delays, check_far_ahead, check_lack_of_memory,
        )]  # fmt: skip
    return common
