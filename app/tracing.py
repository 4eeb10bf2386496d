"""Where the time of one request goes, for OpenTelemetry: a span for each stage. Without an endpoint they cost next to nothing.

Stages inside the engine are known once a decode has ended, and are told then, with the times that they had.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from engine.base import Outcome

tracer = trace.get_tracer("steno")


def set_up(endpoint: str) -> None:
    """Send spans to an OTLP endpoint over HTTP, in the background."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    about = Resource.create({"service.name": "steno", "service.version": version("steno-gateway")})
    provider = TracerProvider(resource=about)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")))
    trace.set_tracer_provider(provider)


@contextmanager
def span(name: str, **attributes: AttributeValue) -> Iterator[Span]:
    """Open a span of a stage, inside the current one."""
    with tracer.start_as_current_span(f"steno.{name}", attributes={f"steno.{k}": v for k, v in attributes.items()}) as opened:
        yield opened


def tell_engine_stages(outcome: Outcome) -> None:
    """Open and end the spans of a decode that has just ended: its wait, its encode, and the steps after it."""
    if not trace.get_current_span().is_recording():
        return
    end = time.time_ns()
    began = end - int(outcome.engine_seconds * 1e9)
    encoded = began + int(outcome.encode_seconds * 1e9)
    queued = began - int(outcome.queue_seconds * 1e9)
    for name, first, last in (("queue", queued, began), ("encode", began, encoded), ("generate", encoded, end)):
        tracer.start_span(f"steno.{name}", start_time=first).end(last)
