"""GET /v1/models and /v1/models/{id}: the served model and its aliases."""

from typing import Any

from fastapi import APIRouter

from app.services import ServedModel
from routers.dependencies import AnyServices

router = APIRouter(prefix="/v1/models", tags=["models"])


def _wire(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": model.owned_by,
        "shutdown_date": None,
    }


@router.get("")
async def list_models(services: AnyServices) -> dict[str, Any]:
    """List the models that requests may name."""
    return {"object": "list", "data": [_wire(model) for model in services.models]}


@router.get("/{model:path}")
async def retrieve_model(model: str, services: AnyServices) -> dict[str, Any]:
    """Describe one model."""
    return _wire(services.model(model))
