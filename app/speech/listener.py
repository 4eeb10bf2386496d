"""Voice activity of many streams in one event loop: what waits is looked at together, in a worker thread."""

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt

from app.cores import Cores
from app.speech.vad import VoiceActivity, feed_all

TOGETHER = 64  # more would cost no less each, and all that hear their answer at once keep the event loop busy

Samples = npt.NDArray[np.float32]


class Listener:
    """Looks for speech in what all sessions have, one call after another: while one runs, the next one's audio gathers."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._waiting: list[tuple[VoiceActivity, Samples, asyncio.Future[Samples]]] = []
        self._running: asyncio.Task[None] | None = None

    async def feed(self, stream: VoiceActivity, frames: Samples) -> Samples:
        """Return the probabilities of a stream's next frames."""
        answer: asyncio.Future[Samples] = asyncio.get_running_loop().create_future()
        self._waiting.append((stream, frames, answer))
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await answer

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:TOGETHER], self._waiting[TOGETHER:]
            pairs = [(stream, frames) for stream, frames, _ in batch]
            try:
                found: list[Any] = list(await self._cores.call(feed_all, pairs))
            except Exception as error:
                found = [error] * len(batch)
            for (_, _, answer), result in zip(batch, found, strict=True):
                if answer.cancelled():
                    continue
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)
        self._running = None
