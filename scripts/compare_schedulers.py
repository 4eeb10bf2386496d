"""Compare two schedulers over a scripted device: `python scripts/compare_schedulers.py 10 20 50`.

The device is a model of a GPU: each request costs an encoder pass, and all that decode share a step for each token. Over it
run, in turn and with the same live sessions, paced in real time: continuous batching with priorities, as Steno uses it; and one
synchronous worker, as the known server for this uses it (`engine.sync_batch.Batcher`). What differs is queueing alone.
"""

import argparse
import asyncio
import heapq
import itertools
import platform
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from app.admission import Admission
from app.cores import Cores
from app.live import LivePolicy, LiveSessions
from app.live_events import LiveDelta
from app.metrics import Metrics
from app.speech.endpointing import EndpointPolicy
from app.speech.vad import FRAME_SAMPLES
from app.transcript import Options
from engine.base import DecodeRequest, Delta
from engine.fake import FakeEngine, Reply
from engine.sync_batch import Batcher

RATE = 16_000
WORD = 5_333  # samples: three words a second
STEP = 1e-4
ENCODERS_PER_STEP = 16


@dataclass(frozen=True)
class Device:
    """What a request costs: its encoder pass, and a step of the decoder for each token, which all that decode share.

    By default whisper-large-v3-turbo on an H200 at 40% of its peak, for a window of 30 s.
    """

    encode_seconds: float = 0.0074
    step_seconds: float = 0.0018


def words_in(request: DecodeRequest) -> Reply:
    """Read the words off their samples."""
    numbers, counts = np.unique(np.round(request.samples[:: WORD // 8] / STEP).astype(int), return_counts=True)
    return Reply(tuple(f" w{n}" for n, count in zip(numbers, counts, strict=True) if n and count > 4))


class LoudIsSpeech:
    """Voice activity: what is not nothing is speech."""

    def feed(self, samples: np.ndarray) -> np.ndarray:
        """Return a probability for each frame."""
        return (np.abs(samples.reshape(-1, FRAME_SAMPLES)).max(axis=1) > 0).astype(np.float32)


@dataclass(order=True)
class _Work:
    priority: int
    number: int
    tokens: int = field(compare=False)
    done: asyncio.Event = field(compare=False, default_factory=asyncio.Event)
    gone: bool = field(compare=False, default=False)


class Continuous(FakeEngine):
    """The device under continuous batching: whoever waits joins at the next step, finals first."""

    def __init__(self, device: Device) -> None:
        super().__init__(words_in, concurrency=64)
        self._device = device
        self._heap: list[_Work] = []
        self._now: list[_Work] = []
        self._numbers = itertools.count()
        self._awake = asyncio.Event()
        self._stepper = asyncio.create_task(self._steps())

    async def __aexit__(self, *error: object) -> None:
        self._stepper.cancel()
        await super().__aexit__(*error)  # type: ignore[arg-type]

    async def _steps(self) -> None:
        while True:
            await self._awake.wait()
            admitted = 0
            while self._heap and admitted < ENCODERS_PER_STEP and len(self._now) < 64:
                work = heapq.heappop(self._heap)
                if not work.gone:
                    self._now.append(work)
                    admitted += 1
            await asyncio.sleep(admitted * self._device.encode_seconds + self._device.step_seconds)
            for work in self._now:
                work.tokens -= 1
                if work.tokens <= 0:
                    work.done.set()
            self._now = [work for work in self._now if work.tokens > 0 and not work.gone]
            if not self._now and not self._heap:
                self._awake.clear()

    async def transcribe(self, request: DecodeRequest) -> AsyncGenerator[Delta, None]:
        """Decode a request."""
        reply = words_in(request)
        work = _Work(request.priority, next(self._numbers), len(reply.pieces) - len(request.prefix) + 2)
        heapq.heappush(self._heap, work)
        self._awake.set()
        try:
            await work.done.wait()
        finally:
            work.gone = True
        async with aclosing(super().transcribe(request)) as deltas:
            async for delta in deltas:
                yield delta


class SyncBatch(FakeEngine):
    """The device behind one synchronous worker."""

    def __init__(self, device: Device) -> None:
        super().__init__(words_in, concurrency=10_000)
        self._device = device
        self._batcher = Batcher(self._run)

    def _run(self, tokens: list[int]) -> list[None]:
        time.sleep(len(tokens) * self._device.encode_seconds + max(tokens) * self._device.step_seconds)
        return [None] * len(tokens)

    async def transcribe(self, request: DecodeRequest) -> AsyncGenerator[Delta, None]:
        """Decode a request."""
        reply = words_in(request)
        await self._batcher.submit(len(reply.pieces) - len(request.prefix) + 2, request.priority)
        async with aclosing(super().transcribe(request)) as deltas:
            async for delta in deltas:
                yield delta


async def one(sessions: LiveSessions, audio: np.ndarray, delay: float) -> tuple[float, float, int]:
    """Speak to a session in real time; return seconds to first text, seconds from stop to the end, and its partials."""
    await asyncio.sleep(delay)
    with await Admission(10_000).admit() as permit:
        session = sessions.start(permit, Options(language="en"), request_id=f"{id(audio)}-{delay}", endpoints=EndpointPolicy())
    began = time.monotonic()
    stopped = 0.0

    async def speak() -> None:
        nonlocal stopped
        for i in range(0, len(audio), 1600):
            await asyncio.sleep(max(0.0, began + i / RATE - time.monotonic()))
            await session.feed(audio[i : i + 1600])
        session.stop()
        stopped = time.monotonic()

    speaking = asyncio.create_task(speak())
    first = None
    async with aclosing(session.events()) as events:
        async for event in events:
            if isinstance(event, LiveDelta) and first is None:
                first = time.monotonic() - began
    await speaking
    return first or float("nan"), time.monotonic() - stopped, session.profile.partials


async def sweep(kind: type[Continuous] | type[SyncBatch], device: Device, count: int, seconds: float) -> str:
    """Run so many sessions at once, and sum up."""
    audio = np.repeat(np.arange(1, int(seconds * 3) + 1), WORD).astype(np.float32) * np.float32(STEP)
    async with kind(device) as engine:
        await engine.wait_ready()
        sessions = LiveSessions(engine, voice_activity=LoudIsSpeech, cores=Cores(2), policy=LivePolicy(), metrics=Metrics())
        ran = await asyncio.gather(*(one(sessions, audio, i * 0.137 % 1.0) for i in range(count)))
    firsts, finals, partials = (np.array(column) for column in zip(*ran, strict=True))
    figures = [
        f"{name} p50 {np.percentile(v, 50):6.2f} p95 {np.percentile(v, 95):6.2f} s"
        for name, v in (("first_text", firsts), ("final_after_stop", finals))
    ]
    return f"{kind.__name__:10} {count:3} sessions: {', '.join(figures)}, partials {partials.mean():.1f}"


async def main() -> None:
    """Run both schedulers in turn for each number of sessions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sessions", type=int, nargs="*", default=[10, 15, 20, 50])
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each speaks")
    parser.add_argument("--encode-ms", type=float, default=Device.encode_seconds * 1000, help="an encoder pass")
    parser.add_argument("--step-ms", type=float, default=Device.step_seconds * 1000, help="a decoder step")
    arguments = parser.parse_args()
    device = Device(arguments.encode_ms / 1000, arguments.step_ms / 1000)
    print(
        f"{date.today()} {platform.processor() or platform.machine()}, Python {platform.python_version()}: {' '.join(sys.argv)}"
    )
    for count in arguments.sessions:
        for kind in (Continuous, SyncBatch):
            print(await sweep(kind, device, count, arguments.seconds), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
