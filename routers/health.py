"""Liveness, and readiness with its reason."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from app.services import model_name
from app.transcribe import RETRY_AFTER_SECONDS
from routers.dependencies import AnyServices
from routers.schemas import Liveness, Readiness

router = APIRouter(prefix="/health", tags=["health"])


@router.get("")
@router.get("/live")
async def live() -> Liveness:
    """Say that the process answers."""
    return Liveness(status="alive")


@router.get("/ready", responses={200: {"model": Readiness}, 503: {"model": Readiness, "description": "Not now, and why."}})
async def ready(services: AnyServices) -> JSONResponse:
    """Say whether transcriptions are taken now: 200 when ready, else 503 with the phase and the reason."""
    state = services.engine.state
    is_ready = state.phase == "ready"
    body = Readiness(
        status=state.phase,
        reason=state.reason,
        model=model_name(services.settings),
        device=services.engine.device,
        seconds=round(services.engine_seconds, 1),
        transcriptions=services.admission.in_progress,
        places=services.admission.limit,
        waiting=services.admission.waiting,
        live_sessions=len(services.live.open),
        engine_requests=services.engine.requests,
        first_text_ms=services.metrics.first_texts.median_ms,
        final_ms=services.metrics.finals.median_ms,
    )
    headers = None if is_ready else {"Retry-After": str(RETRY_AFTER_SECONDS[state.phase])}
    return JSONResponse(body.model_dump(), 200 if is_ready else 503, headers)
