"""What a server is told at its start, checked before anything is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from stages.s01_forward.sampling_params import check_float, check_int
from stages.s09_server.engine_process import EngineSettings
from stages.s09_server.service import ApiSettings

OnEngineDeath = Literal["exit", "restart"]


@dataclass(frozen=True)
class ServeConfig:
    """engine, api: how each behaves. host, port: where to listen; port 0 is any that is free.

    on_engine_death: end the process, or launch another engine. drain_seconds: how long open answers may go on once the
    server is told to end. in_process, text_process: see `AsyncLLM.start`.
    """

    engine: EngineSettings
    api: ApiSettings
    host: str = "127.0.0.1"
    port: int = 8000
    access_log: bool = False
    on_engine_death: OnEngineDeath = "exit"
    drain_seconds: float = 30.0
    in_process: bool = False
    text_process: bool = False

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        check_float("drain_seconds", self.drain_seconds, 0)
        check_int("max_waiting", self.api.max_waiting, 0)
        check_float("max_body_mb", self.api.max_body_mb, 0, open_low=True)
        if self.api.request_timeout is not None:
            check_float("request_timeout", self.api.request_timeout, 0, open_low=True)
        if self.api.api_key is not None and not self.api.api_key.strip():
            raise ValueError("api_key is empty; leave it out, or give one that cannot be guessed")
        if self.on_engine_death not in get_args(OnEngineDeath):
            raise ValueError(f"on_engine_death is {self.on_engine_death!r}; it must be 'exit' or 'restart'")
        if self.in_process and self.text_process:
            raise ValueError("in_process and text_process exclude each other: one process, or three")
        if self.api.root_path and not self.api.root_path.startswith("/"):
            raise ValueError(f"root_path is {self.api.root_path!r}; it must begin with /")
