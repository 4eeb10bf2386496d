"""A live session over one request: audio goes in as the body, events come out while it is still being sent."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from app.audio.arriving import ArrivingStream
from app.audio.decode import AudioReader, RawFormat
from app.errors import StenoError, TranscriptionFailedError, UnsupportedValueError, UploadBrokenError, UploadStalledError
from app.live import LiveSession
from app.live_events import LiveDelta, LiveEvent, LivePartial, UtteranceChanged
from app.services import Services
from app.speech.endpointing import EndpointPolicy
from app.transcript import TextDelta, Transcript
from engine.prompts import Task
from routers import formats
from routers.bodies import unless_stalled
from routers.clients import disconnected, unless_client_leaves
from routers.forms import Chunking, TranscriptionForm
from routers.media import raw_format
from routers.sse import event_stream

logger = logging.getLogger(__name__)

CHUNK_SECONDS = 0.1  # what is decoded at a time
PROBE_SECONDS = 20  # longer than the time between pings
LEAST_SILENCE_SECONDS = 0.1  # that can close an utterance
LINGER_SECONDS = 0.5  # a client that still writes when its server answers and closes would not read why


async def transcribe_live(
    request: Request, services: Services, request_id: str, form: TranscriptionForm, task: Task
) -> Response:
    """Answer a request whose body is audio that may still be spoken.

    Raises:
        StenoError: if it cannot be served.

    """
    try:
        return await _answer(request, services, request_id, form, task)
    except StenoError:
        with suppress(TimeoutError, ClientDisconnect, RuntimeError):
            async with asyncio.timeout(LINGER_SECONDS):
                async for _ in request.stream():
                    pass
        raise


async def _answer(request: Request, services: Services, request_id: str, form: TranscriptionForm, task: Task) -> Response:
    raw = raw_format(request.headers.get("content-type", ""))
    services.model(form.model)
    options = form.options(task)
    services.transcriber.check(options)
    if options.words:
        raise UnsupportedValueError("A live session has no times of words.", param="timestamp_granularities")
    async with AsyncExitStack() as holding:
        permit = holding.enter_context(services.admission.admit())
        session = services.live.start(permit, options, request_id=request_id, endpoints=endpoints(form.chunking_strategy))
        holding.callback(session.close)
        body = _Body(request, services)
        await holding.enter_async_context(body)
        pump = _Pump(body, session, services, raw)
        await holding.enter_async_context(pump)
        await unless_client_leaves(body.client_left, pump.opened())
        return event_stream(_events(session, form, task), client_left=body.client_left, holding=holding.pop_all())


def endpoints(chunking: Chunking | None) -> EndpointPolicy:
    """Return how utterances are found, as OpenAI's `chunking_strategy` asks."""
    if chunking is None or chunking.type == "auto":
        return EndpointPolicy()
    silence = chunking.silence_duration_ms / 1000
    silence = max(silence, LEAST_SILENCE_SECONDS)
    return EndpointPolicy(
        threshold=chunking.threshold,
        before_seconds=chunking.prefix_padding_ms / 1000,
        after_seconds=min(silence, EndpointPolicy().after_seconds),
        silence_seconds=silence,
    )


class _Body:
    """Reads the body into a bounded stream. While that is full the socket is not read, and the sender waits.

    A client that vanishes meanwhile is only seen by reading on after a ping to it has failed: now and then a little is read.
    """

    def __init__(self, request: Request, services: Services) -> None:
        self._request = request
        self._idle_seconds = services.settings.live_idle_seconds
        self._gone = asyncio.Event()
        self.stream = ArrivingStream(idle=services.live.cores.idle)

    async def __aenter__(self) -> "_Body":
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stream.interrupt()
        self._reading.cancel()
        await asyncio.wait({self._reading})

    async def client_left(self) -> None:
        await self._gone.wait()

    async def _read(self) -> None:
        try:
            async for chunk in unless_stalled(self._request.stream(), self._idle_seconds):
                with suppress(TimeoutError):
                    async with asyncio.timeout(PROBE_SECONDS):
                        await self.stream.wait_for_room()
                self.stream.write(chunk)
            self.stream.finish()
        except UploadStalledError as error:
            self.stream.fail(error)
            return
        except ClientDisconnect:
            self.stream.interrupt()
            self._gone.set()
            return
        await disconnected(self._request)
        self._gone.set()


class _Pump:
    """Decodes the stream, and feeds the session with its sound."""

    def __init__(self, body: _Body, session: LiveSession, services: Services, raw: RawFormat | None) -> None:
        self._body, self._session, self._raw = body, session, raw
        self._cores = services.live.cores
        self._rate = services.engine.limits.sample_rate
        self._max_seconds = services.live.policy.max_seconds
        self._opened: asyncio.Future[StenoError | None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> "_Pump":
        self._pumping = asyncio.create_task(self._pump())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._body.stream.interrupt()
        self._pumping.cancel()
        await asyncio.wait({self._pumping})

    def _read(self, reader: AudioReader) -> Any:
        """Decode a chunk, and count the time that it took, without that for which its bytes were waited for."""
        began, waited = time.monotonic(), self._body.stream.waited
        samples = reader.read(int(CHUNK_SECONDS * self._rate))
        self._session.profile.decode += time.monotonic() - began - (self._body.stream.waited - waited)
        return samples

    async def opened(self) -> None:
        """Wait until there is sound.

        Raises:
            StenoError: if the body is not audio.

        """
        if error := await asyncio.shield(self._opened):
            raise error

    async def _pump(self) -> None:
        try:
            reader = await self._cores.call(
                AudioReader, self._body.stream, rate=self._rate, max_seconds=self._max_seconds, raw=self._raw, live=True
            )
        except Exception as error:
            self._opened.set_result(_as_ours(error))
            return
        self._opened.set_result(None)
        try:
            while len(samples := await self._cores.call(self._read, reader)):
                await self._session.feed(samples)
            self._session.stop()
        except UploadBrokenError:
            self._session.close()
        except Exception as error:
            self._session.fail(_as_ours(error))
        finally:
            reader.close()


def _as_ours(error: Exception) -> StenoError:
    if isinstance(error, StenoError):
        return error
    logger.error("a live session's audio could not be taken", exc_info=error)
    return TranscriptionFailedError(f"The transcription failed: {type(error).__name__}.")


async def _events(session: LiveSession, form: TranscriptionForm, task: Task) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(session.events()) as events:
        async for event in events:
            if (written := write_event(event, session, form, task)) is not None:
                yield written


def write_event(event: LiveEvent, session: LiveSession, form: TranscriptionForm, task: Task) -> dict[str, Any] | None:
    """Write an event of a session as its client wants it, or None where he does not."""
    match event:
        case LiveDelta(_, text, tokens):
            spelling, logprobs = tuple(t.spelling for t in tokens), tuple(t.logprob for t in tokens)
            return formats.delta_event(TextDelta(text, spelling, logprobs), form)
        case LivePartial(utterance, revision, text, seconds) if form.wants_partials:
            partial = {"utterance": utterance, "revision": revision, "text": text, "seconds": round(seconds, 3)}
            return {"type": "transcript.text.partial"} | partial
        case UtteranceChanged(utterance, text):
            return {"type": "transcript.text.changed", "utterance": utterance, "text": text}
        case Transcript():
            profile = {"profile": session.profile.summary()} if form.wants_profile else {}
            return formats.done_event(event, form, task) | profile
        case _:
            return None
