"""`stepinfer chat`."""

from __future__ import annotations

from typing import Annotated

import typer

from stages.cli.engines import load_engine, take_mine
from stages.cli.errors import plain_errors
from stages.cli.generate import show_any_text
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
    NumDraftTokens,
    Seed,
    Speculative,
    Stage,
    Temperature,
    TopP,
)


def chat(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder, a hub id, or 'demo', the default; with --url: one that the server lists."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Talk to a server, as http://127.0.0.1:8000.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=["STEPINFER_API_KEY", "OPENAI_API_KEY"], show_envvar=True, help="What the server wants to know."
        ),
    ] = None,
    system: Annotated[str, typer.Option(help="What the model is told before the conversation.")] = "",
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stage: Stage = None,
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
    """Talk to a model: here, or at a server. Lines from a pipe are messages too."""
    show_any_text()
    with plain_errors():
        take_mine(mine)
        from stages.s01_forward.sampling_params import SamplingParams
        from stages.s09_server.chat_model import LocalModel
        from stages.s09_server.terminal_chat import converse

        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        if url is not None:
            if stage is not None or dry_run or mine:
                raise ValueError("--stage, --dry-run and --mine are for a model here; --url is a server elsewhere")
            from stages.s09_server.chat_client import RemoteModel

            with RemoteModel(url, api_key, model, params) as remote:
                raise typer.Exit(converse(remote, system))
        llm = load_engine(
            model or "demo",
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
        local = LocalModel(llm, params)
    raise typer.Exit(converse(local, system))
