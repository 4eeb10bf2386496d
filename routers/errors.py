"""Every error in OpenAI's shape, through one table."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from app.errors import (
    BenchRunningError,
    ForbiddenError,
    InvalidInputError,
    InvalidKeyError,
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


async def _steno_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, StenoError)
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, UnavailableError) else None
    return JSONResponse(body_of(error), status_and_type(error)[0], headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"Unknown request URL: {request.method} {request.url.path}.",
        405: f"Not allowed to {request.method} on {request.url.path}.",
    }
    message = messages.get(error.status_code, str(error.detail))
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    return JSONResponse(error_body(message, "invalid_request_error", code=code), error.status_code, error.headers)


async def _validation_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1]) if first.get("loc") else None
    return JSONResponse(error_body(str(first["msg"]), "invalid_request_error", param=param), 400)


async def _client_left(request: Request, _error: Exception) -> Response:
    logger.info("%s: the client left", request.state.request_id)
    return Response(status_code=499)  # nobody reads it; the access log shows it


async def _unexpected(request: Request, error: Exception) -> Response:
    request_id = request.state.request_id
    logger.error("%s: unexpected error", request_id, exc_info=error)
    message = f"The server had an error while processing your request. Its log has the details under {request_id}."
    return JSONResponse(error_body(message, "server_error"), 500)


def install(app: FastAPI) -> None:
    """Make the application answer every error in this shape."""
    app.add_exception_handler(StenoError, _steno_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(ClientDisconnect, _client_left)
    app.add_exception_handler(Exception, _unexpected)
