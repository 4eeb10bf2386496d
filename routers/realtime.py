"""`/v1/realtime`: OpenAI's Realtime transcription over a WebSocket.

Two pumps: one hears the client and feeds the live session, one tells the client what the session says. Between them stands the
protocol, which does no IO. A refusal comes as the handshake's HTTP answer, before any work; after it, a client's mistake is
an `error` event and changes nothing.

Bounds: an event of 15 MiB of audio; the live session's own, past which the socket is not read; a client that says nothing for
`realtime_idle_seconds`, or takes nothing for `SEND_SECONDS`, is left. The server asks every 20 s whether a client is still
there (`app.server`).
"""

import asyncio
import json
import logging
import time
from contextlib import ExitStack, aclosing, suppress
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Request, WebSocket
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.websockets import WebSocketDisconnect

from app.audio.decode import PcmDecoder, Samples
from app.errors import ForbiddenError, InvalidInputError, InvalidKeyError, StenoError, TranscriptionFailedError
from app.keys import ClientSecrets
from app.live import FEED_SECONDS, LiveSession
from app.services import Services
from app.transcript import Options, Transcript
from routers.bodies import read_json
from routers.dependencies import AnyServices, GivenKey, ReadyServices, RequestId, know_client
from routers.errors import error_body
from routers.realtime_protocol import (
    MAX_EVENT_CHARACTERS,
    Append,
    Clear,
    ClientMistakeError,
    Commit,
    Conversation,
    Event,
    SessionConfig,
    Update,
    new_id,
    read,
)
from routers.schemas import errors

logger = logging.getLogger(__name__)

SEND_SECONDS = 60
LONG_CHARACTERS = 256 << 10  # of an event, from which on it is read in a thread
GOING_AWAY, VIOLATION, BROKEN = 1001, 1008, 1011  # why a socket is closed (RFC 6455)
KEY_PROTOCOL = "openai-insecure-api-key."  # browsers cannot send headers

router = APIRouter(prefix="/v1/realtime", tags=["realtime"])
socket_router = APIRouter(prefix="/v1/realtime")  # knows more ways to bring a key


# --- client secrets -------------------------------------------------------------------------------------------------------


class ExpiresAfter(BaseModel):
    """When a secret expires."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=10, le=7200)] = 600


class SecretRequest(BaseModel):
    """What a secret is for."""

    model_config = ConfigDict(extra="ignore")

    expires_after: ExpiresAfter = ExpiresAfter()
    session: dict[str, Any] = Field({}, description="How sessions that are opened with it begin, as `session.update` takes it.")


class SecretBody(BaseModel):
    """A secret, for a browser's WebSocket."""

    value: str
    expires_at: int
    session: dict[str, Any]


@router.post(
    "/client_secrets",
    responses=errors(400, 408, 413, 429, 503),
    openapi_extra={"requestBody": {"content": {"application/json": {"schema": SecretRequest.model_json_schema()}}}},
)
async def create_client_secret(request: Request, services: ReadyServices) -> SecretBody:
    """Make a key that opens Realtime sessions for a short time, to hand to a browser."""
    asked = await read_json(request, SecretRequest, max_bytes=MAX_EVENT_CHARACTERS)
    if asked.session.get("type", "transcription") != "transcription":
        raise InvalidInputError("Only transcription sessions are served.", param="session.type", code="invalid_value")
    config = SessionConfig().changed(asked.session)
    secret = services.client_secrets.new(request.state.client, asked.expires_after.seconds, extra=config)
    session = _conversation(services, new_id("sess"), config=config).session()
    return SecretBody(value=secret.value, expires_at=secret.expires_at, session=session)


# --- the handshake --------------------------------------------------------------------------------------------------------


@router.get("", include_in_schema=False)
async def want_upgrade() -> Response:
    """Say that this is a WebSocket's address."""
    body = error_body("This is a WebSocket: connect with wss:// or ws://.", "invalid_request_error", code="upgrade_required")
    return JSONResponse(body, 426, {"Upgrade": "websocket", "Connection": "Upgrade"})


def _know_speaker(websocket: WebSocket, services: AnyServices, header_key: GivenKey) -> None:
    """Find the client, by its key or a client secret, in a header or among the subprotocols.

    Raises:
        InvalidKeyError: if it has none that is valid.
        ForbiddenError: if it is another site's page, and there are no keys.

    """
    offered = [name for name in websocket.scope["subprotocols"] if name.startswith(KEY_PROTOCOL)]
    given = header_key or (offered[0].removeprefix(KEY_PROTOCOL) if offered else "")
    websocket.state.secret = None
    if given.startswith(ClientSecrets.PREFIX):
        secret = services.client_secrets.find(given)
        if secret is None or (secret.client and not services.keys.has(secret.client)):
            raise InvalidKeyError
        websocket.state.client, websocket.state.secret = secret.client, secret
        return
    know_client(websocket, services, given)
    if not services.keys and not _is_from_here(websocket, services.settings.cors_origins):
        raise ForbiddenError("Pages of other sites may not use this gateway: see --cors-origins.", code="origin_not_allowed")


def _is_from_here(websocket: WebSocket, origins: tuple[str, ...]) -> bool:
    """Say whether no page of another site opens this: browsers let any page open any WebSocket."""
    origin = websocket.headers.get("origin")
    if origin is None or "*" in origins or origin in origins:
        return True
    return urlsplit(origin).netloc == websocket.headers.get("host")


@socket_router.websocket("", dependencies=[Depends(_know_speaker)])
async def converse(websocket: WebSocket, services: ReadyServices, request_id: RequestId) -> None:
    """Transcribe what a client sends, for as long as it is there."""
    session_id, secret = new_id("sess"), websocket.state.secret
    asked = websocket.query_params.get("model", "")
    if asked and not asked.startswith("gpt-realtime"):  # SDKs want the model of a conversation there
        services.model(asked)
    offered = websocket.scope["subprotocols"]
    beta = "realtime=v1" in websocket.headers.get("openai-beta", "") or "openai-beta.realtime-v1" in offered
    conversation = _conversation(services, session_id, config=secret.extra if secret else None, model=asked or None, beta=beta)
    with ExitStack() as holding:
        permit = holding.enter_context(await services.admission.admit(websocket.state.client, kind="live"))
        session = services.live.start(
            permit,
            conversation.options,
            request_id=request_id,
            endpoints=conversation.config.endpoints,
            lasting=True,
        )
        holding.callback(lambda: permit.spend(session.seconds))
        holding.callback(session.close)
        await websocket.accept(subprotocol="realtime" if "realtime" in offered else None)
        await _Pumps(websocket, services, session, conversation).run()


def _conversation(
    services: Services, session_id: str, *, config: SessionConfig | None, model: str | None = None, beta: bool = False
) -> Conversation:
    def check(name: str, options: Options) -> None:
        services.model(name)
        services.transcriber.check(options)

    served = {known.id for known in services.models}
    return Conversation(
        session_id,
        expires_at=int(time.time() + services.live.policy.max_seconds),
        model=model if model in served else services.models[0].id,
        check=check,
        config=config,
        beta=beta,
    )


# --- the pumps ------------------------------------------------------------------------------------------------------------


class _Pumps:
    """One connection, from its handshake to its close."""

    def __init__(self, websocket: WebSocket, services: Services, session: LiveSession, conversation: Conversation) -> None:
        self._websocket, self._services = websocket, services
        self._session, self._conversation = session, conversation
        self._decoder = self._new_decoder()
        self._sending = asyncio.Lock()
        self._takes_audio, self._closed = True, False

    async def run(self) -> None:
        """Talk until one of the two has ended."""
        try:
            await self._send(self._conversation.begin())
            telling = asyncio.create_task(self._tell())
            try:
                await self._hear()
            finally:
                self._session.close()
                telling.cancel()
                await asyncio.wait({telling})
        except WebSocketDisconnect:
            pass  # it left while something was told

    # --- the client's side ----------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        """Take the client's events, until it has left or is left."""
        idle_seconds = self._services.settings.realtime_idle_seconds
        while True:
            try:
                async with asyncio.timeout(idle_seconds):
                    message = await self._websocket.receive()
            except TimeoutError:
                error = InvalidInputError(f"The client said nothing for {idle_seconds:g} seconds.", code="session_idle")
                await self._send(self._conversation.error(error))
                await self._close(VIOLATION, "idle")
                return
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            try:
                await self._take(text if text is not None else message["bytes"])
            except ClientMistakeError as mistake:
                await self._send(self._conversation.refuse(mistake))

    async def _take(self, message: str | bytes) -> None:
        long = len(message) > LONG_CHARACTERS
        said = await self._services.live.cores.call(read, message) if long else read(message)
        match said:
            case Append():
                self._conversation.append(said)
                await self._feed(said)
            case Commit():
                self._conversation.commit(said, open_seconds=self._session.open_seconds)
                await self._feed_rest()
                await self._session.commit()
            case Clear():
                self._conversation.clear()
                self._decoder = self._new_decoder()
                await self._session.clear()
            case Update():
                before = self._conversation.config.raw_format
                updated = self._conversation.update(said)
                if self._conversation.config.raw_format != before:
                    await self._feed_rest()
                    self._decoder = self._new_decoder()
                await self._session.change(self._conversation.options, self._conversation.config.endpoints)
                await self._send(updated)

    async def _feed(self, said: Append) -> None:
        """Feed audio piece by piece: one event may hold minutes of it."""
        step = int(self._conversation.config.raw_format.bytes_per_second * FEED_SECONDS)
        for first in range(0, len(said.audio), step):
            began = time.monotonic()
            samples = self._decoder.feed(said.audio[first : first + step])
            self._session.profile.decode += time.monotonic() - began
            await self._feed_samples(samples, said.event_id)
            if len(said.audio) > step:
                await asyncio.sleep(0)

    async def _feed_rest(self) -> None:
        """Feed what the decoder still holds."""
        await self._feed_samples(self._decoder.flush(), None)

    async def _feed_samples(self, samples: Samples, event_id: str | None) -> None:
        if not self._takes_audio:
            return
        try:
            await self._session.feed(samples)
        except StenoError as error:  # it is too long, or the gateway stops: what it has is told, and then the end
            self._takes_audio = False
            self._session.stop()
            await self._send(self._conversation.error(error, event_id))

    def _new_decoder(self) -> PcmDecoder:
        return PcmDecoder(self._conversation.config.raw_format, rate=self._services.engine.limits.sample_rate)

    # --- the session's side ---------------------------------------------------------------------------------------------

    async def _tell(self) -> None:
        """Tell what the session says, and close the socket when it says no more."""
        try:
            async with aclosing(self._session.events()) as events:
                async for event in events:
                    if not isinstance(event, Transcript):
                        await self._send(*self._conversation.tell(event))
            await self._close(GOING_AWAY, "the session is over")
        except WebSocketDisconnect:
            await self._close(BROKEN, "the client does not read")
        except Exception as error:
            if not isinstance(error, StenoError):
                logger.exception("a session could not be told")
            failure = error if isinstance(error, StenoError) else TranscriptionFailedError("The transcription failed.")
            await self._send(*self._conversation.lose_all(failure), self._conversation.error(failure))
            await self._close(BROKEN, "the session has failed")

    async def _send(self, *events: Event) -> None:
        """Send events, those of one call together.

        Raises:
            WebSocketDisconnect: if the client has left, or takes nothing.

        """
        async with self._sending:
            for event in () if self._closed else events:
                text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
                try:
                    async with asyncio.timeout(SEND_SECONDS):
                        await self._websocket.send_text(text)
                except TimeoutError as error:
                    logger.info("the client has stopped reading, and is left")
                    raise WebSocketDisconnect(BROKEN) from error

    async def _close(self, code: int, reason: str) -> None:
        async with self._sending:
            if not self._closed:
                self._closed = True
                with suppress(RuntimeError, TimeoutError):  # it is closed already, or nothing can be sent
                    async with asyncio.timeout(1):
                        await self._websocket.close(code, reason)
