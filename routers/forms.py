"""The multipart form of a transcription: read within bounds, checked field by field.

SDKs differ in how they write a form. A name may come as `x` or `x[]`; an empty value or "null" counts as absent. Unknown
fields are ignored.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, BinaryIO, Literal

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from app.errors import InvalidInputError, UnsupportedValueError, UploadTooLargeError

FORM_OVERHEAD_BYTES = 256 * 1024  # what a form may hold beside the file
RESPONSE_FORMATS = ("json", "text")
KNOWN_RESPONSE_FORMATS = (*RESPONSE_FORMATS, "srt", "verbose_json", "vtt", "diarized_json")


class TranscriptionForm(BaseModel):
    """The fields of POST /v1/audio/transcriptions, beside the file."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str = Field(description="A name that GET /v1/models lists.")
    language: str | None = Field(None, description="ISO-639-1 code of the speech; detected when absent.")
    prompt: str = Field("", description="Text before the audio; steers style and spelling.")
    temperature: Annotated[float, Field(ge=0, le=1, description="0 decodes greedily; above, tokens are sampled.")] = 0.0
    response_format: Literal["json", "text"] = Field("json", description="Shape of the response.")
    stream: bool = Field(False, description="Send text as server-sent events while it is decoded.")

    @field_validator("language")
    @classmethod
    def _normalise_language(cls, value: str | None) -> str | None:
        """Reduce en-US, EN or en_GB to en."""
        return value.strip().lower().replace("_", "-").split("-")[0] if value else None

    @field_validator("response_format", mode="before")
    @classmethod
    def _refuse_formats(cls, value: object) -> object:
        if value not in RESPONSE_FORMATS:
            known = value in KNOWN_RESPONSE_FORMATS
            reason = "is not served here" if known else "is unknown"
            raise UnsupportedValueError(
                f"response_format {value!r} {reason}. Use {' or '.join(map(repr, RESPONSE_FORMATS))} instead.",
                param="response_format",
            )
        return value


@asynccontextmanager
async def read_form(request: Request, *, max_file_bytes: int) -> AsyncIterator[tuple[BinaryIO, TranscriptionForm]]:
    """Read the form; the file lies on disk when it is large, and is gone on leaving.

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
        yield file.file, _checked(fields)
    finally:
        await form.close()


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
        plain = name.removesuffix("[]")
        if isinstance(value, UploadFile):
            file = value if plain == "file" else file
        elif plain != "file" and value.strip() not in ("", "null"):
            fields[plain] = value
    if file is None:
        raise InvalidInputError(
            "Missing required parameter: 'file', an uploaded file.", param="file", code="missing_required_parameter"
        )
    return file, fields


def _checked(fields: dict[str, Any]) -> TranscriptionForm:
    try:
        return TranscriptionForm.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        param = str(first["loc"][0])
        if first["type"] == "missing":
            raise InvalidInputError(
                f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
            ) from error
        raise InvalidInputError(f"Invalid value for '{param}': {first['msg']}.", param=param, code="invalid_value") from error
