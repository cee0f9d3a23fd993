"""What stage 01 buys, and what it does not: `python -m stages.s01_forward.bench`.

Three results in reference/results: `s01_forward` (tokens per second against Hugging Face without a cache, in turns),
`s01_forward_load` (seconds and memory of a load) and `s01_forward_logits` (the largest difference to Hugging Face).
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from reference import hf
from reference.bench.harness import RESULTS, Measurement, Result, compare
from reference.bench.peak_memory import peak_memory
from reference.bench.plots import bars, lines
from reference.bench.report import markdown_table
from reference.checkpoints import TINY, build_tiny, demo_model
from reference.quiet import quiet_bars
from stages.s01_forward.checkpoint import stored_tensors
from stages.s01_forward.llm import LLM, hidden_states
from stages.s01_forward.loader import load_model
from stages.s01_forward.sampling_params import SamplingParams

DTYPES = ("float32", "bfloat16")
DEFAULT = "HF, default attention"
ATTENTIONS = {"HF, eager attention": "eager", DEFAULT: None}


def some_ids(count: int, vocab: int) -> list[int]:
    rng = Random(count)
    return [rng.randrange(3, vocab) for _ in range(count)]


def hf_model(folder: str, dtype: str, attention: str | None = None) -> Any:
    """What `from_pretrained` gives, with the attention it chooses itself unless one is named."""
    from transformers import AutoModelForCausalLM

    options = {} if attention is None else {"attn_implementation": attention}
    with quiet_bars():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **options).eval()


def our_model(folder: str, dtype: str) -> torch.nn.Module:
    return load_model(folder, dtype=dtype)


def hf_generate(model: Any, ids: Sequence[int], tokens: int, *, use_cache: bool = False) -> list[int]:
    """Greedy, exactly so many tokens; without a cache unless told otherwise."""
    prompt = torch.tensor([list(ids)])
    with torch.inference_mode():
        answer = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, use_cache=use_cache, pad_token_id=0,
        )  # fmt: skip
    return answer[0, len(ids) :].tolist()


def our_generate(llm: LLM, ids: list[int], tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
    return llm.generate([ids], params)[0].token_ids


def measure_speed(folder: Path, prompt_tokens: int, tokens: int, lengths: Sequence[int], repeats: int) -> Result:
    """Tokens per second of one sequence, and seconds per token by the length of the sequence."""
    result = Result(
        "s01_forward",
        "Both recompute the whole sequence for each token, so both are bound by the same matrix products: about the "
        "same speed, with less overhead around them here. The time per token grows with the length of the sequence.",
    )
    for dtype in DTYPES:
        llm = LLM(folder, device="cpu", dtype=dtype)
        ids = some_ids(prompt_tokens, llm.config.vocab_size)
        runs = {"stage 01": partial(our_generate, llm, ids, tokens)}
        for name, attention in ATTENTIONS.items():
            runs[name] = partial(hf_generate, hf_model(str(folder), dtype, attention), ids, tokens)
        answers = {name: run() for name, run in runs.items()}  # and a warm-up
        timings = compare(runs, warmup=0, repeats=repeats)
        for name, timing in timings.items():
            note = "" if answers[name] == answers["stage 01"] else "other token ids than stage 01"
            result.measurements.append(Measurement.rate(f"{name}, {dtype}", timing, tokens, "tok/s", note=note))

    llm, theirs = LLM(folder, device="cpu", dtype="float32"), hf_model(str(folder), "float32")
    for length in lengths:
        ids = some_ids(length, llm.config.vocab_size)
        steps = {"stage 01": partial(our_generate, llm, ids, 1), DEFAULT: partial(hf_generate, theirs, ids, 1)}
        timings = compare(steps, repeats=repeats)
        for name, timing in timings.items():
            result.measurements.append(Measurement.of_timing(f"{name}, one token after {length}", timing))
    judge(result, lengths)
    return result


def judge(result: Result, lengths: Sequence[int]) -> None:
    """Say what the figures show."""

    def ratio(name: str, other: str) -> str:
        return f"{result[name].median / result[other].median:.2f}"

    against = " and ".join(f"{ratio(f'stage 01, {dtype}', f'{DEFAULT}, {dtype}')} in {dtype}" for dtype in DTYPES)
    result.wins = (
        "Speed is not what this stage buys. Its tokens per second, as a multiple of those of HF `generate` without a "
        f"cache and with its default attention: {against}. It buys numbers that later stages can be held against."
    )
    longer = ratio(f"stage 01, one token after {lengths[-1]}", f"stage 01, one token after {lengths[0]}")
    result.loses = (
        f"A token after {lengths[-1]} others takes {longer} times as long as one after {lengths[0]}, since all of them "
        "are computed again; HF with its cache, and stage 02, do not pay this. On this CPU bfloat16 runs at "
        f"{ratio('stage 01, bfloat16', 'stage 01, float32')} times the speed of float32: it saves memory, and "
        "saves time only where the processor multiplies bfloat16 itself."
    )


def measure_load(folder: Path, repeats: int, with_hf: bool) -> Result:
    """Seconds and peak anonymous memory, each load in a process of its own for the memory."""
    stored = sum(torch.Size(t.shape).numel() for t in stored_tensors(folder).values())
    result = Result(
        "s01_forward_load",
        "Files are mapped and each tensor is copied to its place, so a load needs the weights once: at most 1.15 times "
        "their size at its peak. The files were read before, so seconds are those of memory, not of a disk.",
    )
    loads: dict[str, Callable[[str, str], Any]] = {
        "stage 01": our_model,
        **({"HF from_pretrained": hf_model} if with_hf else {}),
    }
    for dtype in DTYPES:
        weights = stored * getattr(torch, dtype).itemsize
        result.measurements.append(Measurement.single(f"weights, {dtype}", weights, "B"))
        runs = {name: partial(load, str(folder), dtype) for name, load in loads.items()}
        for name, timing in compare(runs, repeats=repeats).items():
            result.measurements.append(Measurement.of_timing(f"{name}, load {dtype}", timing))
        for name, load in loads.items():
            peak = peak_memory(f"stages.s01_forward.bench:{load.__name__}", [str(folder), dtype])
            if peak is not None:
                share = f"{peak.added / weights:.2f} times the weights"
                result.measurements.append(
                    Measurement.single(f"{name}, peak memory {dtype}", peak.added, "B", note=share)
                )
    result.loses = (
        "When the weights are wanted as they are stored, HF computes on the mapped pages and copies nothing. Packing "
        "q, k, v and gate, up into one matrix each costs that copy here."
    )
    return result


def measure_logits(folder_of: Callable[[str], Path]) -> Result:
    """The largest difference of any logit at any of 200 positions, fp32, of every tiny checkpoint."""
    result = Result(
        "s01_forward_logits",
        "The same arithmetic in another order: differences of fp32 rounding, below 1e-4 everywhere.",
    )
    for name, made in TINY.items():
        folder, ids = folder_of(name), some_ids(200, 512)
        model = load_model(folder, dtype="float32")
        mine = model.logits(hidden_states(model, ids))
        difference = (mine - hf.logits(folder, ids)).abs().max().item()
        result.measurements.append(Measurement.single(name, difference, "", note=made.exercises))
    return result


def save(result: Result, out: Path, unit: str | None = None) -> None:
    """Write the JSON, a plot of the measurements in `unit`, and print the table."""
    path = result.save(out)
    if unit is not None:
        chosen = [each for each in result.measurements if each.unit == unit]
        bars(chosen, "One sequence, no cache" if unit == "tok/s" else "Memory of a load").save(path.with_suffix(".svg"))
    print(markdown_table(path))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and one repeat: does it run? Keeps nothing")
    parser.add_argument("--out", type=Path, help="folder for the results (default: reference/results)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        out = options.out or (Path(scratch) if options.quick else RESULTS)

        def tiny(name: str) -> Path:
            return build_tiny(name, Path(scratch) / "tiny" / name)

        save(measure_logits(tiny), out)
        folder = tiny("llama") if options.quick else demo_model()
        lengths, repeats = ((8, 16), 1) if options.quick else ((16, 64, 256), 3)
        save(measure_load(folder, repeats, with_hf=not options.quick), out, "B")
        speed = measure_speed(folder, 32, 4 if options.quick else 8, lengths, repeats)
        save(speed, out, "tok/s")
        series = {
            name: [speed[f"{name}, one token after {length}"] for length in lengths] for name in ("stage 01", DEFAULT)
        }
        picture = lines(series, lengths, "tokens before it", "Seconds for one more token, no cache")
        picture.save(out / "s01_forward_length.svg")


if __name__ == "__main__":
    main()
