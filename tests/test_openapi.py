"""Our OpenAPI document says what is true: schemathesis sends what it allows, and checks each answer."""

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from engine.fake import FakeEngine
from tests import speech
from tests.gateway import Gateway
from tests.test_wire import ready_gateway

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]
ROUTES = [
    ("POST", "/v1/audio/transcriptions"),
    ("POST", "/v1/audio/translations"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("GET", "/metrics"),
    ("GET", "/v1/audio/sessions/{session_id}"),
    ("DELETE", "/v1/audio/sessions/{session_id}"),
    ("POST", "/v1/audio/sessions/{session_id}/audio"),
    ("POST", "/v1/audio/sessions/{session_id}/commit"),
    ("POST", "/v1/audio/sessions/{session_id}/stop"),
    ("GET", "/v1/audio/sessions/{session_id}/events"),
    ("POST", "/v1/audio/sessions"),
    ("POST", "/v1/realtime/client_secrets"),
    ("GET", "/bench"),
    ("GET", "/bench/{run_id}"),
    ("GET", "/bench/{run_id}/events"),
    ("DELETE", "/bench/{run_id}"),
]
LOADS = {("POST", "/bench")}  # whatever the document allows there starts a process and a load
CLIP = speech.wav(speech.tone(0.3))


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with ready_gateway(FakeEngine, vad=False) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def document(gateway: Gateway):
    return schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")


def test_every_route_is_tried(document):
    described = {(operation.ok().method.upper(), operation.ok().path) for operation in document.get_all_operations()}
    assert described == set(ROUTES) | LOADS


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_every_answer_is_one_that_the_document_tells_of(document, route: tuple[str, str]):
    method, path = route
    operation = document[path][method]

    @given(operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    def try_one(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):  # what is generated is neither sound nor a name that is served
            plain_json = path.endswith(("sessions", "client_secrets"))
            case.body = case.body | {"model": "whisper-1"} | ({} if plain_json else {"file": CLIP})
        case.call_and_validate(checks=CHECKS)

    try_one()
