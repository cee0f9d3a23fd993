"""Small questions about the server: its models, its health, its version, its metrics."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from stages.s09_server.errors import engine_died, unavailable
from stages.s09_server.response_models import Health, Model, Models, Version, documented
from stages.s09_server.service import Service, service_of

TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format."}


router = APIRouter()


def described(name: str, service: Service) -> dict[str, Any]:
    """A model, as OpenAI's API has it, and its length."""
    length = service.llm.info.max_model_len
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "stepinfer",
        "max_model_len": length,
    }


@router.get("/v1/models", response_model=Models, responses=documented(Models, 401))
async def models(request: Request) -> dict[str, Any]:
    """All names that the model goes by."""
    service = service_of(request)
    return {"object": "list", "data": [described(name, service) for name in service.settings.served_model_names]}


@router.get("/v1/models/{model:path}", response_model=Model, responses=documented(Model, 401, 404))
async def one_model(model: str, request: Request) -> dict[str, Any]:
    """One of them; a hub id has a slash in it."""
    service = service_of(request)
    service.check_model(model)
    return described(model, service)


@router.get("/health", response_model=Health, responses=documented(Health, 503))
async def health(request: Request) -> dict[str, str]:
    """200: send requests. 503: do not."""
    service = service_of(request)
    if not service.llm.alive:
        raise engine_died(service.llm.death)
    if service.draining:
        raise unavailable("the server is shutting down", "shutting_down")
    return {"status": "ok"}


@router.get("/version", response_model=Version, responses=documented(Version))
async def server_version() -> dict[str, str]:
    """Of this server."""
    return {"version": stepinfer_version()}


@router.get("/metrics", response_class=Response, responses={200: TEXT})
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(service_of(request).metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})


def stepinfer_version() -> str:
    """As installed; a plain checkout has none."""
    try:
        return version("stepinfer")
    except PackageNotFoundError:
        return "unknown"
