"""The multipart form of a transcription: read within bounds, checked field by field.

SDKs differ in how they write a form. A name may come as `x`, `x[]` or `x[0]`, an object as JSON or as `x[key]`; an empty value
or "null" counts as absent. Unknown fields are ignored, and named in the response's header `x-steno-ignored-fields`.
"""

import json
import re
from collections.abc import AsyncGenerator
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from app.errors import InvalidInputError, UnsupportedValueError, UploadTooLargeError
from app.languages import code_of
from app.speech.windows import AFTER_SECONDS, CutPolicy

FORM_OVERHEAD_BYTES = 256 * 1024  # what a form may hold beside the file
RESPONSE_FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
_LIST_FIELDS = {"timestamp_granularities", "include", "keywords"}
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

    @property
    def ignored(self) -> list[str]:
        """Names of the fields that mean nothing here."""
        return sorted(self.model_extra or ())

    @property
    def context(self) -> str:
        """What the model is told before the audio."""
        return self.prompt

    @property
    def policy(self) -> CutPolicy:
        """Where the audio is to be cut."""
        return CutPolicy()

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client wants each token's log-probability."""
        return False

    @property
    def granularities(self) -> frozenset[str]:
        """Whose times the client wants."""
        return frozenset({"segment"})

    @property
    def spoken_language(self) -> str | None:
        """What the client says that is spoken."""
        return None

    @property
    def streams(self) -> bool:
        """Whether the client wants events."""
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
    stream: bool = Field(False, description="Send text as server-sent events while it is decoded.")
    timestamp_granularities: list[Literal["word", "segment"]] = Field(
        ["segment"], description="Whose times are wanted; needs verbose_json."
    )
    include: list[Literal["logprobs"]] = Field([], description="`logprobs`: each token's log-probability; with json only.")
    keywords: list[str] = Field([], description="Words to expect; also taken as `hotwords` and `context_bias`.")
    chunking_strategy: Chunking | None = Field(
        None, description="Where to cut: `auto`, or `server_vad` with its numbers; else windows are as long as may be."
    )

    @property
    def context(self) -> str:
        """What the model is told before the audio: the prompt, and the words to expect."""
        return " ".join(part for part in (self.prompt, ", ".join(self.keywords)) if part)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client wants each token's log-probability."""
        return bool(self.include)

    @property
    def granularities(self) -> frozenset[str]:
        """Whose times the client wants."""
        return frozenset(self.timestamp_granularities)

    @property
    def policy(self) -> CutPolicy:
        """Where the audio is to be cut."""
        return self.chunking_strategy.policy() if self.chunking_strategy else CutPolicy()

    @property
    def spoken_language(self) -> str | None:
        """What the client says that is spoken."""
        return self.language

    @property
    def streams(self) -> bool:
        """Whether the client wants events."""
        return self.stream

    @field_validator("language")
    @classmethod
    def _normalise_language(cls, value: str | None) -> str | None:
        code = code_of(value) if value else None
        return None if code == "auto" else code

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
        if self.include and self.response_format != "json":
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
    schema["required"] = ["file", *schema["required"]]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


async def read_form(request: Request, kind: type[F], *, max_file_bytes: int) -> tuple[BinaryIO, F]:
    """Read the form. The file lies on disk when it is large; closing it removes it.

    Raises:
        UploadTooLargeError: as soon as the size is known, from the header or while reading.
        InvalidInputError: naming the field.

    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise InvalidInputError("The body must be multipart/form-data with the fields 'file' and 'model'.")
    limit = max_file_bytes + FORM_OVERHEAD_BYTES
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise UploadTooLargeError(max_file_bytes, int(declared))
    try:
        form = await MultiPartParser(
            request.headers, _bounded(request, limit, max_file_bytes), max_part_size=FORM_OVERHEAD_BYTES
        ).parse()
    except (MultiPartException, KeyError, UnicodeDecodeError, LookupError) as error:
        raise InvalidInputError(f"The multipart form cannot be read: {error}.") from error
    try:
        file, fields = _split(form)
        if file.size is not None and file.size > max_file_bytes:
            raise UploadTooLargeError(max_file_bytes, file.size)
        return file.file, _checked(kind, fields)
    except BaseException:
        await form.close()
        raise


async def _bounded(request: Request, limit: int, max_file_bytes: int) -> AsyncGenerator[bytes, None]:
    read = 0
    async for chunk in request.stream():
        read += len(chunk)
        if read > limit:
            raise UploadTooLargeError(max_file_bytes, read)
        yield chunk


def _split(form: FormData) -> tuple[UploadFile, dict[str, Any]]:
    fields: dict[str, Any] = {}
    file = None
    for name, value in form.multi_items():
        match = _NAME.fullmatch(name)
        plain, key = match.groups() if match else (name, None)
        plain = _SYNONYMS.get(plain, plain)
        if isinstance(value, UploadFile):
            if plain == "file" and file is not None:
                raise InvalidInputError("The form has more than one 'file'. Send one.", param="file", code="invalid_value")
            file = value if plain == "file" else file
        elif plain == "file" or value.strip() in ("", "null"):
            continue
        elif plain in _LIST_FIELDS:
            fields.setdefault(plain, []).append(value)
        elif key and not key.isdigit():
            nested = fields.setdefault(plain, {})
            if isinstance(nested, dict):
                nested[key] = value
        else:
            fields[plain] = value
    if file is None:
        raise InvalidInputError(
            "Missing required parameter: 'file', an uploaded file.", param="file", code="missing_required_parameter"
        )
    return file, fields


def _checked(kind: type[F], fields: dict[str, Any]) -> F:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        param = str(first["loc"][0])
        if first["type"] == "missing":
            raise InvalidInputError(
                f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
            ) from error
        raise InvalidInputError(f"Invalid value for '{param}': {first['msg']}.", param=param, code="invalid_value") from error
