"""What routes ask for, as types: a signature reads as a sentence."""

from typing import Annotated

from fastapi import Depends, Request

from app.services import Services
from app.transcribe import translate_engine_error
from engine.base import EngineUnavailableError


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def _ready_services(services: Annotated[Services, Depends(_services)]) -> Services:
    if services.engine.state.phase != "ready":
        raise translate_engine_error(EngineUnavailableError(services.engine.state))
    return services


def _request_id(request: Request) -> str:
    request_id: str = request.state.request_id
    return request_id


AnyServices = Annotated[Services, Depends(_services)]
ReadyServices = Annotated[Services, Depends(_ready_services)]  # refuses before the body is read
RequestId = Annotated[str, Depends(_request_id)]
