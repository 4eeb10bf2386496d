"""Live sessions as a resource, for browsers: audio is posted piece by piece, and an EventSource reads what is heard.

Each piece has a sequence number, so that it may be sent again when its answer was lost. The events' address holds a secret: an
EventSource cannot send a key.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from app.audio.decode import PcmDecoder, RawFormat
from app.errors import InvalidInputError, StenoError, UnavailableError, UnknownSessionError, UploadTooLargeError
from app.live_events import LiveDelta, LiveEvent, UtteranceClosed, UtteranceFinal, UtteranceOpened
from app.session_store import HeldSession, Missed
from app.speech.endpointing import EndpointPolicy
from routers.bodies import read_body, read_json
from routers.clients import disconnected
from routers.dependencies import AnyServices, ReadyServices, RequestId
from routers.errors import body_of
from routers.forms import TranscriptionForm
from routers.live import endpoints, write_event
from routers.media import raw_format
from routers.schemas import errors
from routers.sse import last_number, numbered_stream

BINARY = {"type": "string", "format": "binary"}
MAX_REQUEST_BYTES = 256 * 1024
MAX_PIECE_BYTES = 4 << 20
MAX_PIECE_SECONDS = 30
MAX_WAITING_PIECES = 4
ROOM_SECONDS = 10.0  # a piece that finds no room for so long is refused, and may come again

router = APIRouter(prefix="/v1/audio/sessions", tags=["live sessions"])
events_router = APIRouter(prefix="/v1/audio/sessions", tags=["live sessions"])  # needs no key: its address is a secret


class SessionRequest(TranscriptionForm):
    """What a session is to be: the fields of a transcription, and how its audio comes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    content_type: str = Field(
        "audio/pcm;rate=16000", description="How each piece of audio is encoded; samples without a header."
    )
    endpointing: Literal["server", "client"] = Field(
        "server", description="Who ends utterances: the server, where silence is, or the client, by `commit`."
    )


class SessionBody(BaseModel):
    """A session."""

    id: str
    object: Literal["audio.session"]
    created: int
    model: str
    status: Literal["open", "over"]
    next_sequence: int = Field(description="The number that the next piece of audio must have.")
    seconds: float = Field(description="How much audio has come.")
    events_url: str = Field(description="Where its events are, for who has this address: an EventSource needs no key.")


class PieceBody(BaseModel):
    """What became of a piece of audio."""

    sequence: int
    next_sequence: int
    taken: bool = Field(description="False if it had been taken before.")


class _Door:
    """What this door knows of a session."""

    def __init__(self, form: SessionRequest, raw: RawFormat, rate: int) -> None:
        self.form = form
        self.raw = raw
        self.decoder = PcmDecoder(raw, rate=rate)


@router.post(
    "",
    status_code=201,
    responses=errors(400, 404, 503),
    openapi_extra={
        "requestBody": {"required": True, "content": {"application/json": {"schema": SessionRequest.model_json_schema()}}}
    },
)
async def create_session(request: Request, services: ReadyServices, request_id: RequestId) -> SessionBody:
    """Begin a live session."""
    form = await read_json(request, SessionRequest, max_bytes=MAX_REQUEST_BYTES)
    services.model(form.model)
    options = form.options("transcribe")
    services.transcriber.check(options)
    raw = raw_format(form.content_type)
    if raw is None:
        raise InvalidInputError(
            "A session takes samples without a header, as audio/pcm;rate=16000.", param="content_type", code="invalid_value"
        )
    with ExitStack() as holding:
        permit = holding.enter_context(await services.admission.admit(request.state.client, kind="live"))
        policy: EndpointPolicy | None = endpoints(form.chunking_strategy) if form.endpointing == "server" else None
        session = services.live.start(permit, options, request_id=request_id, endpoints=policy)
        holding.callback(lambda: permit.spend(session.seconds))
        door = _Door(form, raw, services.engine.limits.sample_rate)
        held = services.sessions.hold(session, holding.pop_all(), extra=door)
    return _body(held)


@router.get("/{session_id}", responses=errors(404))
async def retrieve_session(session_id: str, services: AnyServices) -> SessionBody:
    """Describe a session."""
    return _body(services.sessions.find(session_id))


@router.post(
    "/{session_id}/audio",
    responses=errors(400, 404, 409, 413, 503),
    openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": BINARY}}}},
)
async def add_audio(
    request: Request,
    session_id: str,
    services: AnyServices,
    sequence: Annotated[int, Query(ge=0, description="0 for the first piece, and one more for each next.")],
) -> PieceBody:
    """Add a piece of audio. One that was taken before changes nothing; one that comes too early is refused."""
    held = services.sessions.find(session_id)
    door: _Door = held.extra
    if held.waiting >= MAX_WAITING_PIECES:
        raise UnavailableError("Other pieces of this session are still waiting; come back.", retry_after=2)
    async with held.turn():
        data = await read_body(request, max_bytes=MAX_PIECE_BYTES)
        if len(data) > door.raw.bytes_per_second * MAX_PIECE_SECONDS:
            raise UploadTooLargeError(door.raw.bytes_per_second * MAX_PIECE_SECONDS, len(data), param="body")
        taken = held.expects(sequence)
        if taken:
            try:
                async with asyncio.timeout(ROOM_SECONDS):
                    await held.session.wait_for_room()
            except TimeoutError:
                raise UnavailableError("The session has more audio than it may keep; come back.", retry_after=2) from None
            await held.session.feed(door.decoder.feed(data))
            held.posted(empty=not data)
    return PieceBody(sequence=sequence, next_sequence=held.next_sequence, taken=taken)


@router.post("/{session_id}/commit", status_code=202, responses=errors(404))
async def commit(session_id: str, services: AnyServices) -> SessionBody:
    """End the utterance after the last sample that has come."""
    held = services.sessions.find(session_id)
    async with held.posting:
        await _feed_rest(held)
        await held.session.commit()
    return _body(held)


@router.post("/{session_id}/stop", status_code=202, responses=errors(404))
async def stop(session_id: str, services: AnyServices) -> SessionBody:
    """Say that no more audio comes; the rest of the text does, and then the end."""
    held = services.sessions.find(session_id)
    async with held.posting:
        await _feed_rest(held)
        held.session.stop()
    return _body(held)


@router.delete("/{session_id}", status_code=204, responses=errors(404))
async def delete_session(session_id: str, services: AnyServices) -> Response:
    """End a session at once, and forget it."""
    await services.sessions.remove(services.sessions.find(session_id))
    return Response(status_code=204)


@events_router.get(
    "/{session_id}/events",
    response_model=None,
    responses=errors(404) | {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def events(
    request: Request,
    session_id: str,
    services: AnyServices,
    token: Annotated[str, Query(description="The secret of `events_url`.")] = "",
    last_event_id: Annotated[str | None, Header(description="Goes on after this event.")] = None,
) -> Response:
    """Follow a session. A reader that was away goes on where it was; one that has seen all gets 204, and need not come back."""
    held = services.sessions.find(session_id)
    if not secrets.compare_digest(token.encode(), held.token.encode()):
        raise UnknownSessionError(session_id)
    after = last_number(last_event_id)
    if held.is_read_up(after):
        return Response(status_code=204)

    return numbered_stream(_events(held, after), client_left=lambda: disconnected(request))


async def _events(held: HeldSession, after: int | None) -> AsyncGenerator[tuple[int | None, dict[str, Any]], None]:
    form: SessionRequest = held.extra.form
    async with aclosing(held.events(after)) as items:
        async for item in items:
            if isinstance(item, Missed):
                yield None, {"type": "session.events_missed", "count": item.count}
            elif isinstance(item.event, StenoError):
                yield item.number, {"type": "error"} | body_of(item.event)
            elif (written := _event(item.event, held, form)) is not None:
                yield item.number, written


def _event(event: LiveEvent, held: HeldSession, form: SessionRequest) -> dict[str, Any] | None:
    """Write an event as every door does, and beside it where utterances begin and end."""
    match event:
        case UtteranceOpened(utterance, start):
            return {"type": "utterance.opened", "utterance": utterance, "start": round(start, 3)}
        case UtteranceClosed(utterance, end):
            return {"type": "utterance.closed", "utterance": utterance, "end": round(end, 3)}
        case UtteranceFinal(segment, utterance, language):
            times = {"start": round(segment.start, 3), "end": round(segment.end, 3)}
            text = {"text": segment.text.strip(), "language": language}
            return {"type": "utterance.final", "utterance": utterance} | text | times
    written = write_event(event, held.session, form, "transcribe")
    return written | {"utterance": event.utterance} if written and isinstance(event, LiveDelta) else written


async def _feed_rest(held: HeldSession) -> None:
    """Feed what the resampler holds, so that the cut is after the last sample that has come."""
    if len(rest := held.extra.decoder.flush()) and not held.session.over:
        await held.session.feed(rest)


def _body(held: HeldSession) -> SessionBody:
    return SessionBody(
        id=held.id,
        object="audio.session",
        created=int(held.created),
        model=held.extra.form.model,
        status="over" if held.session.over else "open",
        next_sequence=held.next_sequence,
        seconds=round(held.session.seconds, 3),
        events_url=f"/v1/audio/sessions/{held.id}/events?token={held.token}",
    )
