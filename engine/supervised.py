"""An engine that is built anew when it dies, or hangs.

What runs when it dies is lost, and says so; what comes meanwhile is told to come back. The gateway around it goes on. An engine
that never was ready is not tried again: its model or its settings are wrong.

An engine hangs when it holds requests and tells nothing of any for `stall_seconds`; then it is killed, a death like any other.
Audio that was being decoded at two deaths, and never to its end, is not taken a third time.
"""

import asyncio
import functools
import hashlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

from engine.base import (
    DecodeRequest,
    Delta,
    Engine,
    EngineFailedError,
    EngineLimits,
    EngineState,
    EngineUnavailableError,
    InvalidRequestError,
)

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
FIRST_PAUSE_SECONDS = 1.0  # between two builds; it doubles
LONGEST_PAUSE_SECONDS = 60.0
STEADY_SECONDS = 300.0  # an engine that has lived so long may be built anew at once
DEATH_SECONDS = 5.0  # requests are lost one by one, a little before or after a death is seen
DEATHS_TO_REFUSE = 2
REMEMBERED = 1024  # audios that were being decoded at a death


class SupervisedEngine:
    """An `Engine` around one that may die.

    Args:
        make: makes the engine, each time anew.
        stall_seconds: how long an engine that holds requests may say nothing; 0 is for ever.
        first_pause: seconds before the second build; it doubles with each that fails.
        on_ready: called whenever an engine has become ready.

    """

    def __init__(
        self,
        make: Callable[[], Engine],
        *,
        stall_seconds: float = 0.0,
        first_pause: float = FIRST_PAUSE_SECONDS,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._make = make
        self._stall_seconds = stall_seconds
        self._first_pause = first_pause
        self._on_ready = on_ready
        self._engine = make()
        self._limits: EngineLimits | None = None
        self._device = ""
        self._rebuilding = ""  # why
        self._leaving = self._stalled = False
        self._flying: dict[int, DecodeRequest] = {}
        self._flights = 0
        self._heard_at = 0.0
        self._lost: deque[tuple[float, bytes]] = deque(maxlen=REMEMBERED)  # when, and what
        self._deaths_of: OrderedDict[bytes, int] = OrderedDict()
        self._changed = asyncio.Event()
        self.deaths = 0
        self.since = time.monotonic()  # of the present state

    async def __aenter__(self) -> Self:
        await self._engine.__aenter__()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving, self.since = True, time.monotonic()
        self._watching.cancel()
        await asyncio.wait({self._watching})
        self._tell_change()
        await self._engine.__aexit__(kind, error, trace)

    def kill(self) -> None:
        """End whatever is decoded, and build nothing anew: the gateway stops."""
        self._leaving, self.since = True, time.monotonic()
        self._watching.cancel()
        self._engine.kill()
        self._tell_change()

    # --- the protocol -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """Where the engine is now; one that is being built anew is starting."""
        if self._leaving:
            return EngineState("draining", "the gateway is stopping")
        state = self._engine.state
        if self._rebuilding or (state.phase == "failed" and self._limits is not None):
            why = self._rebuilding or state.reason
            now = f": {state.reason}" if state.phase == "starting" and state.reason else ""
            return EngineState("starting", f"{why}; it is being built anew{now}")
        return state

    @property
    def limits(self) -> EngineLimits:
        """What the engine can take; while it is built anew, what it could."""
        if self._limits is None:
            self._limits = self._engine.limits
        return self._limits

    @property
    def requests(self) -> int:
        """How many requests the engine holds now."""
        return self._engine.requests

    @property
    def device(self) -> str:
        """What the engine runs on."""
        return self._device or self._engine.device

    async def wait_ready(self) -> None:
        """Return once the engine is ready, however often it must be built for it."""
        while self.state.phase != "ready":
            if self.state.phase in {"failed", "draining"}:
                raise EngineUnavailableError(self.state)
            await self._changed.wait()

    async def transcribe(self, request: DecodeRequest) -> AsyncGenerator[Delta, None]:
        """Decode a request; see the protocol.

        Raises:
            InvalidRequestError: also if the engine died twice while it decoded this audio.

        """
        fingerprint = functools.cache(lambda: _fingerprint(request))  # made once, and only if it is needed
        if self._deaths_of and self._deaths_of.get(fingerprint(), 0) >= DEATHS_TO_REFUSE:
            raise InvalidRequestError("samples", "the engine died each time when it decoded this audio")
        if self._rebuilding or self._leaving:
            raise EngineUnavailableError(self.state)
        self._flights += 1
        flight = self._flights
        if not self._flying:
            self._heard_at = time.monotonic()
        self._flying[flight] = request
        try:
            async with aclosing(self._engine.transcribe(request)) as deltas:
                async for delta in deltas:
                    self._heard_at = time.monotonic()
                    if delta.outcome is not None and self._deaths_of:
                        self._deaths_of.pop(fingerprint(), None)
                    yield delta
        except EngineFailedError:
            if self._leaving:
                raise EngineUnavailableError(self.state) from None
            self._lost.append((time.monotonic(), fingerprint()))
            raise
        finally:
            self._flying.pop(flight, None)

    async def align(self, request: DecodeRequest, tokens: Sequence[int]) -> tuple[float, ...]:
        """Tell when each token was said; see the protocol."""
        return await self._engine.align(request, tokens)

    # --- watching ---------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Wait for each death, and build anew."""
        if not await self._is_ready():
            return  # it never was
        pause, ready_at = self._first_pause, time.monotonic()
        while True:
            await self._until_dead()
            if time.monotonic() - ready_at > STEADY_SECONDS:
                pause = self._first_pause
            self._bury()
            while not await self._build():
                logger.error("engine: %s; again in %.0f s", self._engine.state.reason, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            logger.info("engine: ready again")
            ready_at = time.monotonic()
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _until_dead(self) -> None:
        while self._engine.state.phase != "failed":
            await asyncio.sleep(LOOK_SECONDS)
            still = time.monotonic() - self._heard_at
            if self._stall_seconds and self._flying and still > self._stall_seconds:
                logger.error("engine: it holds %d requests and has said nothing for %.0f s; killing it", self.requests, still)
                self._rebuilding = f"the engine stood still for {still:.0f} s"
                self._engine.kill()
                self._heard_at, self._stalled = time.monotonic(), True

    def _bury(self) -> None:
        """Note what was being decoded, and say why there is no engine now."""
        self.deaths += 1
        self.since = time.monotonic()
        self._rebuilding = self._rebuilding or self._engine.state.reason
        logger.error("engine: %s, with %d requests; building it anew", self._rebuilding, len(self._flying))
        since = time.monotonic() - DEATH_SECONDS
        lost = {fingerprint for lost_at, fingerprint in self._lost if lost_at >= since}
        self._lost.clear()
        if self._stalled:  # which a slow model may do under any audio
            self._stalled = False
            return
        for fingerprint in lost | {_fingerprint(request) for request in self._flying.values()}:
            self._deaths_of[fingerprint] = self._deaths_of.pop(fingerprint, 0) + 1
        while len(self._deaths_of) > REMEMBERED:
            self._deaths_of.popitem(last=False)

    async def _build(self) -> bool:
        """Build an engine in place of a dead one; say whether it is ready."""
        old, self._engine = self._engine, self._make()
        try:
            await old.__aexit__(None, None, None)
        except Exception:
            logger.exception("the dead engine did not go in peace")
        del old  # it is large
        await self._engine.__aenter__()
        return await self._is_ready()

    async def _is_ready(self) -> bool:
        """Wait until the engine is ready, or has failed."""
        try:
            await self._engine.wait_ready()
        except EngineUnavailableError:
            return False
        else:
            self._limits, self._device, self._rebuilding = self._engine.limits, self._engine.device, ""
            self.since = time.monotonic()
            self._on_ready()
            return True
        finally:
            self._tell_change()

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _fingerprint(request: DecodeRequest) -> bytes:
    return hashlib.sha256(request.samples.tobytes()).digest()
