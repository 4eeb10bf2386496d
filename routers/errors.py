"""Every error in OpenAI's shape, through one table."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import (
    BenchRunningError,
    ForbiddenError,
    InvalidInputError,
    InvalidKeyError,
    RateLimitError,
    SequenceGapError,
    StenoError,
    TranscriptionFailedError,
    UnavailableError,
    UnknownBenchError,
    UnknownModelError,
    UnknownSessionError,
    UploadStalledError,
    UploadTooLargeError,
)
from app.services import Services

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1000  # characters: messages quote what the client sent, however long it is

# The first that fits, so subclasses come before their base: error -> HTTP status, OpenAI's type.
TABLE: tuple[tuple[type[StenoError], int, str], ...] = (
    (UploadTooLargeError, 413, "invalid_request_error"),
    (UploadStalledError, 408, "invalid_request_error"),
    (UnknownModelError, 404, "invalid_request_error"),
    (UnknownSessionError, 404, "invalid_request_error"),
    (UnknownBenchError, 404, "invalid_request_error"),
    (SequenceGapError, 409, "invalid_request_error"),
    (BenchRunningError, 409, "invalid_request_error"),
    (ForbiddenError, 403, "permission_error"),
    (InvalidKeyError, 401, "invalid_request_error"),
    (InvalidInputError, 400, "invalid_request_error"),
    (RateLimitError, 429, "rate_limit_error"),
    (UnavailableError, 503, "service_unavailable_error"),
    (TranscriptionFailedError, 500, "server_error"),
    (StenoError, 500, "server_error"),
)


def status_and_type(error: StenoError) -> tuple[int, str]:
    """Look an error up in the table."""
    return next((status, kind) for known, status, kind in TABLE if isinstance(error, known))


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Build OpenAI's error object; all four keys are always there."""
    message = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "..."
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: StenoError) -> dict[str, Any]:
    """Build the error object of one of our errors."""
    return error_body(error.message, status_and_type(error)[1], param=error.param, code=error.code)


async def _steno_error(request: Request, error: Exception) -> Response:
    """Answer a request, or a WebSocket's handshake."""
    assert isinstance(error, StenoError)
    status, kind = status_and_type(error)
    _count(request, error.code or kind)
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, UnavailableError | RateLimitError) else None
    return JSONResponse(body_of(error), status, headers)


def _count(request: HTTPConnection, code: str) -> None:
    services: Services = request.app.state.services
    services.metrics.refusal(code)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"Unknown request URL: {request.method} {request.url.path}.",
        405: f"Not allowed to {request.method} on {request.url.path}.",
    }
    message = messages.get(error.status_code, str(error.detail))
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    _count(request, code or f"http_{error.status_code}")
    return JSONResponse(error_body(message, "invalid_request_error", code=code), error.status_code, error.headers)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    _count(request, "invalid_request_error")
    first = error.errors()[0]
    param = str(first["loc"][-1]) if first.get("loc") else None
    return JSONResponse(error_body(str(first["msg"]), "invalid_request_error", param=param), 400)


async def _client_left(_request: Request, _error: Exception) -> Response:
    logger.info("the client left")
    return Response(status_code=499)  # nobody reads it; the access log shows it


class UnexpectedErrorsMiddleware:
    """Answers what nobody foresaw. Starlette would do it outside of all other middleware, where no page can read it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        begun = False

        async def send_watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            request = Request(scope)
            _count(request, "unexpected")
            logger.error("unexpected error", exc_info=error)
            its_id = request.state.request_id
            message = f"The server had an error while processing your request. Its log has the details under {its_id}."
            await JSONResponse(error_body(message, "server_error"), 500)(scope, receive, send)


def install(app: FastAPI) -> None:
    """Make the application answer every error in this shape."""
    app.add_exception_handler(StenoError, _steno_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(ClientDisconnect, _client_left)
    app.add_middleware(UnexpectedErrorsMiddleware)
