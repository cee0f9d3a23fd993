"""`stepinfer serve`. Options are named as those of `vllm serve` where they mean the same."""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from stages.cli.config_file import read_config
from stages.cli.engines import given, guessing, take_mine
from stages.cli.errors import plain_errors
from stages.cli.numbers import above, at_least
from stages.cli.options import (
    ENGINE,
    AcceptanceRule,
    Device,
    Dtype,
    DtypeOption,
    KvCacheMb,
    MaxModelLen,
    Mine,
    Model,
    NumDraftTokens,
    Speculative,
)

LIMITS, PROCESSES = "Limits", "Processes"  # how the help calls these


class PrefixCache(StrEnum):
    """How prefixes are found again."""

    radix = "radix"
    chain = "chain"
    off = "off"


class Capture(StrEnum):
    """When CUDA graphs are recorded."""

    lazy = "lazy"
    start = "start"


class OnEngineDeath(StrEnum):
    """What becomes of a server without an engine."""

    exit = "exit"
    restart = "restart"


def serve(
    model: Model = "demo",
    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True,
            callback=read_config,
            exists=True,
            dir_okay=False,
            help="YAML file of options, as in 'port: 8000'; the command line goes first.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be repeated. MODEL, if left out.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="STEPINFER_API_KEY", show_envvar=True, help="What clients must know.")
    ] = None,
    allowed_origins: Annotated[
        list[str] | None, typer.Option(help="A web page that may use the API from a browser; may be repeated.")
    ] = None,
    root_path: Annotated[str, typer.Option(help="What a proxy in front cuts off the path.")] = "",
    access_log: Annotated[bool, typer.Option(help="One line for each HTTP request.")] = False,
    mine: Mine = False,
    device: Device = "auto",
    dtype: DtypeOption = Dtype.auto,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Answers computed at once; 64 if left out.", rich_help_panel=ENGINE)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a step; 2,048 if left out.", rich_help_panel=ENGINE)
    ] = None,
    max_chunk: Annotated[
        int | None, typer.Option(help="Tokens of one prompt in a step, at most.", rich_help_panel=ENGINE)
    ] = None,
    kv_cache_mb: KvCacheMb = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            callback=above(0, 1),
            help="Share of the GPU to use, if --kv-cache-mb is left out; 0.9.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a KV block; 16 if left out.", rich_help_panel=ENGINE)
    ] = None,
    swap_space: Annotated[
        float,
        typer.Option(
            callback=at_least(0, 1024),
            help="GiB of host memory for the K/V of preempted answers.",
            rich_help_panel=ENGINE,
        ),
    ] = 0.0,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Compute once what prompts begin with in common.", rich_help_panel=ENGINE)
    ] = True,
    prefix_cache: Annotated[PrefixCache, typer.Option(rich_help_panel=ENGINE)] = PrefixCache.radix,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="No CUDA graphs.", rich_help_panel=ENGINE)
    ] = False,
    common_prefix: Annotated[
        bool, typer.Option(help="Read once what all running answers begin with.", rich_help_panel=ENGINE)
    ] = True,
    capture: Annotated[
        Capture, typer.Option(help="CUDA graphs: before the first request, or as needed.", rich_help_panel=ENGINE)
    ] = Capture.start,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled",
            help="On a CPU: compile steps of few answers first; needs a C++ compiler.",
            rich_help_panel=ENGINE,
        ),
    ] = False,
    speculative: Speculative = None,
    num_draft_tokens: NumDraftTokens = None,
    acceptance: AcceptanceRule = None,
    max_waiting: Annotated[
        int, typer.Option(help="Answers that may wait for their turn; then 429.", rich_help_panel=LIMITS)
    ] = 256,
    request_timeout: Annotated[
        float | None,
        typer.Option(callback=above(0), help="Seconds for an answer; without end if left out.", rich_help_panel=LIMITS),
    ] = None,
    max_body_mb: Annotated[
        float, typer.Option(callback=above(0), help="MB of a request's body; then 413.", rich_help_panel=LIMITS)
    ] = 8.0,
    drain_seconds: Annotated[
        float,
        typer.Option(
            callback=at_least(0),
            help="How long open answers may go on after SIGTERM or Ctrl-C.",
            rich_help_panel=LIMITS,
        ),
    ] = 30.0,
    on_engine_death: Annotated[OnEngineDeath, typer.Option(rich_help_panel=PROCESSES)] = OnEngineDeath.exit,
    in_process: Annotated[
        bool,
        typer.Option("--in-process", help="The engine in a thread, for debuggers.", rich_help_panel=PROCESSES),
    ] = False,
    text_process: Annotated[
        bool,
        typer.Option("--text-process", help="Tokens become text in a third process.", rich_help_panel=PROCESSES),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="The real scheduler and API, and no weights: always the same answer.",
            rich_help_panel=PROCESSES,
        ),
    ] = False,
    dry_run_step_ms: Annotated[
        float,
        typer.Option(callback=at_least(0), help="How long a step of the dry run takes.", rich_help_panel=PROCESSES),
    ] = 0.0,
) -> None:
    """Serve a model over HTTP, with the API of OpenAI."""
    with ExitStack() as early:
        with plain_errors():
            take_mine(mine)
            from stages.s09_server.children import ENGINE, TEXT, early_child

            if not in_process:  # it imports for seconds, and so do the next lines
                early.enter_context(early_child(TEXT if text_process else ENGINE))
            from stages.s09_server.config import ServeConfig
            from stages.s09_server.engine_process import EngineSettings
            from stages.s09_server.serve import run_server
            from stages.s09_server.service import ApiSettings

            options = {
                "device": device,
                "dtype": dtype.value,
                "swap_mb": swap_space * 1024,
                "prefix_cache": prefix_cache.value if enable_prefix_caching else "off",
                "graphs": not enforce_eager,
                "capture": capture.value,
                "common_prefix": common_prefix,
                **given(
                    max_model_len=max_model_len,
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max_num_batched_tokens,
                    max_chunk=max_chunk,
                    kv_cache_mb=kv_cache_mb,
                    memory_share=gpu_memory_utilization,
                    block_size=block_size,
                    compiled=compiled or None,
                ),
                **guessing(speculative, num_draft_tokens, acceptance),
            }
            settings = ServeConfig(
                engine=EngineSettings(model, options, dry_run, dry_run_step_ms),
                api=ApiSettings(
                    served_model_names=tuple(served_model_name or [model]),
                    api_key=api_key,
                    max_waiting=max_waiting,
                    request_timeout=request_timeout,
                    max_body_mb=max_body_mb,
                    allowed_origins=tuple(allowed_origins or ()),
                    root_path=root_path,
                ),
                host=host,
                port=port,
                access_log=access_log,
                on_engine_death=on_engine_death.value,
                drain_seconds=drain_seconds,
                in_process=in_process,
                text_process=text_process,
            )
        code = run_server(settings)
    raise typer.Exit(code)
