"""The app: routes behind limits, and errors that look the same everywhere."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from stages.s09_server import chat, completions, errors, info_routes, status_routes, token_routes
from stages.s09_server.async_llm import AsyncLLM
from stages.s09_server.info_routes import stepinfer_version
from stages.s09_server.limits import ApiKey, BodyLimit, Draining, Head, RequestId
from stages.s09_server.metrics import CountResponses
from stages.s09_server.protocol import ChatRequest, CompletionRequest
from stages.s09_server.service import ApiSettings, Service

__all__ = ["ApiSettings", "make_app"]


class App(FastAPI):
    """FastAPI, with the names of the model in its document."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, made when it is first asked for."""
        if self.openapi_schema is None:
            names = self.state.service.settings.served_model_names
            for body in (ChatRequest, CompletionRequest):
                super().openapi()["components"]["schemas"][body.__name__]["properties"]["model"]["enum"] = list(names)
        return super().openapi()


def make_app(llm: AsyncLLM, settings: ApiSettings) -> FastAPI:
    """The server as an ASGI app; `app.state.service` is its `Service`."""
    service = Service(llm, settings)
    app = App(
        title="StepInfer",
        description="An OpenAI-compatible server.",
        version=stepinfer_version(),
        servers=[{"url": settings.root_path}] if settings.root_path else None,
        docs_url=None,  # these pages would load scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    for routes in (chat, completions, token_routes, info_routes, status_routes):
        app.include_router(routes.router)
    errors.install(app)

    # The last one added is the first to see a request.
    app.add_middleware(Head)
    app.add_middleware(BodyLimit, limit=int(settings.max_body_mb * 2**20))
    app.add_middleware(Draining, draining=lambda: service.draining)
    if settings.api_key is not None:
        app.add_middleware(ApiKey, key=settings.api_key)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(CountResponses, responses=service.metrics.responses)
    app.add_middleware(RequestId)
    return app
