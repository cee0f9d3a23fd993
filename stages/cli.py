"""`stepinfer`: the engine from the command line."""

from __future__ import annotations

import importlib
import inspect
import io
import sys
import time
from enum import StrEnum
from typing import Annotated, Any

import typer

from stages import STAGES_DIR, stage_names

app = typer.Typer(help="An LLM inference engine in nine stages.", no_args_is_help=True, add_completion=False)


class Dtype(StrEnum):
    """Number formats to compute in."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Acceptance(StrEnum):
    """Rules by which guesses stand."""

    match = "match"
    ratio = "ratio"


Model = Annotated[str, typer.Argument(help="A folder, a hub id such as Qwen/Qwen3-0.6B, or 'demo'.")]
Stage = Annotated[int | None, typer.Option(help="Which stage's engine answers; the latest if left out.")]


@app.command()
def generate(
    model: Model,
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts, answered one after the other.")],
    stage: Stage = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself; no chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is all tokens.")] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
    dtype: Annotated[Dtype, typer.Option()] = Dtype.auto,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt and answer together, in tokens.")] = None,
    kv_cache_mb: Annotated[float | None, typer.Option(help="Memory for the KV cache, in MB; from stage 2 on.")] = None,
    speculative: Annotated[
        str | None, typer.Option(help="Who guesses ahead: ngram, layers:12, or a smaller model; from stage 8 on.")
    ] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Guesses per step, with --speculative.")] = None,
    acceptance: Annotated[
        Acceptance | None, typer.Option(help="Which guesses stand, with --speculative; match if left out.")
    ] = None,
) -> None:
    """Answer prompts, streaming the text as it comes."""
    started = time.perf_counter()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # consoles that cannot show an emoji show "?" and go on
    with plain_errors():
        from stages.s01_forward.sampling_params import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop or ()
        )
        engine = engine_of(stage)
        sizes = {} if kv_cache_mb is None else {"kv_cache_mb": kv_cache_mb}
        llm = engine(
            model,
            device=device,
            dtype=dtype.value,
            max_model_len=max_model_len,
            progress=sys.stderr.isatty(),
            **sizes,
            **guessing(engine, speculative, num_draft_tokens, acceptance),
        )
        as_chat = not raw and llm.tokenizer is not None and llm.tokenizer.has_chat_template
        typer.secho(f"{llm.folder.name} ready in {time.perf_counter() - started:.1f} s", dim=True, err=True)
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


@app.command()
def download(model: Model) -> None:
    """Fetch a model from the hub (or prepare the demo model) and say where it lies."""
    with plain_errors():
        from stages.s01_forward.hub import resolve_model

        typer.echo(resolve_model(model, progress=sys.stderr.isatty()))


def engine_of(stage: int | None) -> Any:
    """The `LLM` class of a stage, or of the latest."""
    engines = {int(name[1:3]): name for name in stage_names() if (STAGES_DIR / name / "llm.py").exists()}
    number = max(engines) if stage is None else stage
    if number not in engines:
        raise ValueError(f"there is no engine of stage {number}; there are {', '.join(map(str, engines))}")
    return importlib.import_module(f"stages.{engines[number]}.llm").LLM


def guessing(engine: Any, speculative: str | None, count: int | None, rule: Acceptance | None) -> dict[str, Any]:
    """The options of speculative decoding that were given. ValueError if the engine has none, or nobody guesses."""
    given = {"speculative": speculative, "num_draft_tokens": count, "acceptance": rule and rule.value}
    given = {name: value for name, value in given.items() if value is not None}
    if given and not any("speculative" in inspect.signature(each.__init__).parameters for each in engine.__mro__):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"the engine of stage {int(engine.__module__.split('.')[1][1:3])} does not guess: no {flags}")
    if given and speculative is None:
        raise ValueError("--num-draft-tokens and --acceptance say how to guess; --speculative says who does")
    return given


class plain_errors:
    """What the caller did wrong is said in one line; a fault of ours keeps its traceback."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, (ValueError, TypeError, FileNotFoundError)):
            typer.secho(f"error: {error}", fg="red", err=True)
            raise typer.Exit(2) from None


if __name__ == "__main__":
    app(prog_name="stepinfer")
