"""GET /metrics: what Prometheus asks for."""

from fastapi import APIRouter, Depends
from fastapi.responses import PlainTextResponse

from app.metrics import CONTENT_TYPE
from routers.dependencies import AnyServices, know_admin
from routers.schemas import errors

router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=PlainTextResponse, responses=errors(401), dependencies=[Depends(know_admin)])
async def metrics(services: AnyServices) -> PlainTextResponse:
    """Tell the gateway's metrics, the process's, and vLLM's. Where there is an admin key, it is needed."""
    return PlainTextResponse(services.metrics.exposition(), media_type=CONTENT_TYPE)
