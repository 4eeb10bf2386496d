"""A multipart form that is read while it arrives: its fields, and its file, which may be decoded meanwhile.

Fields may come in any order. The body is bounded while it is read, and a client that stops sending is left after a while.
"""

import asyncio
import time
from types import TracebackType
from typing import Self, TypeVar

import anyio.to_thread
from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from app.audio.arriving import ArrivingFile
from app.audio.fetch import Fetcher
from app.errors import (
    InvalidInputError,
    StenoError,
    UnsupportedValueError,
    UploadBrokenError,
    UploadTooLargeError,
)
from routers import bodies
from routers.bodies import unless_stalled
from routers.clients import disconnected
from routers.forms import TranslationForm, plain_name, read_fields
from routers.media import is_audio

FORM_OVERHEAD_BYTES = 256 * 1024  # what a form may hold beside the file
MAX_FIELDS = 1000
MAX_TYPE_CHARACTERS = 1000
WRITE_BYTES = 256 * 1024  # what is written at once when it goes to disk

F = TypeVar("F", bound=TranslationForm)


class Upload:
    """The form of a request. An async context manager: a task of its own reads the body.

    Args:
        request: whose body nothing else may read.
        file: receives the part `file`; closed on exit.
        max_file_bytes: the largest file.
        fetcher: fetches the file where the form names a `url` instead; None refuses that.

    """

    def __init__(self, request: Request, file: ArrivingFile, *, max_file_bytes: int, fetcher: Fetcher | None = None) -> None:
        self.file = file
        self._request = request
        self._max_file_bytes = max_file_bytes
        self._fetcher = fetcher
        self.ended_at = 0.0  # by the monotonic clock, in seconds
        self._fields: list[tuple[str, str]] = []
        self.content_type = request.headers.get("content-type", "")
        self._file_began = asyncio.Event()
        self._body_ended = asyncio.Event()
        self._body_error: Exception | None = None

    async def __aenter__(self) -> Self:
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reading.cancel()
        await asyncio.wait({self._reading})
        self.file.close()

    # --- what has come ------------------------------------------------------------------------------------------------

    @property
    def field_count(self) -> int:
        """How many fields have come so far."""
        return len(self._fields)

    def has(self, name: str) -> bool:
        """Say whether a field has come."""
        return any(plain_name(field)[0] == name for field, _ in self._fields)

    def form(self, kind: type[F]) -> F:
        """Read the fields that have come.

        Raises:
            InvalidInputError: naming the field.

        """
        return read_fields(kind, self._fields)

    async def file_began(self) -> None:
        """Wait until the file begins to arrive.

        Raises:
            StenoError, ClientDisconnect: as `ended` does.

        """
        await self._file_began.wait()
        if self._reading.done():
            self._reading.result()

    async def ended(self) -> None:
        """Wait until all has come.

        Raises:
            UploadTooLargeError: as soon as the size is known, from the header or while reading.
            UploadStalledError: when nothing came for a while.
            InvalidInputError: if the form cannot be read.
            ClientDisconnect: when the client left.

        """
        await asyncio.wait({self._reading})
        self._reading.result()

    async def client_left(self) -> None:
        """Wait until the client has disconnected; for ever if the body was not read to its end for another reason."""
        await self._body_ended.wait()
        if self._body_error is not None:
            if not isinstance(self._body_error, ClientDisconnect):
                await asyncio.Future()
            return
        await disconnected(self._request)

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            try:
                has_file = await self._read_form()
            except Exception as error:
                self._body_error = error
                raise
            finally:
                self._body_ended.set()
            if not has_file:
                await self._fetch()
        except StenoError as error:
            self.file.fail(error)
            raise
        except BaseException:
            self.file.fail(UploadBrokenError())
            raise
        finally:
            self.ended_at = time.monotonic()
            self._file_began.set()

    async def _read_form(self) -> bool:
        """Read the body, and say whether there was a file in it."""
        limit = self._max_file_bytes + FORM_OVERHEAD_BYTES
        declared = self._request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise UploadTooLargeError(self._max_file_bytes, int(declared))
        parts: _Parts | _Whole | None = None
        refusal: InvalidInputError | None = None
        read = 0
        async for chunk in unless_stalled(self._request.stream(), bodies.STALL_SECONDS):
            if (read := read + len(chunk)) > limit:
                raise UploadTooLargeError(self._max_file_bytes, read)
            if refusal is not None:
                continue  # a client that still writes would not read it
            try:
                parts = parts or self._parts()
                await self._take(parts, chunk)
            except InvalidInputError as error:
                refusal = error
                self.file.fail(error)
        if refusal is not None:
            raise refusal
        parts = parts or self._parts()
        parts.end()
        return parts.file_began

    def _parts(self) -> "_Parts | _Whole":
        if is_audio(self.content_type):
            return _Whole(self._request.query_params.multi_items())
        return _Parts(_boundary(self.content_type))

    async def _take(self, parts: "_Parts | _Whole", chunk: bytes) -> None:
        parts.feed(chunk)
        self._fields += parts.take_fields()
        if (size := self.file.size + parts.waiting) > self._max_file_bytes:
            raise UploadTooLargeError(self._max_file_bytes, size)
        if parts.waiting and (not self.file.on_disk or parts.waiting >= WRITE_BYTES or parts.file_ended):
            await self._write(parts.take_file())
        if parts.file_ended and not self.file.complete:
            self.file.finish()
        if parts.file_began:
            self._file_began.set()

    async def _fetch(self) -> None:
        url = next((value for name, value in self._fields if name == "url" and value.strip() not in ("", "null")), None)
        if url is None:
            raise InvalidInputError(
                "Missing required parameter: 'file', an uploaded file.", param="file", code="missing_required_parameter"
            )
        if self._fetcher is None:
            raise UnsupportedValueError("This server fetches no audio. Send it as 'file'.", param="url")
        self._file_began.set()
        await self._fetcher.fetch(url.strip(), self.file)

    async def _write(self, data: bytes) -> None:
        if self.file.on_disk:
            await anyio.to_thread.run_sync(self.file.write, data)
        else:
            self.file.write(data)


def _boundary(content_type: str) -> bytes:
    if len(content_type) > MAX_TYPE_CHARACTERS:
        raise InvalidInputError("The content type is too long.")
    kind, parameters = parse_options_header(content_type)
    if kind.lower() != b"multipart/form-data":
        raise InvalidInputError(
            "The body must be multipart/form-data with the fields 'file' and 'model', or audio, with 'model' in the query."
        )
    if not parameters.get(b"boundary"):
        raise InvalidInputError("The multipart form cannot be read: its content type has no boundary.")
    return parameters[b"boundary"]


class _Received:
    """What has been read of a body, until it is taken: fields, and bytes of the file."""

    def __init__(self) -> None:
        self._fields: list[tuple[str, str]] = []
        self._file = bytearray()
        self.file_began = self.file_ended = False

    @property
    def waiting(self) -> int:
        """How many bytes of the file have been read and not taken."""
        return len(self._file)

    def take_fields(self) -> list[tuple[str, str]]:
        """Return the fields that have been read since the last call."""
        taken, self._fields = self._fields, []
        return taken

    def take_file(self) -> bytes:
        """Return what has been read of the file since the last call."""
        taken, self._file = self._file, bytearray()
        return bytes(taken)


class _Whole(_Received):
    """A body that is the file itself; its fields are the query's."""

    def __init__(self, fields: list[tuple[str, str]]) -> None:
        super().__init__()
        self._fields = fields
        self.file_began = True

    def feed(self, chunk: bytes) -> None:
        """Take what has come."""
        self._file += chunk
        self.file_ended = not chunk

    def end(self) -> None:
        """Nothing is missing."""


class _Parts(_Received):
    """Takes a body apart. Files beside `file` are passed over."""

    def __init__(self, boundary: bytes) -> None:
        super().__init__()
        self._headers: dict[bytes, bytes] = {}
        self._header_name = self._header_value = b""
        self._field: str | None = None  # the part at hand is this field; else it is a file
        self._value = bytearray()
        self._is_the_file = False
        self._ended_well = False
        self._count = self._read = 0  # fields, and their bytes
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._take_header_name,
                    "on_header_value": self._take_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_content,
                    "on_part_data": self._take_content,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise InvalidInputError("The multipart form cannot be read: its boundary is not one.") from error

    def feed(self, chunk: bytes) -> None:
        """Take what has come.

        Raises:
            InvalidInputError: if it is no form.

        """
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise InvalidInputError("The multipart form cannot be read: its parts are malformed.") from error

    def end(self) -> None:
        """Say that nothing more comes.

        Raises:
            InvalidInputError: if the form has not ended.

        """
        if not self._ended_well:
            raise InvalidInputError("The multipart form cannot be read: it ends in the middle.")

    def _begin_part(self) -> None:
        self._headers, self._value = {}, bytearray()

    def _take_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def _begin_content(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        if b"name" not in options:
            raise InvalidInputError("The multipart form cannot be read: a part has no name.")
        name = options[b"name"].decode(errors="replace")
        self._field = None if b"filename" in options else name
        self._is_the_file = self._field is None and plain_name(name)[0] == "file"
        if self._is_the_file and self.file_began:
            raise InvalidInputError("The form has more than one 'file'. Send one.", param="file", code="invalid_value")
        self.file_began = self.file_began or self._is_the_file

    def _take_content(self, data: bytes, start: int, end: int) -> None:
        if self._is_the_file:
            self._file += data[start:end]
        elif self._field is not None:
            self._value += data[start:end]
            if len(self._value) > FORM_OVERHEAD_BYTES:
                raise InvalidInputError(f"The field '{self._field}' is too long.", param=self._field, code="invalid_value")

    def _end_part(self) -> None:
        if self._is_the_file:
            self.file_ended = True
        elif self._field is not None:
            self._read += len(self._field) + len(self._value)
            self._count += 1
            if self._count > MAX_FIELDS or self._read > FORM_OVERHEAD_BYTES:
                raise InvalidInputError(f"The form has more than {MAX_FIELDS} fields, or they are too long.")
            self._fields.append((self._field, self._value.decode(errors="replace")))

    def _end(self) -> None:
        self._ended_well = True
