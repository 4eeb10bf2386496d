"""Who may transcribe how much at once. Whoever finds no place waits a moment for one, and is then refused: before any work.

A permit is a parameter of the work, so that unadmitted work cannot be written. The gateway has so many places (503 when there
is none); live sessions leave a share of them to files and files one to live sessions, so that neither keeps the other out. Each
key has bounds of its own (429): requests and live sessions in progress, and seconds of audio a minute. How much audio there was
is known once it has been read, and charged then: a key that has spent more than it had waits until it has some again (a token
bucket, which holds a minute's worth).
"""

import asyncio
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Self

from app.errors import RateLimitError, UnavailableError

Kind = Literal["file", "live"]

DEFAULT_RETRY_AFTER_SECONDS = 5  # while no transcription has ended yet
NEWEST_SHARE = 0.1  # of the newest in the mean of how long places are held


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What each key may have; 0 is no bound.

    Attributes:
        requests: transcriptions in progress, live ones among them.
        live_sessions: live sessions in progress.
        audio_seconds_per_minute: audio, of files and live sessions together.

    """

    requests: int = 0
    live_sessions: int = 0
    audio_seconds_per_minute: float = 0.0


class Permit:
    """The right to transcribe one file or session, until it is left."""

    def __init__(self, number: int, client: str, kind: Kind, admission: "Admission") -> None:
        self.number = number
        self.client = client
        self.kind: Kind = kind
        self._admission = admission
        self._began = admission.now()
        self._returned = False

    def spend(self, seconds: float) -> None:
        """Say how many seconds of audio there were."""
        self._admission.spend(self.client, seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._returned:
            self._returned = True
            self._admission.take_back(self, self._admission.now() - self._began)


@dataclass(slots=True)
class _Account:
    """What a key uses now."""

    requests: int = 0
    live_sessions: int = 0
    audio_left: float = 0.0
    counted_at: float = 0.0


@dataclass(slots=True)
class _Waiter:
    kind: Kind
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def has_place(self) -> bool:
        """Whether a place was given to it."""
        return self.admitted.done() and not self.admitted.cancelled()


class Admission:
    """Gives permits, and counts those that are out.

    Args:
        limit: how many in all.
        each: what each key may have.
        kept_share: the part of the places that each kind of work leaves to the other, 0 to 1.
        wait_seconds: how long one waits for a place.
        unbounded: the name of one whose key has no bounds.
        now: the clock, in seconds.

    """

    def __init__(
        self,
        limit: int,
        each: KeyLimits | None = None,
        *,
        kept_share: float = 0.0,
        wait_seconds: float = 0.0,
        unbounded: str | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self.each = each or KeyLimits()
        self.now = now
        self.out: Counter[Kind] = Counter()
        self.most = limit - math.floor(limit * kept_share)  # of one kind
        self._wait_seconds = wait_seconds
        self._unbounded = unbounded
        self._issued = 0
        self._waiting: deque[_Waiter] = deque()
        self._held_seconds: dict[Kind, float] = {}  # a mean
        self._accounts: defaultdict[str, _Account] = defaultdict(self._new_account)

    @property
    def in_progress(self) -> int:
        """How many permits are out."""
        return self.out.total()

    @property
    def waiting(self) -> int:
        """How many wait for one."""
        return len(self._waiting)

    async def admit(self, client: str = "", *, kind: Kind = "file") -> Permit:
        """Give a permit to a client, by the name of its key; wait a moment if there is none. To be entered at once.

        Raises:
            RateLimitError: when the client has all that its key may have.
            UnavailableError: when all permits are out, and none came back in time.

        """
        account = self._accounts[client]
        if client != self._unbounded:
            self._refuse_past_limits(account, live=kind == "live")
        account.requests += 1  # whoever waits counts
        account.live_sessions += kind == "live"
        try:
            if not self._has_place(kind):
                await self._wait_for_place(kind)
            else:
                self.out[kind] += 1
        except BaseException:
            account.requests -= 1
            account.live_sessions -= kind == "live"
            raise
        self._issued += 1
        return Permit(self._issued, client, kind, self)

    def take_back(self, permit: Permit, held_seconds: float) -> None:
        """Take a permit back, and give its place to who waits."""
        account, kind = self._accounts[permit.client], permit.kind
        account.requests -= 1
        account.live_sessions -= kind == "live"
        mean = self._held_seconds.get(kind, held_seconds)
        self._held_seconds[kind] = mean + NEWEST_SHARE * (held_seconds - mean)
        self._give_up(kind)

    def retry_after(self, kind: Kind) -> int:
        """Estimate when a place will be free, in seconds: from how long places are held, and how many wait."""
        if kind not in self._held_seconds:
            return DEFAULT_RETRY_AFTER_SECONDS
        return math.ceil(self._wait_for(kind, 1 + sum(waiter.kind == kind for waiter in self._waiting)))

    def _wait_for(self, kind: Kind, place: int) -> float:
        """Estimate when this many places will have come back: of this kind, if it has all that it may have, else of any."""
        kinds = self.out if self.out[kind] < self.most else [kind]
        rates = [self.out[k] / held for k in kinds if (held := self._held_seconds.get(k, 0.0))]
        return place / rate if (rate := sum(rates)) else 0.0

    def _has_place(self, kind: Kind) -> bool:
        return self.in_progress < self.limit and self.out[kind] < self.most

    async def _wait_for_place(self, kind: Kind) -> None:
        ahead = sum(waiter.kind == kind for waiter in self._waiting)
        waiter = _Waiter(kind)
        if ahead < self.limit and self._wait_for(kind, ahead + 1) <= self._wait_seconds:
            self._waiting.append(waiter)
            try:
                async with asyncio.timeout(self._wait_seconds):
                    await waiter.admitted
            except TimeoutError:
                pass
            except asyncio.CancelledError:
                if waiter.has_place:
                    self._give_up(kind)
                raise
            finally:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
        if not waiter.has_place:
            places = f"All {self.limit} places" if self.in_progress >= self.limit else f"All {self.most} places for this"
            raise UnavailableError(f"{places} are taken; come back in a moment.", retry_after=self.retry_after(kind))

    def _give_up(self, kind: Kind) -> None:
        """Free a place, and let whoever has waited longest and may take it have it."""
        self.out[kind] -= 1
        for waiter in list(self._waiting):
            if self._has_place(waiter.kind) and not waiter.admitted.done():
                self.out[waiter.kind] += 1
                waiter.admitted.set_result(None)
                self._waiting.remove(waiter)

    def rate_headers(self, client: str) -> dict[str, str]:
        """Say what a client's key may have and has left, as OpenAI's headers do."""
        account, each = self._accounts[client], self.each
        headers = {}
        for name, limit, used in (
            ("requests", each.requests, account.requests),
            ("live-sessions", each.live_sessions, account.live_sessions),
        ):
            if limit:
                headers[f"x-ratelimit-limit-{name}"] = str(limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, limit - used))
        if each.audio_seconds_per_minute:
            self._refill(account)
            missing = each.audio_seconds_per_minute - account.audio_left
            headers["x-ratelimit-limit-audio-seconds"] = f"{each.audio_seconds_per_minute:g}"
            headers["x-ratelimit-remaining-audio-seconds"] = str(max(0, math.floor(account.audio_left)))
            headers["x-ratelimit-reset-audio-seconds"] = f"{missing * 60 / each.audio_seconds_per_minute:.1f}s"
        return headers

    def spend(self, client: str, seconds: float) -> None:
        """Charge a client for so many seconds of audio."""
        if self.each.audio_seconds_per_minute:
            account = self._accounts[client]
            self._refill(account)
            account.audio_left -= seconds

    def _refuse_past_limits(self, account: _Account, *, live: bool) -> None:
        each = self.each
        if each.requests and account.requests >= each.requests:
            raise RateLimitError(
                f"This key may have {each.requests} requests in progress.", retry_after=self.retry_after("file")
            )
        if live and each.live_sessions and account.live_sessions >= each.live_sessions:
            raise RateLimitError(
                f"This key may have {each.live_sessions} live sessions in progress.", retry_after=self.retry_after("live")
            )
        if each.audio_seconds_per_minute:
            self._refill(account)
            if account.audio_left <= 0:
                seconds = -account.audio_left * 60 / each.audio_seconds_per_minute
                raise RateLimitError(
                    f"This key may have {each.audio_seconds_per_minute:g} seconds of audio a minute, and has had more.",
                    retry_after=math.floor(seconds) + 1,
                )

    def _new_account(self) -> _Account:
        return _Account(audio_left=self.each.audio_seconds_per_minute, counted_at=self.now())

    def _refill(self, account: _Account) -> None:
        now, each = self.now(), self.each.audio_seconds_per_minute
        account.audio_left = min(each, account.audio_left + (now - account.counted_at) * each / 60)
        account.counted_at = now
