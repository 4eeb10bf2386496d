"""How requests come: so many at once (closed), or at random times at a rate (open)."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from bench.corpus import Clip, Deck
from bench.record import Record
from bench.results import InFlight

BRIEF_SECONDS = 0.001  # a request that ends is followed by the next at once: so short a gap is none

Send = Callable[[Clip, Record], Awaitable[None]]


class Flight:
    """Counts the requests under way, and for how long there were how many."""

    def __init__(self) -> None:
        self._changes: list[tuple[float, int]] = []
        self._last_start = 0.0
        self.count = 0

    def begin(self) -> None:
        """One more."""
        self._last_start = time.monotonic()
        self._change(1)

    def end(self) -> None:
        """One less."""
        self._change(-1)

    def _change(self, by: int) -> None:
        self.count += by
        self._changes.append((time.monotonic(), self.count))

    def summary(self) -> InFlight:
        """Describe the time from when the most were under way to when the last began."""
        most = max((count for _, count in self._changes), default=0)
        reached = next((at for at, count in self._changes if count == most), 0.0)
        weighted = total = 0.0
        least = most
        for (at, count), (until, _) in zip(self._changes, self._changes[1:], strict=False):
            if at < reached or at >= self._last_start or until - at < BRIEF_SECONDS:
                continue
            weighted += count * (until - at)
            total += until - at
            least = min(least, count)
        return InFlight(mean=round(weighted / total, 3) if total else most, min=least, max=most)


class Load:
    """Sends requests with clips from a deck, and keeps their records.

    Attributes:
        records: of the requests that are over.
        flight: of those under way.

    """

    def __init__(
        self, workload: str, send: Send, deck: Deck, *, on_record: Callable[[Record], None] = lambda record: None
    ) -> None:
        self._workload = workload
        self._send = send
        self._deck = deck
        self._on_record = on_record
        self._sent = 0
        self.flight = Flight()
        self.records: list[Record] = []

    async def closed(self, n: int, concurrency: int, *, stagger_seconds: float = 0.0) -> None:
        """Send n requests, so many at once all the time: each that ends is followed by the next at once.

        The first ones begin one after the other, `stagger_seconds` apart.
        """
        left = iter(range(n))

        async def worker(place: int) -> None:
            await asyncio.sleep(place * stagger_seconds)
            for _ in left:
                await self._one(None)

        async with asyncio.TaskGroup() as group:
            for place in range(min(n, concurrency)):
                group.create_task(worker(place))

    async def open(self, n: int, rate: float, *, seed: int) -> None:
        """Send n requests at random times, `rate` a second on average (a Poisson process), whatever became of those before."""
        times = random.Random(seed)
        due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(n):
                due += times.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(self._one(due))

    async def _one(self, intended: float | None) -> None:
        clip = self._deck.deal()
        record = Record(self._workload, self._sent, clip.name, clip.seconds, clip.text, intended=intended)
        self._sent += 1
        self.flight.begin()
        try:
            await self._send(clip, record)
        finally:
            self.flight.end()
            self._deck.give_back(clip)
        self.records.append(record)
        self._on_record(record)
