"""Live sessions that outlive a request: audio comes in pieces that may be sent twice, events are kept for who comes back.

A held session lives for as long as somebody reads its events, or comes back within the grace period. Its events lie in a ring:
a reader that was away goes on where it was, and is told how many it missed if it was away too long.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from app.errors import SequenceGapError, StenoError, UnknownSessionError
from app.live import LiveSession
from app.live_events import LiveEvent

logger = logging.getLogger(__name__)

RING_EVENTS = 2000
MAX_EMPTY_PIECES = 100


@dataclass(frozen=True, slots=True)
class Kept:
    """An event and its number, which rises by one; the event is an error if the session ended with one."""

    number: int
    event: LiveEvent | StenoError


@dataclass(frozen=True, slots=True)
class Missed:
    """So many events are gone that this reader has not seen."""

    count: int


class HeldSession:
    """A live session under an id. `token` opens its events, to a reader that cannot send a key."""

    def __init__(self, session: LiveSession, holding: ExitStack, *, extra: Any) -> None:
        self.id = f"sess_{secrets.token_urlsafe(18)}"
        self.token = secrets.token_urlsafe(24)
        self.session = session
        self.extra = extra  # what its door knows of it
        self.created = time.time()
        self.next_sequence = 0
        self.readers = 0
        self.waiting = self.empty_in_a_row = 0
        self.posting = asyncio.Lock()
        self.read_at = self.posted_at = time.monotonic()  # the last time that somebody did
        self.over_at: float | None = None
        self._holding = holding
        self._ring: deque[Kept] = deque(maxlen=RING_EVENTS)
        self._told = 0
        self._news = asyncio.Condition()
        self._collecting = asyncio.create_task(self._collect())

    async def close(self) -> None:
        """End the session and let go of what it held."""
        self._holding.close()
        await asyncio.wait({self._collecting})

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the pieces of audio before this one."""
        self.waiting += 1
        self.posted_at = time.monotonic()
        try:
            async with self.posting:
                yield
        finally:
            self.waiting -= 1

    def posted(self, *, empty: bool) -> None:
        """Count a piece of audio that was taken; empty ones do not keep a session alive."""
        self.next_sequence += 1
        self.empty_in_a_row = self.empty_in_a_row + 1 if empty else 0

    def expects(self, sequence: int) -> bool:
        """Say whether a piece of audio is new; one that was taken already is not.

        Raises:
            SequenceGapError: if pieces before it are missing.

        """
        if sequence > self.next_sequence:
            raise SequenceGapError(sequence, self.next_sequence)
        return sequence == self.next_sequence

    async def events(self, after: int | None) -> AsyncGenerator[Kept | Missed, None]:
        """Tell the events after a number, or all that are kept, and then those to come, until the session is over."""
        self.readers += 1
        last = after if after is not None else self._first - 1
        try:
            while True:
                if last + 1 < self._first:
                    yield Missed(self._first - 1 - last)
                    last = self._first - 1
                for kept in [kept for kept in self._ring if kept.number > last]:
                    yield kept
                    last = kept.number
                if not await self._has_more(last):
                    return
        finally:
            self.readers -= 1
            self.read_at = time.monotonic()

    async def _has_more(self, last: int) -> bool:
        """Wait for an event after the last one that was seen; say no if none will come."""
        async with self._news:
            await self._news.wait_for(lambda: self._told > last or self.over_at is not None)
            return self._told > last

    @property
    def _first(self) -> int:
        """The number of the first event that is still kept."""
        return self._ring[0].number if self._ring else self._told + 1

    def is_read_up(self, after: int | None) -> bool:
        """Say whether a reader that has seen so much has seen all there will ever be."""
        return self.over_at is not None and after is not None and after >= self._told

    async def _collect(self) -> None:
        try:
            async with aclosing(self.session.events()) as events:
                async for event in events:
                    await self._keep(event)
        except StenoError as error:
            await self._keep(error)
        finally:
            self._holding.close()
            async with self._news:
                self.over_at = time.monotonic()
                self._news.notify_all()

    async def _keep(self, event: LiveEvent | StenoError) -> None:
        async with self._news:
            self._told += 1
            self._ring.append(Kept(self._told, event))
            self._news.notify_all()


class SessionStore:
    """The held sessions. An async context manager: a task of its own ends those that nobody wants any more.

    Args:
        grace_seconds: how long a session is kept that nobody reads, and one that is over.
        idle_seconds: how long a session may send nothing before it is stopped.

    """

    def __init__(self, *, grace_seconds: float, idle_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self._idle_seconds = idle_seconds
        self._sessions: dict[str, HeldSession] = {}

    async def __aenter__(self) -> "SessionStore":
        self._sweeping = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sweeping.cancel()
        await asyncio.wait({self._sweeping})
        for held in list(self._sessions.values()):
            await self.remove(held)

    def __len__(self) -> int:
        return len(self._sessions)

    def hold(self, session: LiveSession, holding: ExitStack, *, extra: Any = None) -> HeldSession:
        """Keep a session; `holding` is closed when it is over."""
        held = HeldSession(session, holding, extra=extra)
        self._sessions[held.id] = held
        return held

    def find(self, session_id: str) -> HeldSession:
        """Look a session up.

        Raises:
            UnknownSessionError: if there is none, or no longer.

        """
        if (held := self._sessions.get(session_id)) is None:
            raise UnknownSessionError(session_id)
        return held

    async def remove(self, held: HeldSession) -> None:
        """End a session and forget it."""
        self._sessions.pop(held.id, None)
        held.session.close()
        await held.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.grace_seconds / 4))
            for held in list(self._sessions.values()):
                try:
                    await self._look_after(held)
                except Exception:
                    logger.exception("%s: not looked after", held.id)

    async def _look_after(self, held: HeldSession) -> None:
        now = time.monotonic()
        is_unread = not held.readers and now - held.read_at > self.grace_seconds
        if is_unread or (held.over_at is not None and now - held.over_at > self.grace_seconds):
            await self.remove(held)
        elif now - held.posted_at > self._idle_seconds or held.empty_in_a_row > MAX_EMPTY_PIECES:
            held.session.stop()
