"""Every setting of the gateway: a flag of `steno serve`, a variable `STENO_*`, or a line of a `.env` file, in this order."""

from pathlib import Path
from typing import Annotated, Literal

import platformdirs
from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

DEFAULT_ALIASES = (
    "whisper-1",
    "gpt-transcribe",
    "gpt-4o-transcribe",
    "gpt-4o-mini-transcribe",
    "gpt-4o-mini-transcribe-2025-12-15",
    "gpt-live-transcribe",
    "gpt-realtime-whisper",
)


class Settings(BaseSettings):
    """The gateway's settings. A field's description is its documentation, in `--help` and in the README."""

    model_config = SettingsConfigDict(env_prefix="STENO_", env_file=".env", extra="ignore", frozen=True)

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    tls_cert: Path | None = Field(
        None, description="Certificate to serve https and wss with, as PEM; a chain begins with the gateway's own."
    )
    tls_key: Path | None = Field(None, description="Its private key, as PEM.")
    model: str = Field(
        "base",
        description="What to serve: a name of the shelf (`steno models`), a folder in Hugging Face or CTranslate2 layout, "
        "or a Hugging Face id.",
    )
    model_aliases: Annotated[tuple[str, ...], NoDecode] = Field(
        DEFAULT_ALIASES, description="Names that clients may use for the model, separated by commas."
    )
    engine: Literal["vllm", "fake", "sync-batch"] = Field(
        "vllm",
        description="The engine: `vllm`; `fake`, which says the length of the audio and needs no weights; or `sync-batch`, "
        "vLLM behind one synchronous worker, to compare with.",
    )
    audio_context: Literal["full", "true"] = Field(
        "true",
        description="Encode each audio at its own length (`true`; what is not to be trusted again in the whole window), or the "
        "whole 30 s window (`full`).",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Numbers of the engine; `auto` is bfloat16 where the hardware multiplies it."
    )
    engine_threads: int = Field(0, ge=0, description="OpenMP threads of the engine on a CPU; 0 is all cores but one.")
    engine_concurrency: int = Field(16, ge=1, description="Windows that decode at once; more of them wait.")
    engine_stall_seconds: float = Field(
        120.0,
        ge=0,
        description="An engine that holds requests and tells nothing of any for so long is killed and built anew; 0 is never.",
    )
    encoders_per_step: int = Field(0, ge=0, description="Windows that one engine step may encode; 0 is 2, or 16 on a GPU.")
    kv_cache_mb: int = Field(
        0,
        ge=0,
        description="The engine's memory for keys and values, in MB; 0 is what it needs on a CPU, what is free on a GPU.",
    )
    cache_dir: Path = Field(
        default_factory=lambda: platformdirs.user_cache_path("steno"),
        description="Where converted checkpoints are kept.",
    )
    max_upload_mb: int = Field(25, ge=1, description="Largest upload, in MiB.")
    fetch_urls: bool = Field(False, description="Take `url` instead of `file`, and fetch it from any public address.")
    fetch_seconds: float = Field(60.0, gt=0, description="Longest time for one fetch, in seconds.")
    max_audio_minutes: float = Field(180.0, gt=0, description="Longest audio of one request, in minutes.")
    vad: bool = Field(True, description="Look for speech first, and decode nothing else.")
    max_requests: int = Field(64, ge=1, description="Transcriptions in progress; more wait a moment, and are refused with 503.")
    kept_share: float = Field(
        0.25,
        ge=0,
        le=0.5,
        description="The part of these places that live sessions leave to files, and files to live sessions.",
    )
    admission_wait_seconds: float = Field(
        2.0, ge=0, description="How long a request waits for a place, in seconds, before its body is read."
    )
    windows_per_request: int = Field(4, ge=1, description="Windows of one file that decode side by side.")
    partial_seconds: float = Field(0.5, gt=0, description="Audio between two partials of a live session, in seconds.")
    partial_context: Literal["full", "true"] = Field(
        "true", description="Encode the whole window for partials, or their own length; finals follow `--audio-context`."
    )
    agreeing_hypotheses: int = Field(3, ge=1, description="Successive partials that must agree on a word to confirm it.")
    open_words: int = Field(1, ge=0, description="Newest words of a partial that are never confirmed.")
    free_finals: bool = Field(
        False, description="Decode finals without the confirmed words; an event tells when one says something else."
    )
    live_buffer_seconds: float = Field(
        90.0, ge=60, description="Audio that a live session may keep, in seconds; past it its sender waits."
    )
    live_idle_seconds: float = Field(60.0, gt=0, description="A live session that sends nothing for so long is ended.")
    realtime_idle_seconds: float = Field(
        300.0, gt=0, description="A WebSocket whose client says nothing for so long is closed: people mute their microphones."
    )
    session_grace_seconds: float = Field(
        30.0, gt=0, description="How long a session is kept that nobody reads, and its events once it is over."
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Web pages from these origins may use the API, separated by commas; `*` is all."
    )
    api_keys: SecretStr = Field(
        SecretStr(""),
        description="Keys that clients need, separated by commas: `name:key`, or `name:sha256:...` as `steno key` prints it.",
    )
    api_keys_file: Path | None = Field(
        None, description="More of them, a line each; read again on SIGHUP, so that keys come and go without a restart."
    )
    without_keys: bool = Field(
        False, description="Let whoever reaches the gateway use it, though it listens elsewhere than on the loopback."
    )
    key_requests: int = Field(0, ge=0, description="Transcriptions in progress of one key; 0 is no bound.")
    key_live_sessions: int = Field(0, ge=0, description="Live sessions in progress of one key; 0 is no bound.")
    key_audio_seconds: float = Field(0.0, ge=0, description="Seconds of audio a minute of one key; 0 is no bound.")
    admin_key: SecretStr = Field(
        SecretStr(""), description="Key that `/bench` asks for; without one it is open on the loopback only."
    )
    bench_dir: Path = Field(Path("bench/out"), description="Where runs of `/bench` are kept.")
    bench_seconds: float = Field(3600.0, gt=0, description="Longest time of one run of `/bench`, in seconds.")
    shutdown_grace_seconds: float = Field(
        30.0, ge=0, description="What a stop leaves to the transcriptions in progress; then they end with an error."
    )
    otlp_endpoint: str = Field(
        "", description="Where traces go, by OTLP over HTTP, as http://collector:4318; empty sends none."
    )
    log_format: Literal["console", "json"] = Field("console", description="Lines for people, or JSON for machines.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="How much to log.")

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine reaches the gateway."""
        return self.host in ("127.0.0.1", "::1", "localhost")

    @model_validator(mode="after")
    def _want_certificate_and_key(self) -> "Settings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        return self

    @field_validator("model_aliases", "cors_origins", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(",") if name.strip())
        return value
