"""What an operator wants to know, for Prometheus: counts and times of transcriptions, and the state of the gateway when asked.

Labels are few and bounded: kinds, outcomes, stages, codes of errors, routes, and the names of keys. Times are in seconds.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Literal, Self

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.admission import Kind
from app.live_events import Profile
from app.transcript import Stages

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ANYONE = "anyone"  # the client of a gateway that asks for no keys

LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
LAG_EVERY_SECONDS = 0.1
LATELY = 50  # values

Outcome = Literal["completed", "failed", "left"]  # left: the client has gone


@dataclass(frozen=True, slots=True)
class State:
    """Something that is known at any moment: a number, or one for each value of a label. A total if its name says so."""

    name: str
    what: str
    value: float | Mapping[str, float]
    label: str = ""


class Lately:
    """The last few values of a time in seconds."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=LATELY)

    def add(self, seconds: float) -> None:
        """Note one."""
        self._values.append(seconds)

    @property
    def median_ms(self) -> float | None:
        """The median in milliseconds, or None of none."""
        return round(1000 * median(self._values), 1) if self._values else None


class Metrics:
    """The gateway's own metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.first_texts, self.finals = Lately(), Lately()
        self.registry = registry = CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"steno_{name}", what, labels, registry=registry)

        def histogram(name: str, what: str, *labels: str, buckets: tuple[float, ...] = LATENCIES) -> Histogram:
            return Histogram(f"steno_{name}", what, labels, buckets=buckets, registry=registry)

        self._requests = counter("http_requests_total", "HTTP requests that were answered.", "method", "route", "status")
        self._request_seconds = histogram("http_request_seconds", "From a request's head to its answer's end.", "route")
        self._refusals = counter("refusals_total", "Error answers, by their code.", "code")
        self._transcriptions = counter("transcriptions_total", "Transcriptions that ended.", "kind", "outcome", "client")
        self._audio_seconds = counter("audio_seconds_total", "Audio of transcriptions that ended.", "kind", "client")
        self._seconds = histogram("transcription_seconds", "From a transcription's begin to its end.", "kind")
        self._first_text = histogram("first_text_seconds", "From a transcription's begin to its first text.", "kind")
        self._final_after_stop = histogram("final_after_stop_seconds", "From a live session's last audio to its last text.")
        self._stages = histogram("stage_seconds", "Time of a transcription in each stage; stages overlap.", "kind", "stage")
        self._partials = counter("partials_total", "Partials by what became of them.", "outcome")
        self._taken_back = counter("words_taken_back_total", "Words of partials that later ones changed: flicker.")
        self._loop_lag = histogram("loop_lag_seconds", "How late the event loop comes to what is due.", buckets=LAGS)

    def http(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        self._requests.labels(method, route, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    def refusal(self, code: str) -> None:
        """Count an error answer."""
        self._refusals.labels(code).inc()

    def file(
        self, client: str, outcome: Outcome, *, audio: float, seconds: float, first_text: float | None, stages: Stages
    ) -> None:
        """Count the transcription of a file. Times in seconds; `first_text` where its text was streamed."""
        self._ended("file", client, outcome, audio=audio, seconds=seconds, first_text=first_text)
        if outcome == "completed":
            for stage in ("decode", "vad", "queue", "engine"):
                self._stages.labels("file", stage).observe(getattr(stages, stage))

    def live(self, client: str, outcome: Outcome, *, audio: float, profile: Profile) -> None:
        """Count a live session."""
        seconds = time.monotonic() - profile.began
        self._ended("live", client, outcome, audio=audio, seconds=seconds, first_text=profile.first_text)
        self._partials.labels("heard").inc(profile.partials_heard)
        self._partials.labels("aborted").inc(profile.partials_stale)
        self._partials.labels("doubted").inc(profile.partials_doubted)
        self._taken_back.inc(profile.words_taken_back)
        if outcome == "completed":
            for stage, value in (
                ("decode", profile.decode),
                ("vad", profile.vad),
                ("queue", sum(profile.queues)),
                ("engine", sum(profile.engines)),
                ("turn", sum(profile.turn_waits)),
                ("deliver", sum(profile.deliveries)),
                ("sender_waited", profile.waited),
            ):
                self._stages.labels("live", stage).observe(value)
            if profile.ended is not None and profile.stopped is not None:
                self._final_after_stop.observe(profile.ended - profile.stopped)
                self.finals.add(profile.ended - profile.stopped)

    def _ended(
        self, kind: Kind, client: str, outcome: Outcome, *, audio: float, seconds: float, first_text: float | None
    ) -> None:
        client = client or ANYONE
        self._transcriptions.labels(kind, outcome, client).inc()
        self._audio_seconds.labels(kind, client).inc(audio)
        self._seconds.labels(kind).observe(seconds)
        if first_text is not None:
            self._first_text.labels(kind).observe(first_text)
            self.first_texts.add(first_text)

    def watch(self, states: Callable[[], Iterable[State]]) -> None:
        """Tell these states too, whenever metrics are asked for."""
        self.registry.register(_States(states))

    def exposition(self) -> bytes:
        """Write all down in Prometheus's text format: our own, the process's, and vLLM's."""
        return generate_latest(self.registry) + generate_latest(REGISTRY)

    # --- the event loop's lag -------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._measuring = asyncio.create_task(self._measure_lag())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._measuring.cancel()
        await asyncio.wait({self._measuring})

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_EVERY_SECONDS
            await asyncio.sleep(LAG_EVERY_SECONDS)
            self._loop_lag.observe(max(0.0, loop.time() - due))


class _States(Collector):
    """Reads states when they are asked for."""

    def __init__(self, states: Callable[[], Iterable[State]]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        """Read them."""
        for state in self._states():
            kind = CounterMetricFamily if state.name.endswith("_total") else GaugeMetricFamily
            family = kind(f"steno_{state.name}", state.what, labels=[state.label] if state.label else [])
            values = state.value if isinstance(state.value, Mapping) else {"": state.value}
            for label, value in values.items():
                family.add_metric([label] if state.label else [], value)
            yield family

    def describe(self) -> Iterator[Metric]:
        """Say nothing yet: there is no state before the gateway is whole."""
        return iter(())
