"""What responses look like, for the OpenAPI document. The bodies are written elsewhere; tests hold them to this."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Exact(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Exact):
    """OpenAI's error: all four keys are always there."""

    message: str
    type: str
    param: str | None = Field(description="The field of the request that is to be mended.")
    code: str | None


class ErrorBody(_Exact):
    """Every error has this body."""

    error: ErrorDetail


class InputTokenDetails(_Exact):
    """What was read."""

    text_tokens: int
    audio_tokens: int


class TokenUsage(_Exact):
    """What the work cost, in tokens."""

    type: Literal["tokens"]
    input_tokens: int
    input_token_details: InputTokenDetails
    output_tokens: int
    total_tokens: int


class DurationUsage(_Exact):
    """What the work cost, in seconds of audio, rounded up."""

    type: Literal["duration"]
    seconds: int


class Language(_Exact):
    """A language that was heard."""

    code: str


class Logprob(_Exact):
    """A token, and how likely it was."""

    token: str
    logprob: float
    bytes: list[int]


class Translation(_Exact):
    """`json` of a translation."""

    text: str
    usage: TokenUsage


class Transcription(Translation):
    """`json` of a transcription. `logprobs` are there if `include[]` asks for them."""

    languages: list[Language]
    logprobs: list[Logprob] = []


class SegmentBody(_Exact):
    """A stretch of speech; times in seconds, `seek` in hundredths."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class WordBody(_Exact):
    """A word; times in seconds."""

    word: str
    start: float
    end: float


class VerboseBody(_Exact):
    """`verbose_json`. `segments` and `words` are there if `timestamp_granularities[]` asks for them."""

    task: Literal["transcribe", "translate"]
    language: str = Field(description="The English name, in lower case.")
    duration: float
    text: str
    segments: list[SegmentBody] = []
    words: list[WordBody] = []
    usage: DurationUsage


class ModelBody(_Exact):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    shutdown_date: str | None


class ModelList(_Exact):
    """The models that requests may name."""

    object: Literal["list"]
    data: list[ModelBody]


class Liveness(_Exact):
    """The process answers."""

    status: Literal["alive"]


class Readiness(_Exact):
    """Whether transcriptions are taken now."""

    status: Literal["starting", "ready", "draining", "failed"]
    reason: str
    model: str
    device: str
    seconds: float = Field(description="How long it has been so.")
    transcriptions: int = Field(description="How many are in progress.")
    places: int = Field(description="How many there may be.")
    waiting: int = Field(description="How many wait for a place.")
    live_sessions: int
    first_text_ms: float | None = Field(description="Median of the last ones; null while there are none.")
    final_ms: float | None = Field(description="From a speaker's end to the last text: the same.")
    engine_requests: int = Field(description="How many windows the engine holds.")


_ERRORS = {
    400: "The request cannot be served as it is; `param` names the field.",
    401: "No key, or a wrong one.",
    403: "Not from there.",
    404: "No such model, session or run.",
    408: "The upload stood still.",
    409: "Not in this order: audio before this piece is missing, or another run is in progress.",
    413: "The body is too large.",
    429: "The key has all that it may have; `Retry-After` says when to come back.",
    500: "The transcription was lost.",
    503: "Not now; `Retry-After` says when to come back.",
}

Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int) -> Responses:
    """Describe error responses."""
    known: Responses = {status: {"model": ErrorBody, "description": _ERRORS[status]} for status in statuses}
    return known | {"default": {"model": ErrorBody, "description": "Any other error."}}


def transcripts(kind: type[BaseModel], *, streams: bool) -> Responses:
    """Describe the response to a transcription or translation, whose form depends on `response_format` and `stream`."""
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string", "description": "`text`, `srt` and `vtt`."}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string", "description": "Events, each a line of JSON."}}
    return {200: {"model": kind | VerboseBody, "description": "What was said.", "content": content}}
