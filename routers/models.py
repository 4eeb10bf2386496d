"""GET /v1/models and /v1/models/{id}: the served model and its aliases."""

from fastapi import APIRouter

from app.services import ServedModel
from routers.dependencies import AnyServices
from routers.schemas import ModelBody, ModelList, errors

router = APIRouter(prefix="/v1/models", tags=["models"])


def _body(model: ServedModel) -> ModelBody:
    return ModelBody(id=model.id, object="model", created=model.created, owned_by=model.owned_by, shutdown_date=None)


@router.get("")
async def list_models(services: AnyServices) -> ModelList:
    """List the models that requests may name."""
    return ModelList(object="list", data=[_body(model) for model in services.models])


@router.get("/{model:path}", responses=errors(404))
async def retrieve_model(model: str, services: AnyServices) -> ModelBody:
    """Describe one model."""
    return _body(services.model(model))
