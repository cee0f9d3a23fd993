"""What a KV cache buys, and what it costs: `python -m stages.s02_kv_cache.bench`.

Three results in reference/results: `s02_length` (seconds per token and in all, by length, with the cache and without),
`s02_memory` (bytes that the cache takes) and `s02_cpu` (tokens per second against Hugging Face with its cache).
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reference.bench.harness import RESULTS, Measurement, Result, Timing, compare
from reference.bench.plots import bars, lines
from reference.bench.report import markdown_table
from reference.checkpoints import build_tiny, demo_model
from stages.s01_forward.bench import DTYPES, hf_generate, hf_model, some_ids
from stages.s01_forward.llm import LLM as Uncached
from stages.s01_forward.llm import hidden_states
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.kv_store import kv_bytes_per_token
from stages.s02_kv_cache.llm import LLM
from stages.s02_kv_cache.sequence import Sequence as Row

QUESTION = "Tell me a story about a lighthouse and a storm."  # 41 tokens in the demo model's chat template
WITH, WITHOUT = "with the cache", "without"
THREADS = 2


def next_token_timings(llm: LLM, length: int, repeats: int) -> dict[str, Timing]:
    """Seconds for the logits after `length` + 1 tokens when the first `length` are known: computed again, or cached."""
    ids = some_ids(length + 1, llm.config.vocab_size)
    row = Row(ids[:length])
    llm.step([row])

    def cached() -> torch.Tensor:
        row.token_ids, row.num_kv = ids, length
        return llm.step([row])  # [1, V]

    @torch.inference_mode()
    def uncached() -> torch.Tensor:
        return llm.model.logits(hidden_states(llm.model, ids)[-1:])

    try:
        return compare({WITH: cached, WITHOUT: uncached}, repeats=repeats)
    finally:
        llm.cache.release(row)


def totals(engines: Mapping[str, Any], prompt: Sequence[int], counts: Sequence[int], repeats: int) -> dict[str, Any]:
    """For each engine its Timing, seconds from the call to token number `count`, at every count."""
    params = SamplingParams(max_tokens=counts[-1], ignore_eos=True)
    seconds: dict[str, list[list[float]]] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, llm in engines.items():
            start = time.perf_counter()
            seconds[name].append([time.perf_counter() - start for _ in llm.stream([prompt], params)])
    return {name: [Timing.of([run[count - 1] for run in runs]) for count in counts] for name, runs in seconds.items()}


def measure_length(folder: Path, lengths: Sequence[int], counts: Sequence[int], repeats: int) -> Result:
    """Time against length: of one more token, and of a whole answer."""
    result = Result(
        "s02_length",
        "Without a cache a token computes all that precede it: its time grows with the length, and the time of a whole "
        "answer with the square of it. With the cache a token computes itself and reads the rest: nearly flat.",
    )
    llm = LLM(folder, device="cpu", dtype="float32", max_num_seqs=1, max_model_len=max(*lengths, counts[-1]) + 41)
    ratios = {}
    for length in lengths:
        timings = next_token_timings(llm, length, repeats)
        ratios[length] = timings[WITHOUT].median / timings[WITH].median
        for name, timing in timings.items():
            result.measurements.append(Measurement.of_timing(f"one token after {length}, {name}", timing))
    engines = {WITH: llm, WITHOUT: Uncached(folder, device="cpu", dtype="float32")}
    prompt = some_ids(41, llm.config.vocab_size)
    for name, timings in totals(engines, prompt, counts, max(1, repeats // 2)).items():
        for count, timing in zip(counts, timings, strict=True):
            result.measurements.append(Measurement.of_timing(f"{count} tokens in all, {name}", timing))
    result.wins = "One more token is faster by a factor of " + ", ".join(
        f"{ratio:.1f} after {length} tokens" for length, ratio in ratios.items()
    )
    result.loses = "The first token of an answer: the prompt must be computed either way. And memory: see `s02_memory`."
    return result


def measure_memory(folder: Path) -> Result:
    """Bytes: of one token, of one page, of the weights beside them."""
    result = Result("s02_memory", "2 x layers x KV heads x head_dim x bytes for each token, known before any is taken.")
    for dtype in DTYPES:
        llm = LLM(folder, device="cpu", dtype=dtype, max_num_seqs=1)
        each = kv_bytes_per_token(llm.config, llm.dtype)
        page, length = llm.store.data.nbytes, llm.max_model_len
        weights = sum(p.numel() for p in llm.model.parameters()) * llm.dtype.itemsize
        result.measurements += [
            Measurement.single(f"weights, {dtype}", weights, "B"),
            Measurement.single(f"K/V of one token, {dtype}", each, "B"),
            Measurement.single(f"K/V of 41 + 128 tokens, {dtype}", 169 * each, "B"),
            Measurement.single(f"one page, {dtype}", page, "B", note=f"{length} tokens, {page / weights:.2f} weights"),
        ]
    result.loses = "A page is as long as a sequence can get, so a short answer leaves most of it unused: see stage 03."
    return result


def our_generate(llm: Any, ids: list[int], tokens: int) -> list[int]:
    return llm.generate([ids], SamplingParams(max_tokens=tokens, ignore_eos=True))[0].token_ids


def measure_generate(name: str, folder: Path, engines: Mapping[str, type], tokens: int, repeats: int) -> Result:
    """One answer of so many tokens by each engine and by Hugging Face, in turns, in fp32 and bf16."""
    result = Result(
        name,
        "A decode step reads every weight once, so all are bound by memory bandwidth: the rest is overhead in Python, "
        "which is smaller here.",
    )
    verdicts = []
    for dtype in DTYPES:
        llms = {who: engine(folder, device="cpu", dtype=dtype, max_model_len=256) for who, engine in engines.items()}
        ids = next(iter(llms.values())).chat_ids([{"role": "user", "content": QUESTION}])
        runs: dict[str, Any] = {who: partial(our_generate, llm, ids, tokens) for who, llm in llms.items()}
        runs["HF generate"] = partial(hf_generate, hf_model(str(folder), dtype), ids, tokens, use_cache=True)
        answers = {who: run() for who, run in runs.items()}  # and a warm-up
        timings = compare(runs, warmup=0, repeats=repeats)
        for who, timing in timings.items():
            same = sum(a == b for a, b in zip(answers[who], answers["HF generate"], strict=True))
            note = f"{len(ids)} prompt tokens; {same} of {tokens} ids as HF's"
            result.measurements.append(Measurement.rate(f"{who}, {dtype}", timing, tokens, "tok/s", note=note))
        verdicts += [
            f"{who} makes {timings['HF generate'].median / timings[who].median:.2f} times its tokens per second "
            f"in {dtype}" for who in llms
        ]  # fmt: skip
    result.wins = "Against HF `generate` with its cache: " + ", ".join(verdicts)
    result.loses = "One sequence on a CPU: what several sequences at once gain is the matter of stage 04."
    return result


def save(result: Result, out: Path) -> None:
    """Write the JSON and print its table."""
    print(markdown_table(result.save(out)), flush=True)


def plot_length(result: Result, lengths: Sequence[int], counts: Sequence[int], out: Path) -> None:
    one = {n: [result[f"one token after {length}, {n}"] for length in lengths] for n in (WITH, WITHOUT)}
    lines(one, lengths, "tokens before it", "Seconds for one more token").save(out / "s02_per_token.svg")
    total = {n: [result[f"{count} tokens in all, {n}"] for count in counts] for n in (WITH, WITHOUT)}
    lines(total, counts, "tokens generated", "Seconds for the whole answer").save(out / "s02_total.svg")


def run(parts: Sequence[str], folder: Path, out: Path, quick: bool) -> None:
    if "length" in parts:
        lengths = (16, 64) if quick else (64, 256, 512, 1024, 2048)
        counts = (1, 8, 16) if quick else (1, 32, 64, 96, 128, 192, 256)
        result = measure_length(folder, lengths, counts, 1 if quick else 5)
        save(result, out)
        plot_length(result, lengths, counts, out)
    if "memory" in parts:
        save(measure_memory(folder), out)
    if "generate" in parts:
        result = measure_generate("s02_cpu", folder, {"stage 02": LLM}, 8 if quick else 128, 1 if quick else 5)
        save(result, out)
        bars(result.measurements, "One sequence, with a cache").save(out / "s02_cpu.svg")


def main(arguments: list[str] | None = None) -> None:
    parts = ("length", "memory", "generate")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and one repeat: does it run? Keeps nothing")
    parser.add_argument("--only", choices=parts, help="this part alone")
    parser.add_argument("--out", type=Path, help="folder for the results (default: reference/results)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        out = options.out or (Path(scratch) if options.quick else RESULTS)
        folder = build_tiny("llama", Path(scratch) / "tiny") if options.quick else demo_model()
        run([options.only] if options.only else parts, folder, out, options.quick)


if __name__ == "__main__":
    main()
