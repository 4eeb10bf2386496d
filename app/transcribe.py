"""Use case: transcribe a file. Find its windows of speech while it is decoded, have them decoded side by side, join their text.

Nothing waits for the whole file: it is read, searched for speech and sent to the engine window by window, no more than a few
windows ahead. The first window of a file without a known language chooses it, and the others follow, so that one file comes
out in one language. Text of a window flows when all windows before it have ended.

Who cancels what: `Transcriber.run` is an async generator. Closing it cancels the task that reads and the tasks of the windows;
each of these closes its engine request, which the engine aborts.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import BinaryIO

import anyio
import anyio.to_thread

from app.admission import Permit
from app.audio.decode import AudioReader
from app.decoding import WindowDecoder, WindowText
from app.errors import InvalidInputError, StenoError, TranscriptionFailedError, UnavailableError
from app.speech.reader import SpeechReader
from app.speech.vad import VoiceActivity
from app.speech.windows import CutPolicy, Window
from app.transcript import Options, Segment, TextDelta, TextJoiner, Transcript
from engine.base import (
    DecodeRequest,
    Engine,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    Usage,
)

RETRY_AFTER_SECONDS = {"starting": 15, "draining": 30, "failed": 60}
_PARAM_OF_FIELD = {"samples": "file", "previous_text": "prompt", "task": "model"}


def translate_engine_error(error: EngineError) -> StenoError:
    """Turn an engine's error into the gateway's own."""
    match error:
        case InvalidRequestError():
            return InvalidInputError(str(error), param=_PARAM_OF_FIELD.get(error.field, error.field))
        case EngineUnavailableError():
            return UnavailableError(
                f"The engine is not ready: {error.state}.", retry_after=RETRY_AFTER_SECONDS.get(error.state.phase, 15)
            )
        case _:
            return TranscriptionFailedError(f"The transcription failed: {error}.")


@dataclass(slots=True)
class _Job:
    """A window at work: the texts that it shows, then what became of it, or the error that ended it."""

    events: "asyncio.Queue[str | WindowText | Exception]" = field(default_factory=asyncio.Queue)


class Transcriber:
    """Transcribes files on an engine.

    Args:
        engine: where windows are decoded.
        voice_activity: makes what finds speech in a file.
        workers: how many files may be read at once.
        windows_per_request: how many windows of a file the engine may hold at once.
        max_seconds: the longest audio that is taken.

    """

    def __init__(
        self,
        engine: Engine,
        *,
        voice_activity: Callable[[], VoiceActivity],
        workers: int,
        windows_per_request: int,
        max_seconds: float,
    ) -> None:
        self._engine = engine
        self._voice_activity = voice_activity
        self._workers = anyio.CapacityLimiter(workers)
        self._windows_per_request = windows_per_request
        self._max_seconds = max_seconds

    def check(self, options: Options) -> None:
        """Refuse what the model cannot do, before any work.

        Raises:
            InvalidInputError: naming the field.
            UnavailableError: if the engine is not ready.

        """
        if self._engine.state.phase != "ready":
            raise translate_engine_error(EngineUnavailableError(self._engine.state))
        limits = self._engine.limits
        if options.language is not None and options.language not in limits.languages:
            raise InvalidInputError(
                f"Language {options.language!r} is not known to this model. It knows: {', '.join(limits.languages)}.",
                param="language",
                code="invalid_value",
            )
        if options.task == "translate" and "translation" not in limits.abilities:
            raise InvalidInputError(
                "This model knows only English and cannot translate. Serve a multilingual one.",
                param="model",
                code="unsupported_value",
            )

    async def open(self, _permit: Permit, file: BinaryIO, policy: CutPolicy) -> SpeechReader:
        """Open a file and decode its beginning, in a worker thread. The file must stay open until `run` has ended.

        Raises:
            AudioError: if it is not audio, or known to be too long.

        """
        limits = self._engine.limits
        rate = limits.sample_rate

        def work() -> SpeechReader:
            reader = AudioReader(file, rate=rate, max_seconds=self._max_seconds)
            return SpeechReader(reader, self._voice_activity(), replace(policy, limit_seconds=limits.window_seconds))

        return await anyio.to_thread.run_sync(work, limiter=self._workers)

    async def run(
        self, permit: Permit, speech: SpeechReader, options: Options, *, request_id: str, stream: bool
    ) -> AsyncGenerator[TextDelta | Transcript, None]:
        """Transcribe an opened file: text deltas if asked for, and the Transcript last. Close it to stop the work.

        Raises:
            AudioError: if the audio turns out to be too long.
            InvalidInputError: if the model cannot do what the options ask.
            UnavailableError: if the engine is not ready.
            TranscriptionFailedError: if the engine lost the request.

        """
        joiner, segments, usage, language = TextJoiner(), list[Segment](), Usage(), options.language
        work = _FileWork(
            self._engine,
            next_window=lambda: anyio.to_thread.run_sync(speech.next_window, limiter=self._workers),
            options=options,
            decode_id=f"{request_id}-{permit.number}",
            stream=stream,
            at_once=self._windows_per_request,
        )
        try:
            async with aclosing(work.events_in_order()) as events:
                async for event in events:
                    if isinstance(event, str):
                        shown = joiner.feed(event)
                        if shown and stream:
                            yield TextDelta(shown)
                    else:
                        joiner.end_window()
                        segments += event.segments
                        usage += event.usage
                        language = language or event.language
        except EngineError as error:
            raise translate_engine_error(error) from error
        yield Transcript(joiner.text, language, speech.seconds, tuple(segments), usage)


class _FileWork:
    """The tasks of one file: one reads windows, and one for each window decodes it."""

    def __init__(
        self,
        engine: Engine,
        *,
        next_window: Callable[[], Awaitable[Window | None]],
        options: Options,
        decode_id: str,
        stream: bool,
        at_once: int,
    ) -> None:
        self._engine, self._next_window = engine, next_window
        self._options, self._decode_id, self._stream = options, decode_id, stream
        self._places = asyncio.Semaphore(at_once)
        self._jobs: asyncio.Queue[_Job | Exception | None] = asyncio.Queue(at_once)
        self._language: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        if options.language is not None or "detection" not in engine.limits.abilities:
            self._language.set_result(options.language)
        self._tasks: list[asyncio.Task[None]] = []

    async def events_in_order(self) -> AsyncGenerator[str | WindowText, None]:
        """Yield each window's texts, and then what became of it, as if one were decoded after another."""
        self._tasks.append(asyncio.create_task(self._read()))
        try:
            while (job := await self._jobs.get()) is not None:
                if isinstance(job, Exception):
                    raise job
                while True:
                    event = await job.events.get()
                    if isinstance(event, Exception):
                        raise event
                    yield event
                    if isinstance(event, WindowText):
                        break
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self) -> None:
        """Read windows, as far ahead as there are places for them."""
        try:
            number = 0
            while (window := await self._next_window()) is not None:
                await self._places.acquire()
                job = _Job()
                task = asyncio.create_task(self._decode(job, number, window))
                task.add_done_callback(self._tasks.remove)
                self._tasks.append(task)
                await self._jobs.put(job)
                number += 1
            await self._jobs.put(None)
        except Exception as error:
            await self._jobs.put(error)

    async def _decode(self, job: _Job, number: int, window: Window) -> None:
        try:
            first = number == 0
            language = None if first and not self._language.done() else await asyncio.shield(self._language)
            decoder = WindowDecoder(
                self._engine,
                words=self._options.words,
                stream=self._stream,
                show=job.events.put_nowait,
                tell_language=self._settle_language,
            )
            request = DecodeRequest(
                id=f"{self._decode_id}-{number}",
                samples=window.samples,
                language=language,
                task=self._options.task,
                previous_text=self._options.prompt,
                temperature=self._options.temperature,
                timestamps=True,
            )
            start = window.start / self._engine.limits.sample_rate
            job.events.put_nowait(await decoder.decode(request, start=start))
        except Exception as error:
            job.events.put_nowait(error)
        finally:
            if number == 0:
                self._settle_language(None)
            self._places.release()

    def _settle_language(self, language: str | None) -> None:
        if not self._language.done():
            self._language.set_result(language)
