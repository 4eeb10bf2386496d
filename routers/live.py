"""A live session over one request: audio goes in as the body, events come out while it is still being sent."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any, Protocol

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from app.audio.arriving import ArrivingStream
from app.audio.decode import MIN_SECONDS, AudioReader, PcmDecoder, RawFormat, Samples, too_short
from app.errors import StenoError, TranscriptionFailedError, UnsupportedValueError, UploadBrokenError, UploadStalledError
from app.live import FEED_SECONDS, LiveSession
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
        permit = holding.enter_context(await services.admission.admit(request.state.client, kind="live"))
        session = services.live.start(permit, options, request_id=request_id, endpoints=endpoints(form.chunking_strategy))
        holding.callback(session.close)
        holding.callback(lambda: permit.spend(session.seconds))
        source = _Samples(request, session, services, raw) if raw else _Container(request, session, services)
        await holding.enter_async_context(source)
        await unless_client_leaves(source.client_left, source.opened())
        return event_stream(_events(session, form, task), client_left=source.client_left, holding=holding.pop_all())


def endpoints(chunking: Chunking | None) -> EndpointPolicy:
    """Return how utterances are found, as OpenAI's `chunking_strategy` asks."""
    if chunking is None or chunking.type == "auto":
        return EndpointPolicy()
    return EndpointPolicy.of_server_vad(
        threshold=chunking.threshold,
        prefix_padding_ms=chunking.prefix_padding_ms,
        silence_duration_ms=chunking.silence_duration_ms,
    )


class _Sink(Protocol):
    """Takes audio, and says when it is too much."""

    @property
    def has_room(self) -> bool: ...

    async def wait_for_room(self) -> None: ...


class _Source:
    """Takes the body, and feeds the session with its sound, in tasks that end when it is left."""

    def __init__(self, request: Request, session: LiveSession, services: Services) -> None:
        self._request, self._session, self._services = request, session, services
        self._rate = services.engine.limits.sample_rate
        self._gone = asyncio.Event()
        self._opened: asyncio.Future[StenoError | None] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "_Source":
        self._tasks = [asyncio.create_task(work) for work in self._work()]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def _work(self) -> list[Coroutine[Any, Any, None]]:
        raise NotImplementedError

    async def client_left(self) -> None:
        """Wait until the client has gone."""
        await self._gone.wait()

    async def opened(self) -> None:
        """Wait until there is sound.

        Raises:
            StenoError: if the body is not audio.

        """
        if error := await asyncio.shield(self._opened):
            raise error

    async def _chunks(self, sink: "_Sink") -> AsyncIterator[bytes]:
        """Receive the body. While there is no room the socket is not read, and the sender waits.

        A client that vanishes meanwhile is only seen by reading on after a ping to it has failed: now and then a little is
        read.
        """
        async for chunk in unless_stalled(self._request.stream(), self._services.settings.live_idle_seconds):
            if not sink.has_room:
                with suppress(TimeoutError):
                    async with asyncio.timeout(PROBE_SECONDS):
                        await sink.wait_for_room()
            yield chunk

    async def _watch(self) -> None:
        """Wait for the client's leaving, once the body has been read."""
        await disconnected(self._request)
        self._gone.set()


class _Samples(_Source):
    """Samples without a header. They are decoded in the event loop: a thread's part in it would cost more than they do."""

    def __init__(self, request: Request, session: LiveSession, services: Services, raw: RawFormat) -> None:
        super().__init__(request, session, services)
        self._decoder = PcmDecoder(raw, rate=self._rate)
        self._held: list[Samples] = []  # not fed yet

    def _work(self) -> list[Coroutine[Any, Any, None]]:
        return [self._take()]

    async def _take(self) -> None:
        try:
            async for chunk in self._chunks(self._session):
                began = time.monotonic()
                self._held.append(self._decoder.feed(chunk))
                self._session.profile.decode += time.monotonic() - began
                if self._is_open():
                    await self._feed_held(only_into_room=True)
            self._tasks.append(asyncio.create_task(self._watch()))
            self._held.append(self._decoder.flush())
            if not self._is_open():
                raise too_short(sum(map(len, self._held)))
            await self._feed_held()
            self._session.stop()
        except ClientDisconnect:
            self._session.close()
            self._gone.set()
        except Exception as error:
            failure = _as_ours(error)
            if self._opened.done():
                self._session.fail(failure)
            else:
                self._opened.set_result(failure)

    def _is_open(self) -> bool:
        if not self._opened.done() and sum(map(len, self._held)) >= MIN_SECONDS * self._rate:
            self._opened.set_result(None)
        return self._opened.done()

    async def _feed_held(self, *, only_into_room: bool = False) -> None:
        """Feed what is held, piece by piece: one chunk of a flood is many seconds."""
        samples, step, fed = np.concatenate(self._held), int(FEED_SECONDS * self._rate), 0
        self._held = []
        while fed < len(samples) and (self._session.has_room or not only_into_room):
            await self._session.feed(samples[fed : fed + step])
            fed += step
        self._held = [samples[fed:]]


class _Container(_Source):
    """A container, which FFmpeg reads in a worker thread as it comes, out of a bounded stream."""

    def __init__(self, request: Request, session: LiveSession, services: Services) -> None:
        super().__init__(request, session, services)
        self._cores = services.live.cores
        self._stream = ArrivingStream(idle=self._cores.idle)

    def _work(self) -> list[Coroutine[Any, Any, None]]:
        return [self._receive(), self._pump()]

    async def __aexit__(self, *_: object) -> None:
        self._stream.interrupt()
        await super().__aexit__()

    async def _receive(self) -> None:
        try:
            async for chunk in self._chunks(self._stream):
                self._stream.write(chunk)
            self._stream.finish()
        except UploadStalledError as error:
            self._stream.fail(error)
            return
        except ClientDisconnect:
            self._stream.interrupt()
            self._gone.set()
            return
        await self._watch()

    def _read(self, reader: AudioReader) -> Samples:
        """Decode a chunk, and count the time that it took, without that for which its bytes were waited for."""
        began, waited = time.monotonic(), self._stream.waited
        samples = reader.read(int(CHUNK_SECONDS * self._rate))
        self._session.profile.decode += time.monotonic() - began - (self._stream.waited - waited)
        return samples

    async def _pump(self) -> None:
        max_seconds = self._services.live.policy.max_seconds
        try:
            reader = await self._cores.call(AudioReader, self._stream, rate=self._rate, max_seconds=max_seconds, live=True)
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
            return formats.done_event(event, form, task, session.profile.summary)
        case _:
            return None
