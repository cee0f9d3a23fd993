"""The status page, and what it asks for twice a second."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from msgspec.structs import asdict
from pydantic import BaseModel, ConfigDict

from stages.s09_server.errors import engine_died
from stages.s09_server.response_models import documented
from stages.s09_server.service import service_of

PAGE = Path(__file__).with_name("status.html").read_bytes()
HEADERS = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}


class EngineStatus(BaseModel):
    """What the page shows; see status.py."""

    model_config = ConfigDict(extra="allow")

    model: str
    uptime: float  # of the engine, in seconds
    stats: dict[str, int]
    block_size: int
    blocks: dict[str, Any]
    requests: list[dict[str, Any]]
    steps: list[dict[str, Any]]


router = APIRouter()


@router.get("/", include_in_schema=False)
async def status_page() -> Response:
    """For people."""
    return Response(PAGE, headers=HEADERS, media_type="text/html")


@router.get("/status", response_model=EngineStatus, responses=documented(EngineStatus, 401, 503))
async def status(request: Request, since: Annotated[int, Query(ge=0)] = 0) -> Response:
    """Requests, blocks and the newest steps, those after number `since`; no text of anybody's."""
    service = service_of(request)
    if not service.llm.alive:
        raise engine_died(service.llm.death)
    told = await service.llm.status()
    told["model"] = service.model_name
    # The newest step told the counts, except of those who have come and gone since.
    told["stats"] = asdict(service.llm.stats) | {name: told.pop(name) for name in ("running", "waiting")}
    told["steps"] = [step for step in told["steps"] if step["number"] > since]
    return Response(msgspec.json.encode(told), headers={"Cache-Control": "no-store"}, media_type="application/json")
