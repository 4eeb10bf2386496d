"""Around every request: its id, its span, its place in the metrics, and its line in the log.

Every response carries `x-request-id`: the client's own where it sent a sound one, else a new one. A client's `traceparent` is
taken up, and the response's says which span was ours (W3C Trace Context).
"""

import logging
import re
import time
import uuid

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import logs
from app.metrics import ANYONE, Metrics
from app.tracing import tracer

logger = logging.getLogger("steno.access")

METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "WEBSOCKET"}
_ANSWERS = {"http.response.start", "websocket.accept", "websocket.http.response.start"}
_PROPAGATOR = TraceContextTextMapPropagator()
_SOUND = re.compile(r"[\w.:/-]{1,128}", re.ASCII)


class ObservingMiddleware:
    """Sets `scope["state"]["request_id"]` and headers of the response, and tells what became of the request."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on under its id."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        sent = headers.get("x-request-id", "")
        request_id = sent if _SOUND.fullmatch(sent) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        logs.request_id.set(request_id)
        began = time.monotonic()
        status = 0

        async def send_observed(message: Message) -> None:
            nonlocal status
            if message["type"] in _ANSWERS:
                status = message.get("status", 101)
                message.setdefault("headers", [])
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = request_id
                answered["openai-processing-ms"] = str(round((time.monotonic() - began) * 1000))
                if (rates := scope["state"].get("rate_headers")) is not None:
                    answered.update(rates())
                _PROPAGATOR.inject(answered)
            await send(message)

        asked = scope.get("method", "WEBSOCKET")
        method = asked if asked in METHODS else "OTHER"
        with tracer.start_as_current_span(
            method, context=_PROPAGATOR.extract(headers, context=Context()), kind=SpanKind.SERVER
        ) as span:
            try:
                await self._app(scope, receive, send_observed)
            finally:
                route = getattr(scope.get("route"), "path", "unknown")
                seconds = time.monotonic() - began
                span.update_name(f"{method} {route}")
                span.set_attributes(
                    {
                        "http.request.method": method,
                        "http.route": route,
                        "http.response.status_code": status,
                        "steno.request_id": request_id,
                    }
                )
                self._metrics.http(method, route, status, seconds)
                _log(method, scope, status, seconds)


def _log(method: str, scope: Scope, status: int, seconds: float) -> None:
    """Write a request's line; without its query, in which a session's token may be."""
    path: str = scope["path"]
    client = scope["state"].get("client") or ANYONE
    level = logging.DEBUG if path.startswith(("/health", "/metrics")) else logging.INFO
    facts = {"method": method, "path": path, "status": status, "seconds": round(seconds, 3), "client": client}
    logger.log(level, "%s %r %d in %.3f s for %s", method, path, status, seconds, client, extra=facts)
