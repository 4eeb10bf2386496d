"""What routes ask for, as types: a signature reads as a sentence."""

from functools import partial
from typing import Annotated

from fastapi import Depends, Header
from fastapi.requests import HTTPConnection

from app.errors import InvalidKeyError
from app.services import OWN_NAME, Services
from app.transcribe import translate_engine_error
from engine.base import EngineUnavailableError


def _services(connection: HTTPConnection) -> Services:
    services: Services = connection.app.state.services
    return services


def _given_key(authorization: Annotated[str, Header()] = "", api_key: Annotated[str, Header()] = "") -> str:
    """Read the key as OpenAI's clients send it, or Azure's; empty if there is none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else api_key.strip()


GivenKey = Annotated[str, Depends(_given_key)]


def know_client(connection: HTTPConnection, services: Annotated[Services, Depends(_services)], given: GivenKey) -> None:
    """Find the name of the client's key, before anything else, as `request.state.client`; empty where no keys are asked for.

    Raises:
        InvalidKeyError: if it has none that is valid.

    """
    state = connection.state
    state.client = ""
    if not services.keys:
        if connection.headers.get("user-agent", "").startswith(OWN_NAME):  # the bench's traffic is told apart
            state.client = OWN_NAME
        return
    name = services.keys.name_of(given)
    if name is None:
        raise InvalidKeyError(given=bool(given))
    state.client = name
    state.rate_headers = partial(services.admission.rate_headers, name)


def know_admin(services: Annotated[Services, Depends(_services)], given: GivenKey) -> None:
    """Let only who has the admin key go on; everybody, where there is none.

    Raises:
        InvalidKeyError: if the key is missing, or wrong.

    """
    if not services.is_admin(given):
        raise InvalidKeyError(given=bool(given))


def _ready_services(services: Annotated[Services, Depends(_services)]) -> Services:
    if services.engine.state.phase != "ready":
        raise translate_engine_error(EngineUnavailableError(services.engine.state))
    return services


def _request_id(connection: HTTPConnection) -> str:
    request_id: str = connection.state.request_id
    return request_id


AnyServices = Annotated[Services, Depends(_services)]
ReadyServices = Annotated[Services, Depends(_ready_services)]  # refuses before the body is read
RequestId = Annotated[str, Depends(_request_id)]
