"""Stage 08's engine on the device: whoever guesses, and whatever, the tokens are those of plain decoding.

All in fp32, where no choice among these models' tokens is a near tie. Those checks that need no CUDA graph run on a CPU
as well.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from reference.bench.gpu_runs import forget, replaced
from reference.gpu_checks.check import Check
from reference.gpu_checks.fast_engine import Ids, Part, expected, few_rows_everywhere, ids, prompts, ragged, same, tiny
from stages.s01_forward.sampling_params import SamplingParams
from stages.s08_speculative.llm import LLM
from stages.s08_speculative.ngram import NgramProposer
from stages.s08_speculative.set_acceptance import SetAcceptance

ROWS = 25  # not a bucket: steps have padding rows
VARIANTS: dict[str, dict[str, Any]] = {
    "all on": {},
    "no graphs": {"graphs": False},
    "no fused kernels": {"fused": False},
    "few-row kernels wherever they can": {"everywhere": True},
    "no overlap": {"overlap": False},
    "captured at start": {"capture": "start"},
    "2 guesses": {"num_draft_tokens": 2},
    "8 guesses": {"num_draft_tokens": 8},
}


def engine(folder: Path, device: str, everywhere: bool = False, **options: Any) -> Any:
    """Stage 08's, small; everybody may guess, however badly that goes."""
    usual: dict[str, Any] = {
        "dtype": "float32", "kv_cache_mb": 16, "max_num_seqs": ROWS, "max_num_batched_tokens": 256,
        "speculative": "ngram", "speculative_max_rows": ROWS, "speculative_least_rate": 0.0,
    }  # fmt: skip
    with few_rows_everywhere() if everywhere else nullcontext():
        return LLM(folder, device=device, **(usual | options))


@contextmanager
def told(llm: Any, asked: Ids, answers: Ids, rate: float) -> Iterator[None]:
    """Guesses that are right so often."""
    known = {tuple(prompt): answer for prompt, answer in zip(asked, answers, strict=True)}
    with replaced(llm.engine, proposer=SetAcceptance(known, rate, llm.config.vocab_size)):
        yield


def check_rates(device: str, family: str) -> list[Check]:
    """Guesses of which none, some and all are right, in batches that shrink: stage 06's greedy tokens on the CPU."""
    checks = []
    with tiny(family) as folder:
        asked, params = prompts(ROWS), ragged(ROWS)
        wanted = expected(folder, asked, params)
        for name, options in VARIANTS.items():
            llm = engine(folder, device, **options)
            for rate in (0.0, 0.6, 1.0) if name == "all on" else (0.6,):
                with told(llm, asked, wanted, rate):
                    checks.append(same(f"{family}, {name}, {rate} are right", ids(llm, asked, params), wanted))
            stats = llm.engine.stats
            note = f"{stats.accepted} of {stats.drafted} guesses stood"
            mixed = 0 < stats.accepted < stats.drafted
            checks.append(Check(f"{family}, {name}, guesses stood and fell", mixed, note=note))
    return checks


def check_guessers(device: str) -> list[Check]:
    """N-grams and a draft of the first layers, greedy and with seeds, host-bound requests among them."""
    checks = []
    with tiny("qwen2") as folder:
        asked = [prompt * 3 for prompt in prompts(12, 16)]
        plain = SamplingParams(max_tokens=20, ignore_eos=True)
        params = [
            plain, replace(plain, logprobs=1), replace(plain, temperature=0.7, seed=3),
            replace(plain, repetition_penalty=1.2), replace(plain, temperature=1.0, top_p=0.9, seed=4),
            replace(plain, presence_penalty=0.4, temperature=0.8, seed=5),
        ] * 2  # fmt: skip
        wanted = ids(engine(folder, device, speculative=None), asked, params)
        for guesser in ("ngram", "layers:1", "layers:2"):
            llm = engine(folder, device, speculative=guesser)
            if guesser == "ngram":  # these models repeat single tokens, hardly ever three
                llm.engine.proposer = NgramProposer(largest=3, smallest=1)
            checks.append(same(f"{guesser}, beside every kind of request", ids(llm, asked, params), wanted))
            checks.append(Check(f"{guesser}, there were guesses", llm.engine.stats.rows > 10))
            if device == "cuda":
                sizes = [size for size in llm.engine.runner.graphs.captured if size.queries > 1]
                checks.append(Check(f"{guesser}, graphs verified", bool(sizes), note=f"{len(sizes)} sizes"))
        drawn = [engine(folder, device, speculative="layers:2", acceptance="ratio", graphs=on) for on in (True, False)]
        warm = [replace(plain, temperature=0.8, seed=n) for n in range(len(asked))]
        checks.append(same("ratio rule, graph against eager", *(ids(llm, asked, warm) for llm in drawn)))
    return checks


def check_padding(device: str) -> list[Check]:
    """Padding that is NaN throughout, and a dummy block that is NaN before every step, reach no guess and no token."""
    with tiny("llama") as folder:
        llm, asked, params = engine(folder, device), prompts(11, seed=1), ragged(11)
        wanted = expected(folder, asked, params)
        most = llm.config.vocab_size - 1  # whose neighbour, a wrong guess, is token 0
        if any(token in (0, most) for answer in wanted for token in answer):
            raise RuntimeError("an answer holds a token that this check needs for padding: take another seed")
        runner = llm.engine.runner
        execute = runner.execute

        def poisoned(plan: Any) -> Any:
            runner.step.store.data[:, :, 0] = float("nan")  # [L, 2, NB, BS, Hkv, D]
            return execute(plan)

        with replaced(runner, execute=poisoned), told(llm, asked, wanted, 0.6):
            clean = ids(llm, asked, params)
            forget(llm)
            with torch.inference_mode():
                llm.model.embed_tokens.weight[0] = float("nan")  # padding tokens have id 0
            dirty = ids(llm, asked, params)
    return [same("guesses, a dummy block of NaN", clean, wanted), same("guesses, padding of NaN", dirty, wanted)]


def check_bits(device: str, dtype: str) -> list[Check]:
    """Steps that verify, replayed against launched one by one over the same padded sizes: logits bit for bit."""
    with tiny("qwen3") as folder:
        asked, params = prompts(18), ragged(18)
        wanted, logits, answers = expected(folder, asked, params), [], []
        for eager in (False, True):
            llm = engine(folder, device, dtype=dtype)
            graphs, runner, seen = llm.engine.runner.graphs, llm.engine.runner, list[torch.Tensor]()
            handle = runner.handle

            def launched(captured: Any, graphs: Any = graphs) -> Any:
                return graphs.run(captured.inputs, captured.plan)

            def kept(plan: Any, slots: Any, outputs: Any, handle: Any = handle, seen: Any = seen) -> Any:
                if plan.has_drafts:
                    seen.append(outputs.logits[: plan.num_tokens].clone())
                return handle(plan, slots, outputs)

            with (
                replaced(graphs, **({"replay": launched} if eager else {})),
                replaced(runner, handle=kept),
                told(llm, asked, wanted, 0.6),
            ):
                answers.append(ids(llm, asked, params))
            logits.append(seen)
    equal = [torch.equal(a, b) for a, b in zip(*logits, strict=True)]
    name = f"guesses, graph against eager, {dtype}"
    return [
        Check(f"{name}, bit for bit", all(equal) and len(equal) > 5, note=f"{len(equal)} steps"),
        same(f"{name}, ids", *answers),
    ]


def parts(device: str, families: Sequence[str]) -> list[Part]:
    """Everything that runs on the device, in pieces that know nothing of each other."""
    common: list[Part] = [(check_rates, (device, family)) for family in families]
    common += [(check_guessers, (device,)), (check_padding, (device,))]
    if device == "cuda":
        from reference.gpu_checks.leftovers import check_leftovers  # Gluon comes with it

        common += [(check_bits, (device, dtype)) for dtype in ("float32", "bfloat16")]
        common += [(check_leftovers, (device, family, True)) for family in families]
    return common
