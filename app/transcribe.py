"""Use case: transcribe a file. Decode it, cut it into windows, decode these side by side, join their text in order.

The first window of a file without a known language chooses it, and the others follow, so that one file comes out in one
language. Its deltas flow at once; those of later windows wait until all before them have ended.

Who cancels what: `Transcriber.run` is an async generator. Closing it cancels the tasks of its windows; each task closes its
engine request, which the engine aborts.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import BinaryIO

import anyio
import anyio.to_thread

from app.admission import Permit
from app.audio.decode import Audio, decode
from app.audio.windows import cut_windows
from app.errors import InvalidInputError, StenoError, TranscriptionFailedError, UnavailableError
from app.transcript import Options, TextDelta, TextJoiner, Transcript
from engine.base import (
    DecodeRequest,
    Delta,
    Engine,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    Usage,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = {"starting": 15, "draining": 30, "failed": 60}


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


_PARAM_OF_FIELD = {"samples": "file", "previous_text": "prompt"}


class Transcriber:
    """Transcribes files on an engine.

    Args:
        engine: where windows are decoded.
        workers: how many files may be decoded to samples at once.
        windows_per_request: how many windows of a file the engine may hold at once.
        max_seconds: the longest audio that is taken.

    """

    def __init__(self, engine: Engine, *, workers: int, windows_per_request: int, max_seconds: float) -> None:
        self._engine = engine
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
        known = self._engine.limits.languages
        if options.language is not None and options.language not in known:
            raise InvalidInputError(
                f"Language {options.language!r} is not known to this model. It knows: {', '.join(known)}.",
                param="language",
                code="invalid_value",
            )

    async def open(self, _permit: Permit, file: bytes | BinaryIO) -> Audio:
        """Decode a file, in a worker thread.

        Raises:
            AudioError: see `app.audio.decode.decode`.

        """
        rate = self._engine.limits.sample_rate
        return await anyio.to_thread.run_sync(
            lambda: decode(file, rate=rate, max_seconds=self._max_seconds), limiter=self._workers
        )

    async def run(
        self, permit: Permit, audio: Audio, options: Options, *, request_id: str, deltas: bool
    ) -> AsyncGenerator[TextDelta | Transcript, None]:
        """Transcribe decoded audio: text deltas if asked for, and the Transcript last. Close it to stop the work.

        Raises:
            InvalidInputError: if the model cannot do what the options ask.
            UnavailableError: if the engine is not ready.
            TranscriptionFailedError: if the engine lost the request.

        """
        joiner, usage, language = TextJoiner(), Usage(), options.language
        try:
            async with aclosing(self._windows_in_order(audio, options, f"{request_id}-{permit.number}", deltas)) as windows:
                async for delta in windows:
                    shown = joiner.feed(delta.text)
                    if shown and deltas:
                        yield TextDelta(shown)
                    language = language or delta.language
                    if delta.finish_reason is not None:
                        joiner.end_window()
                        usage += delta.usage
                        if delta.finish_reason != "stop":
                            logger.warning("%s: a window ended by %s", request_id, delta.finish_reason)
        except EngineError as error:
            raise translate_engine_error(error) from error
        yield Transcript(joiner.text, language, audio.seconds, usage)

    async def _windows_in_order(
        self, audio: Audio, options: Options, decode_id: str, deltas: bool
    ) -> AsyncGenerator[Delta, None]:
        """Decode the windows side by side and yield their deltas as if one after another."""
        windows = cut_windows(audio.samples, rate=audio.rate, limit=self._engine.limits.window_samples)
        places = asyncio.Semaphore(self._windows_per_request)
        language: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        if options.language is not None or "detection" not in self._engine.limits.abilities:
            language.set_result(options.language)
        # A window's queue holds its deltas, then None when it has ended, or the error that ended it.
        queues: list[asyncio.Queue[Delta | Exception | None]] = [asyncio.Queue() for _ in windows]

        async def decode_window(i: int) -> None:
            try:
                async with places:
                    request = DecodeRequest(
                        id=f"{decode_id}-{i}",
                        samples=audio.samples[slice(*windows[i])],
                        language=await language_for(i),
                        task=options.task,
                        previous_text=options.prompt,
                        temperature=options.temperature,
                        deltas=deltas,
                    )
                    async with aclosing(self._engine.transcribe(request)) as stream:
                        async for delta in stream:
                            if delta.language is not None and not language.done():
                                language.set_result(delta.language)
                            queues[i].put_nowait(delta)
            except Exception as error:
                queues[i].put_nowait(error)
            else:
                queues[i].put_nowait(None)
            finally:
                if i == 0 and not language.done():
                    language.set_result(None)

        async def language_for(i: int) -> str | None:
            return None if i == 0 and not language.done() else await asyncio.shield(language)

        tasks = [asyncio.create_task(decode_window(i)) for i in range(len(windows))]
        try:
            for queue in queues:
                while (item := await queue.get()) is not None:
                    if isinstance(item, Exception):
                        raise item
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
