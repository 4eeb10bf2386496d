"""The web application: routes, errors, request ids, and a lifespan that starts and stops the engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from app.services import Services
from routers import bench, errors, health, models, sessions, transcriptions
from routers.request_id import RequestIdMiddleware


def create_app(services: Services) -> FastAPI:
    """Build the application around a gateway's parts. It answers at once; the engine starts behind it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with services.engine, services.sessions, services.benchmarks:
            yield

    app = FastAPI(
        title="Steno",
        summary="OpenAI's audio API in front of one shared vLLM engine.",
        lifespan=lifespan,
        docs_url="/docs",
        redoc_url=None,
    )
    app.state.services = services
    if services.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=services.settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "Server-Timing", "Retry-After"],
        )
    app.add_middleware(RequestIdMiddleware)
    errors.install(app)
    for router in (transcriptions.router, sessions.router, models.router, health.router, bench.router):
        app.include_router(router)
    return app
