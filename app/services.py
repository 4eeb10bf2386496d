"""The only place that wires things together: settings in, a gateway's parts out."""

import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from app.admission import Admission, KeyLimits
from app.audio.fetch import Fetcher
from app.benchmarks import Benchmarks
from app.cores import Cores
from app.errors import UnknownModelError
from app.keys import ClientSecrets, Keys
from app.live import LivePolicy, LiveSessions
from app.metrics import Metrics, State
from app.session.agreement import AgreementPolicy
from app.session_store import SessionStore
from app.settings import Settings
from app.speech.vad import AlwaysSpeech, SileroVoiceActivity
from app.transcribe import Transcriber
from engine.base import Engine
from engine.supervised import SupervisedEngine

OWN_NAME = "steno-bench"  # of the key with which the gateway measures itself


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's name on the wire."""

    id: str
    created: int
    owned_by: str = "steno"


@dataclass(frozen=True, slots=True)
class Services:
    """The parts that the routes use."""

    settings: Settings
    engine: Engine
    transcriber: Transcriber
    live: LiveSessions
    sessions: SessionStore
    admission: Admission
    keys: Keys
    client_secrets: ClientSecrets
    benchmarks: Benchmarks
    fetcher: Fetcher | None
    metrics: Metrics
    started: int = field(default_factory=lambda: int(time.time()))
    began: float = field(default_factory=time.monotonic)

    @property
    def models(self) -> list[ServedModel]:
        """The served model first, then its aliases."""
        names = dict.fromkeys((model_name(self.settings), *self.settings.model_aliases))
        return [ServedModel(name, self.started) for name in names]

    def model(self, name: str) -> ServedModel:
        """Look a model up by its name or an alias.

        Raises:
            UnknownModelError: if it is not served.

        """
        for model in self.models:
            if model.id == name:
                return model
        raise UnknownModelError(name)

    @property
    def engine_seconds(self) -> float:
        """How long the engine has been in its state."""
        return time.monotonic() - (self.engine.since if isinstance(self.engine, SupervisedEngine) else self.began)

    def is_admin(self, key: str) -> bool:
        """Say whether this is the admin key, or there is none."""
        wanted = self.settings.admin_key.get_secret_value()
        return not wanted or secrets.compare_digest(key.encode(), wanted.encode())

    def states(self) -> Iterator[State]:
        """Tell how the gateway does at this moment, for its metrics."""
        engine, admission, live = self.engine, self.admission, self.live
        yield State("engine_ready", "1 if transcriptions are taken now.", float(engine.state.phase == "ready"))
        yield State("engine_requests", "Decodes that the engine holds.", engine.requests)
        if isinstance(engine, SupervisedEngine):
            yield State("engine_deaths_total", "Engines that died or were killed, and were built anew.", engine.deaths)
        yield State("permits", "Transcriptions in progress.", {kind: admission.out[kind] for kind in ("file", "live")}, "kind")
        yield State("permits_limit", "How many there may be.", admission.limit)
        yield State("permits_waiting", "Requests that wait for a place.", admission.waiting)
        yield State("live_sessions", "Live sessions that are open.", len(live.open))
        yield State("live_partials_waiting", "Sessions that wait for a place for a partial.", live.waiting)
        yield State("live_audio_kept_seconds", "Audio that live sessions keep.", sum(s.kept_seconds for s in live.open))
        yield State("sessions_kept", "Sessions of the resource, those that are over among them.", len(self.sessions))
        yield State("cores", "Threads that may compute at once.", live.cores.count)
        yield State("cores_busy", "Threads that compute.", live.cores.busy)
        yield State("cores_waiting", "Threads that wait for a core.", live.cores.waiting)


def model_name(settings: Settings) -> str:
    """Return the served model's name on the wire: a folder's last part, else what was asked for."""
    return os.path.basename(os.path.normpath(settings.model)) if os.path.isdir(settings.model) else settings.model


def build_engine(settings: Settings, on_ready: Callable[[], None] = lambda: None) -> Engine:
    """Make the engine that the settings name, which is built anew when it dies. It starts when entered.

    `on_ready` is called whenever it has become ready.
    """
    return SupervisedEngine(lambda: _engine(settings), stall_seconds=settings.engine_stall_seconds, on_ready=on_ready)


def _engine(settings: Settings) -> Engine:
    if settings.engine == "fake":
        from engine.fake import FakeEngine

        return FakeEngine(concurrency=settings.engine_concurrency, remember=False)
    from engine.vllm_engine import VllmEngine, VllmOptions

    kind = VllmEngine
    if settings.engine == "sync-batch":
        from engine.sync_batch import SyncBatchEngine

        kind = SyncBatchEngine
    return kind(
        VllmOptions(
            model=settings.model,
            cache_dir=settings.cache_dir,
            audio_context=settings.audio_context,
            dtype=settings.dtype,
            threads=settings.engine_threads,
            concurrency=settings.engine_concurrency,
            encoders_per_step=settings.encoders_per_step,
            kv_cache_bytes=settings.kv_cache_mb << 20,
        )
    )


def live_policy(settings: Settings) -> LivePolicy:
    """Take the settings of live sessions."""
    return LivePolicy(
        first_seconds=settings.partial_seconds,
        step_seconds=settings.partial_seconds,
        agreement=AgreementPolicy(settings.agreeing_hypotheses, settings.open_words),
        free_finals=settings.free_finals,
        partial_context=settings.partial_context,
        buffer_seconds=settings.live_buffer_seconds,
        max_seconds=settings.max_audio_minutes * 60,
        final_places=settings.engine_concurrency // 4,
    )


def build_services(settings: Settings, engine: Engine | None = None) -> Services:
    """Wire a gateway's parts around an engine, the settings' own unless another is given.

    Raises:
        KeysError: if the settings' keys are not sound.

    """
    own_key = secrets.token_urlsafe(32)
    keys = Keys(settings.api_keys.get_secret_value().split(","), settings.api_keys_file)
    if keys:
        keys.add(OWN_NAME, own_key)
    each = KeyLimits(settings.key_requests, settings.key_live_sessions, settings.key_audio_seconds)
    admission = Admission(
        settings.max_requests,
        each,
        kept_share=settings.kept_share,
        wait_seconds=settings.admission_wait_seconds,
        unbounded=OWN_NAME if keys else None,
    )
    engine = engine or build_engine(settings)
    cores = Cores(os.cpu_count() or 1)
    metrics = Metrics()
    voice_activity = SileroVoiceActivity if settings.vad else AlwaysSpeech
    transcriber = Transcriber(
        engine,
        voice_activity=voice_activity,
        cores=cores,
        windows_per_request=settings.windows_per_request,
        max_seconds=settings.max_audio_minutes * 60,
        metrics=metrics,
    )
    fetcher = Fetcher(max_bytes=settings.max_upload_mb << 20, seconds=settings.fetch_seconds) if settings.fetch_urls else None
    live = LiveSessions(engine, voice_activity=voice_activity, cores=cores, policy=live_policy(settings), metrics=metrics)
    sessions = SessionStore(grace_seconds=settings.session_grace_seconds, idle_seconds=settings.live_idle_seconds)
    services = Services(
        settings,
        engine,
        transcriber,
        live,
        sessions,
        admission,
        keys,
        ClientSecrets(),
        Benchmarks(settings.bench_dir, max_seconds=settings.bench_seconds, api_key=own_key),
        fetcher,
        metrics,
    )
    metrics.watch(services.states)
    return services
