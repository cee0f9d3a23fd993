"""`stepinfer generate`."""

from __future__ import annotations

import io
import sys
import time
from typing import Annotated

import typer

from stages.cli.engines import load_engine, take_mine
from stages.cli.errors import plain_errors
from stages.cli.options import (
    AcceptanceRule,
    Device,
    DryRun,
    Dtype,
    DtypeOption,
    KvCacheMb,
    MaxModelLen,
    MaxTokens,
    Mine,
    Model,
    NumDraftTokens,
    Seed,
    Speculative,
    Stage,
    Temperature,
    TopK,
    TopP,
)


def generate(
    model: Model,
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts, answered one after the other.")],
    stage: Stage = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself; no chat template.")] = False,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    dry_run: DryRun = False,
    mine: Mine = False,
    device: Device = "auto",
    dtype: DtypeOption = Dtype.auto,
    max_model_len: MaxModelLen = None,
    kv_cache_mb: KvCacheMb = None,
    speculative: Speculative = None,
    num_draft_tokens: NumDraftTokens = None,
    acceptance: AcceptanceRule = None,
) -> None:
    """Answer prompts, streaming the text as it comes."""
    show_any_text()
    with plain_errors():
        take_mine(mine)
        from stages.s01_forward.sampling_params import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop or ()
        )
        llm = load_engine(
            model,
            stage,
            dry_run,
            device=device,
            dtype=dtype.value,
            max_model_len=max_model_len,
            kv_cache_mb=kv_cache_mb,
            speculative=speculative,
            num_draft_tokens=num_draft_tokens,
            acceptance=acceptance,
        )
        as_chat = not raw and llm.tokenizer is not None and llm.tokenizer.has_chat_template
        for prompt in prompts:
            ids = llm.chat_ids([{"role": "user", "content": prompt}]) if as_chat else prompt
            begun, tokens = time.perf_counter(), 0
            for event in llm.stream([ids], params):
                tokens += 1
                typer.echo(event.text, nl=False)
                sys.stdout.flush()
                if event.finish_reason == "error":
                    raise ValueError(f"the model gave no usable logits after {tokens - 1} tokens")
            seconds = time.perf_counter() - begun
            typer.echo()
            typer.secho(f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s", dim=True, err=True)
        if speculative is not None and llm.speculative is not None:  # no guesses: --num-draft-tokens 0
            stats = llm.engine.stats
            told = f"{stats.accepted} of {stats.drafted} guesses stood"
            typer.secho(f"{told}, {stats.tokens_per_row:.1f} tokens from each step with guesses", dim=True, err=True)


def show_any_text() -> None:
    """Consoles that cannot show an emoji show "?" and go on."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
