"""The web application: routes, errors, request ids, and a lifespan that starts and stops the engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware

from app.services import Services
from routers import bench, errors, health, metrics, models, page, realtime, schemas, sessions, transcriptions
from routers.dependencies import know_client
from routers.observing import ObservingMiddleware


def create_app(services: Services) -> FastAPI:
    """Build the application around a gateway's parts. It answers at once; the engine starts behind it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with services.engine, services.sessions, services.benchmarks, services.metrics:
            yield

    app = FastAPI(
        title="Steno",
        summary="OpenAI's audio API in front of one shared vLLM engine.",
        lifespan=lifespan,
        docs_url="/docs",
        redoc_url=None,
    )
    app.state.services = services
    errors.install(app)
    if services.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=services.settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "traceparent", "Server-Timing", "Retry-After"],
        )
    app.add_middleware(ObservingMiddleware, metrics=services.metrics)
    for router in (transcriptions.router, sessions.router, realtime.router, models.router):
        app.include_router(router, dependencies=[Depends(know_client)], responses=schemas.errors(401))
    app.include_router(realtime.socket_router)
    for router in (sessions.events_router, health.router, metrics.router, bench.router, page.router):
        app.include_router(router)
    return app
