"""The fields of a transcription's form, checked one by one.

SDKs differ in how they write a form. A name may come as `x`, `x[]` or `x[0]`, an object as JSON or as `x[key]`; an empty value
or "null" counts as absent. Unknown fields are ignored, and named in the response's header `x-steno-ignored-fields`.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from app.errors import InvalidInputError, UnsupportedValueError
from app.languages import code_of
from app.speech.windows import AFTER_SECONDS, CutPolicy
from app.transcript import Options
from engine.prompts import Task

RESPONSE_FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
_LIST_FIELDS = {"timestamp_granularities", "include", "keywords", "languages"}
_SYNONYMS = {"hotwords": "keywords", "context_bias": "keywords"}  # vLLM's and Mistral's names
_NAME = re.compile(r"([^\[\]]+)(?:\[(\d*|[a-z_]+)\])?")


class Chunking(BaseModel):
    """OpenAI's `chunking_strategy`: where the audio is cut before it is decoded."""

    type: Literal["auto", "server_vad"]
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[int, Field(ge=0, le=30_000)] = 300
    silence_duration_ms: Annotated[int, Field(ge=0, le=30_000)] = 200

    def policy(self) -> CutPolicy:
        """Return the policy that this asks for; `auto` leaves it to us."""
        if self.type == "auto":
            return CutPolicy()
        silence = self.silence_duration_ms / 1000
        return CutPolicy(
            threshold=self.threshold,
            before_seconds=self.prefix_padding_ms / 1000,
            after_seconds=min(silence, AFTER_SECONDS),
            silence_seconds=silence,
        )


class TranslationForm(BaseModel):
    """The fields of POST /v1/audio/translations, beside the file."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str = Field(description="A name that GET /v1/models lists.")
    prompt: str = Field("", description="Text before the audio; steers style and spelling.")
    temperature: Annotated[float, Field(ge=0, le=1, description="0 decodes greedily; above, tokens are sampled.")] = 0.0
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = Field("json", description="Shape of the response.")
    url: str | None = Field(None, description="Where the audio lies, instead of `file`; taken if the server allows it.")
    condition_on_previous_text: bool = Field(
        False, description="Tell each window of a long file what the one before it said; slower, one after another."
    )

    @property
    def ignored(self) -> list[str]:
        """Names of the fields that mean nothing here."""
        return sorted(self.model_extra or ())

    def options(self, task: Task) -> Options:
        """How to transcribe."""
        return Options(prompt=self.prompt, temperature=self.temperature, task=task, continuous=self.condition_on_previous_text)

    @property
    def policy(self) -> CutPolicy:
        """Where the audio is to be cut."""
        return CutPolicy()

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client wants each token's log-probability."""
        return False

    @property
    def wants_profile(self) -> bool:
        """Whether the client wants to know where the time went."""
        return False

    @property
    def granularities(self) -> frozenset[str]:
        """Whose times the client wants."""
        return frozenset({"segment"})

    @property
    def streams(self) -> bool:
        """Whether the client wants events."""
        return False

    @property
    def wants_progress(self) -> bool:
        """Whether events shall tell how far the work is."""
        return False

    @property
    def wants_chunks(self) -> bool:
        """Whether the client reads vLLM's chunks instead of OpenAI's events."""
        return False

    @field_validator("response_format", mode="before")
    @classmethod
    def _refuse_formats(cls, value: object) -> object:
        if value not in RESPONSE_FORMATS:
            reason = "needs a model that tells speakers apart" if value == "diarized_json" else "is unknown"
            raise UnsupportedValueError(
                f"response_format {value!r} {reason}. Use one of {', '.join(map(repr, RESPONSE_FORMATS))} instead.",
                param="response_format",
            )
        return value


class TranscriptionForm(TranslationForm):
    """The fields of POST /v1/audio/transcriptions, beside the file."""

    language: str | None = Field(None, description="Code or English name of the spoken language; detected when absent.")
    languages: list[str] = Field([], description="When several are spoken: each stretch of speech is taken for one of these.")
    stream: bool = Field(False, description="Send text as server-sent events while it is decoded.")
    stream_progress: bool = Field(False, description="Add events that tell how many seconds are transcribed.")
    stream_include_usage: bool = Field(
        False, description="Send vLLM's chunks, with the usage in the last, instead of OpenAI's events: for `vllm bench serve`."
    )
    timestamp_granularities: list[Literal["word", "segment"]] = Field(
        ["segment"], description="Whose times are wanted; needs verbose_json."
    )
    include: list[Literal["logprobs", "partials", "profile"]] = Field(
        [],
        description="`logprobs`: each token's log-probability, with json only. Of a live session also `partials`: text that is "
        "not certain yet. Of events `profile`: where the time went, in the last.",
    )
    keywords: list[str] = Field([], description="Words to expect; also taken as `hotwords` and `context_bias`.")
    chunking_strategy: Chunking | None = Field(
        None, description="Where to cut: `auto`, or `server_vad` with its numbers; else windows are as long as may be."
    )

    def options(self, task: Task) -> Options:
        """How to transcribe. The model is told the words to expect as text before the audio."""
        return replace(
            super().options(task),
            language=self.language or (self.languages[0] if len(self.languages) == 1 else None),
            languages=tuple(self.languages) if len(self.languages) > 1 else (),
            prompt=" ".join(part for part in (self.prompt, ", ".join(self.keywords)) if part),
            words="word" in self.granularities,
        )

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client wants each token's log-probability."""
        return "logprobs" in self.include

    @property
    def wants_partials(self) -> bool:
        """Whether the client wants text that is not certain yet."""
        return "partials" in self.include

    @property
    def wants_profile(self) -> bool:
        """Whether the client wants to know where the time went."""
        return "profile" in self.include

    @property
    def granularities(self) -> frozenset[str]:
        """Whose times the client wants."""
        return frozenset(self.timestamp_granularities)

    @property
    def policy(self) -> CutPolicy:
        """Where the audio is to be cut."""
        return self.chunking_strategy.policy() if self.chunking_strategy else CutPolicy()

    @property
    def streams(self) -> bool:
        """Whether the client wants events."""
        return self.stream

    @property
    def wants_progress(self) -> bool:
        """Whether events shall tell how far the work is."""
        return self.stream_progress

    @property
    def wants_chunks(self) -> bool:
        """Whether the client reads vLLM's chunks instead of OpenAI's events."""
        return self.stream_include_usage

    @field_validator("language")
    @classmethod
    def _normalise_language(cls, value: str | None) -> str | None:
        code = code_of(value) if value else None
        return None if code == "auto" else code

    @field_validator("languages")
    @classmethod
    def _normalise_languages(cls, values: list[str]) -> list[str]:
        return list(dict.fromkeys(map(code_of, values)))

    @field_validator("chunking_strategy", mode="before")
    @classmethod
    def _read_chunking(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value) if value.lstrip().startswith("{") else {"type": value}
        except ValueError as error:
            raise ValueError("it is no JSON") from error

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> "TranscriptionForm":
        if "timestamp_granularities" in self.model_fields_set and self.response_format != "verbose_json":
            raise InvalidInputError(
                "timestamp_granularities[] needs response_format 'verbose_json'.",
                param="timestamp_granularities",
                code="invalid_value",
            )
        if self.language and self.languages:
            raise InvalidInputError("Send either language or languages[].", param="languages", code="invalid_value")
        if self.wants_logprobs and self.response_format != "json":
            raise UnsupportedValueError(
                f"include[] 'logprobs' is not compatible with response_format {self.response_format!r}. Use 'json' instead.",
                param="include",
            )
        return self


F = TypeVar("F", bound=TranslationForm)


def request_schema(kind: type[TranslationForm]) -> dict[str, Any]:
    """Describe the form for the OpenAPI document."""
    schema = kind.model_json_schema()
    schema["properties"]["file"] = {"type": "string", "format": "binary", "description": "The audio, in any format."}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def read_fields(kind: type[F], items: Iterable[tuple[str, str]]) -> F:
    """Read a form's fields, as they were written.

    Raises:
        InvalidInputError: naming the field.

    """
    fields: dict[str, Any] = {}
    for name, value in items:
        plain, key = plain_name(name)
        if plain == "file" or value.strip() in ("", "null"):
            continue
        if plain in _LIST_FIELDS:
            fields.setdefault(plain, []).append(value)
        elif key and not key.isdigit():
            nested = fields.setdefault(plain, {})
            if isinstance(nested, dict):
                nested[key] = value
        else:
            fields[plain] = value
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise refusal_of(error) from error


def refusal_of(error: ValidationError) -> InvalidInputError:
    """Say which field is wrong, and why."""
    first = error.errors()[0]
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "missing":
        return InvalidInputError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    subject = f"value for '{param}'" if param else "request"
    return InvalidInputError(f"Invalid {subject}: {first['msg']}.", param=param, code="invalid_value")


def plain_name(name: str) -> tuple[str, str | None]:
    """Take a field's name apart into the name that it has here and the key in brackets behind it."""
    match = _NAME.fullmatch(name)
    plain, key = match.groups() if match else (name, None)
    return _SYNONYMS.get(plain, plain), key
