"""The only place that wires things together: settings in, a gateway's parts out."""

import os
import time
from dataclasses import dataclass, field

from app.admission import Admission
from app.audio.fetch import Fetcher
from app.benchmarks import Benchmarks
from app.cores import Cores
from app.errors import UnknownModelError
from app.live import LivePolicy, LiveSessions
from app.session.agreement import AgreementPolicy
from app.session_store import SessionStore
from app.settings import Settings
from app.speech.vad import AlwaysSpeech, SileroVoiceActivity
from app.transcribe import Transcriber
from engine.base import Engine


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
    benchmarks: Benchmarks
    fetcher: Fetcher | None
    started: int = field(default_factory=lambda: int(time.time()))

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


def model_name(settings: Settings) -> str:
    """Return the served model's name on the wire: a folder's last part, else what was asked for."""
    return os.path.basename(os.path.normpath(settings.model)) if os.path.isdir(settings.model) else settings.model


def build_engine(settings: Settings) -> Engine:
    """Make the engine that the settings name. It starts when entered."""
    if settings.engine == "fake":
        from engine.fake import FakeEngine

        return FakeEngine(concurrency=settings.engine_concurrency)
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
    """Wire a gateway's parts around an engine, the settings' own unless another is given."""
    engine = engine or build_engine(settings)
    cores = Cores(os.cpu_count() or 1)
    voice_activity = SileroVoiceActivity if settings.vad else AlwaysSpeech
    transcriber = Transcriber(
        engine,
        voice_activity=voice_activity,
        cores=cores,
        windows_per_request=settings.windows_per_request,
        max_seconds=settings.max_audio_minutes * 60,
    )
    fetcher = Fetcher(max_bytes=settings.max_upload_mb << 20, seconds=settings.fetch_seconds) if settings.fetch_urls else None
    live = LiveSessions(engine, voice_activity=voice_activity, cores=cores, policy=live_policy(settings))
    sessions = SessionStore(grace_seconds=settings.session_grace_seconds, idle_seconds=settings.live_idle_seconds)
    return Services(
        settings,
        engine,
        transcriber,
        live,
        sessions,
        Admission(settings.max_requests),
        Benchmarks(settings.bench_dir, max_seconds=settings.bench_seconds),
        fetcher,
    )
