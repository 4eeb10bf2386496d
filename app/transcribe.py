"""Use case: transcribe a file. Find its windows of speech while it is decoded, have them decoded side by side, join their text.

Nothing waits for the whole file: it is read, searched for speech and sent to the engine window by window, no more than a few
windows ahead. The first window of a file without a known language chooses it, and the others follow, so that one file comes
out in one language. Text of a window flows when all windows before it have ended.

Who cancels what: `Transcriber.run` is an async generator. Closing it cancels the task that reads and the tasks of the windows;
each of these closes its engine request, which the engine aborts.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from app.admission import Permit
from app.audio.arriving import ArrivingFile
from app.audio.decode import AudioReader, AudioSource, RawFormat
from app.cores import Cores
from app.decoding import WindowDecoder, WindowText
from app.errors import InvalidInputError, StenoError, TranscriptionFailedError, UnavailableError
from app.metrics import Metrics, Outcome
from app.speech.reader import SpeechReader
from app.speech.vad import VoiceActivity
from app.speech.windows import CutPolicy, Window
from app.tracing import span
from app.transcript import Options, Piece, Progress, Segment, Stages, TextDelta, TextJoiner, Transcript
from engine.base import (
    DecodeRequest,
    Engine,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    Usage,
)

PATIENCE_SECONDS = 3.0  # of a window for each one of its file before it: other files' first text does not wait for it
RETRY_AFTER_SECONDS = {"starting": 15, "draining": 30, "failed": 60}
TEMPERATURE_TO_TRUST = 0.5  # text decoded above it tells the next window nothing (openai-whisper, `transcribe`)
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

    events: "asyncio.Queue[Piece | WindowText | Exception]" = field(default_factory=asyncio.Queue)


class Transcriber:
    """Transcribes files on an engine.

    Args:
        engine: where windows are decoded.
        voice_activity: makes what finds speech in a file.
        cores: what may read files and look for speech at once.
        windows_per_request: how many windows of a file the engine may hold at once.
        max_seconds: the longest audio that is taken.
        metrics: counts transcriptions.

    """

    def __init__(
        self,
        engine: Engine,
        *,
        voice_activity: Callable[[], VoiceActivity],
        cores: Cores,
        windows_per_request: int,
        max_seconds: float,
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._voice_activity = voice_activity
        self._cores = cores
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
        for param, languages in (("language", [options.language]), ("languages", options.languages)):
            for language in languages:
                if language is not None and language not in limits.languages:
                    raise InvalidInputError(
                        f"Language {language!r} is not known to this model. It knows: {', '.join(limits.languages)}.",
                        param=param,
                        code="invalid_value",
                    )
        if options.task == "translate" and "translation" not in limits.abilities:
            raise InvalidInputError(
                "This model knows only English and cannot translate. Serve a multilingual one.",
                param="model",
                code="unsupported_value",
            )

    def arriving_file(self) -> ArrivingFile:
        """Make a file that can be transcribed while it arrives."""
        return ArrivingFile(idle=self._cores.idle)

    async def open(self, _permit: Permit, file: AudioSource, policy: CutPolicy, raw: RawFormat | None = None) -> SpeechReader:
        """Open a file and decode its beginning, in a worker thread. The file must stay open until `run` has ended.

        `raw` says how samples lie in a file that has no header.

        Raises:
            AudioError: if it is not audio, or known to be too long.

        """
        limits = self._engine.limits
        rate = limits.sample_rate

        def work() -> SpeechReader:
            return SpeechReader(
                AudioReader(file, rate=rate, max_seconds=self._max_seconds, raw=raw),
                self._voice_activity(),
                replace(policy, limit_seconds=limits.window_seconds),
                stop=file.interrupt if isinstance(file, ArrivingFile) else lambda: None,
            )

        return await self._cores.call(work)

    async def run(
        self, permit: Permit, speech: SpeechReader, options: Options, *, request_id: str, stream: bool
    ) -> AsyncGenerator[TextDelta | Progress | Transcript, None]:
        """Transcribe an opened file: text and progress as they come if asked for, and the Transcript last.

        Close it to stop the work.

        Raises:
            AudioError: if the audio turns out to be too long.
            InvalidInputError: if the model cannot do what the options ask.
            UnavailableError: if the engine is not ready.
            TranscriptionFailedError: if the engine lost the request.

        """
        joiner, segments, usage, stages = TextJoiner(), list[Segment](), Usage(), Stages()
        languages = dict.fromkeys([options.language] if options.language else ())
        tokens = Piece("")  # of text that is not shown yet
        began, first_text = time.monotonic(), None
        outcome: Outcome = "left"  # unless it is known better
        work = _FileWork(
            self._engine,
            next_window=lambda: self._cores.call(speech.next_window),
            stop_reading=speech.stop,
            options=options,
            decode_id=f"{request_id}-{permit.number}",
            stream=stream,
            at_once=self._windows_per_request,
        )
        try:
            async with aclosing(work.events_in_order()) as events:
                async for event in events:
                    if isinstance(event, Piece):
                        tokens += event
                        if (shown := joiner.feed(event.text)) and stream:
                            first_text = first_text or time.monotonic() - began
                            yield TextDelta(shown, tokens.spelling, tokens.logprobs)
                            tokens = Piece("")
                    else:
                        joiner.end_window()
                        segments += event.segments
                        usage += event.usage
                        stages += event.stages
                        if event.language and not options.language:
                            languages[event.language] = None
                        if stream:
                            yield Progress(event.end)
            stages += Stages(decode=speech.decode_seconds, vad=speech.vad_seconds)
            outcome = "completed"
        except Exception as error:
            outcome = "failed"
            if isinstance(error, EngineError):
                raise translate_engine_error(error) from error
            raise
        finally:
            seconds = time.monotonic() - began
            self._metrics.file(
                permit.client, outcome, audio=speech.seconds, seconds=seconds, first_text=first_text, stages=stages
            )
        yield Transcript(joiner.text, tuple(languages), speech.seconds, tuple(segments), usage, stages)


class _FileWork:
    """The tasks of one file: one reads windows, and one for each window decodes it."""

    def __init__(
        self,
        engine: Engine,
        *,
        next_window: Callable[[], Awaitable[Window | None]],
        stop_reading: Callable[[], None],
        options: Options,
        decode_id: str,
        stream: bool,
        at_once: int,
    ) -> None:
        self._engine, self._next_window, self._stop_reading = engine, next_window, stop_reading
        self._options, self._decode_id, self._stream = options, decode_id, stream
        self._places = asyncio.Semaphore(1 if options.continuous else at_once)
        self._decoding = 0
        self._said = ""  # by the window before, where windows are continuous
        self._jobs: asyncio.Queue[_Job | Exception | None] = asyncio.Queue(at_once)
        self._language: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        if options.language or options.languages or "detection" not in engine.limits.abilities:
            self._language.set_result(options.language)
        self._tasks: list[asyncio.Task[None]] = []

    async def events_in_order(self) -> AsyncGenerator[Piece | WindowText, None]:
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
            self._stop_reading()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self) -> None:
        """Read windows, as far ahead as there are places for them."""
        try:
            number = 0
            while (window := await self._read_window()) is not None:
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

    async def _read_window(self) -> Window | None:
        with span("read"):
            return await self._next_window()

    async def _decode(self, job: _Job, number: int, window: Window) -> None:
        ahead, self._decoding = self._decoding, self._decoding + 1
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
                languages=self._options.languages,
                task=self._options.task,
                previous_text=f"{self._options.prompt} {self._said}".strip(),
                temperature=self._options.temperature,
                timestamps=True,
                patience_seconds=ahead * PATIENCE_SECONDS,
            )
            start = window.start / self._engine.limits.sample_rate
            with span("window", number=number, start=start, seconds=len(window.samples) / self._engine.limits.sample_rate):
                result = await decoder.decode(request, start=start)
            if self._options.continuous:
                self._said = result.text.strip() if result.temperature <= TEMPERATURE_TO_TRUST else ""
            job.events.put_nowait(result)
        except Exception as error:
            job.events.put_nowait(error)
        finally:
            if number == 0:
                self._settle_language(None)
            self._decoding -= 1
            self._places.release()

    def _settle_language(self, language: str | None) -> None:
        if not self._language.done():
            self._language.set_result(language)
