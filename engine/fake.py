"""A scripted engine: deterministic, without weights, with latency, pace and faults of the script's choice.

For tests, for work on a client, and for loads that a small machine's real engine cannot follow. It keeps the whole contract of
`engine.base.Engine`: bounded concurrency, priority among the waiting, abort on close, start-up that takes its time.
"""

import asyncio
import heapq
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from engine.base import (
    AudioContext,
    DecodeRequest,
    Delta,
    EngineFailedError,
    EngineLimits,
    EngineState,
    EngineUnavailableError,
    FinishReason,
    Outcome,
    Usage,
    check_request,
)
from engine.prompts import LANGUAGE_CODES
from engine.segments import Segment


@dataclass(frozen=True, slots=True)
class Reply:
    """What the engine says to one request, and how.

    Attributes:
        pieces: the text, piece by piece; each is a Delta.
        language: what the engine reports when the request names none.
        first_seconds: time to the first piece (the encoder's work).
        piece_seconds: time between pieces.
        fail_after: lose the request after this many pieces.
        stall_after: say nothing more after this many pieces, until the request is closed.
        finish_reason: how the decode ends.
        avg_logprob, no_speech_prob: the decode's own signals.
        covers_seconds: where the text's segment ends; None is the end of the audio.

    """

    pieces: tuple[str, ...]
    language: str = "en"
    first_seconds: float = 0.0
    piece_seconds: float = 0.0
    fail_after: int | None = None
    stall_after: int | None = None
    finish_reason: FinishReason = "stop"
    avg_logprob: float = -0.2
    no_speech_prob: float = 0.01
    covers_seconds: float | None = None


def say_length(request: DecodeRequest) -> Reply:
    """Tell the length of the audio, the simplest thing that is true of it."""
    return Reply((f" {len(request.samples) / 16_000:.2f}", " seconds", " of", " audio."))


class FakeEngine:
    """An `Engine` that follows a script, and remembers what it was given unless it is told not to: a test asks for that."""

    def __init__(
        self,
        script: Callable[[DecodeRequest], Reply] = say_length,
        *,
        concurrency: int = 64,
        multilingual: bool = True,
        start_seconds: float = 0.0,
        fail_start: str = "",
        audio_context: AudioContext = "full",
        remember: bool = True,
    ) -> None:
        self._script = script
        self._remember = remember
        self._start_seconds, self._fail_start = start_seconds, fail_start
        self._limits = EngineLimits(
            concurrency=concurrency,
            languages=LANGUAGE_CODES[:99] if multilingual else ("en",),
            abilities=frozenset(("detection", "translation", "prompt", "words") if multilingual else ("prompt", "words")),
            audio_context=audio_context,
        )
        self._state = EngineState("starting", "a scripted start")
        self._settled = asyncio.Event()
        self._requests = self._running = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()
        self._dead = asyncio.Event()
        self.submitted: list[DecodeRequest] = []
        self.aborted: list[str] = []

    async def __aenter__(self) -> Self:
        self._starting = asyncio.create_task(self._start())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state = EngineState("draining", "the gateway is stopping")
        self._settled.set()
        self._dead.set()
        self._starting.cancel()

    async def _start(self) -> None:
        await asyncio.sleep(self._start_seconds)
        self._state = EngineState("failed", self._fail_start) if self._fail_start else EngineState("ready")
        self._settled.set()

    def die(self, reason: str = "the engine process died") -> None:
        """Fail as a real engine's process does: every request is lost at once."""
        self._state = EngineState("failed", reason)
        self._dead.set()

    def kill(self) -> None:
        """Die, as an engine that is killed does."""
        self.die()

    @property
    def state(self) -> EngineState:
        """Where the engine is now."""
        return self._state

    @property
    def limits(self) -> EngineLimits:
        """What the engine can take."""
        return self._limits

    @property
    def requests(self) -> int:
        """How many requests the engine holds now."""
        return self._requests

    @property
    def device(self) -> str:
        """Nothing real."""
        return "no device (scripted)"

    async def wait_ready(self) -> None:
        """Return once the engine is ready."""
        await self._settled.wait()
        if self._state.phase != "ready":
            raise EngineUnavailableError(self._state)

    async def transcribe(self, request: DecodeRequest) -> AsyncGenerator[Delta, None]:
        """Decode a request; see the protocol."""
        if self._state.phase != "ready":
            raise EngineUnavailableError(self._state)
        check_request(request, self._limits)
        if self._remember:
            self.submitted.append(request)
        self._requests += 1
        finished = False
        try:
            await self._take_slot(request.turn)
            try:
                async for delta in self._say(request, self._script(request)):
                    finished = delta.outcome is not None
                    yield delta
            finally:
                self._give_slot()
        finally:
            self._requests -= 1
            if not finished and self._remember:
                self.aborted.append(request.id)

    async def align(self, request: DecodeRequest, tokens: Sequence[int]) -> tuple[float, ...]:
        """Spread the tokens evenly over the audio."""
        check_request(request, self._limits)
        seconds = len(request.samples) / self._limits.sample_rate
        return tuple(seconds * i / max(1, len(tokens)) for i in range(len(tokens) + 1))

    async def _say(self, request: DecodeRequest, reply: Reply) -> AsyncGenerator[Delta, None]:
        language = request.language or reply.language
        if request.language is None and request.languages and language not in request.languages:
            language = request.languages[0]
        await self._pause(reply.first_seconds)
        known = len(request.prefix)
        pieces = reply.pieces[known : known + request.max_tokens if request.max_tokens else None]
        for i, piece in enumerate(pieces, known):
            if i == reply.fail_after:
                raise EngineFailedError("the script lost this request")
            if i == reply.stall_after:
                await self._pause(None)
            if i > known:
                await self._pause(reply.piece_seconds)
            if request.deltas:
                yield Delta(piece, (i,), (reply.avg_logprob,), (piece.encode(),), language)
        if reply.fail_after is not None and reply.fail_after >= len(reply.pieces):
            raise EngineFailedError("the script lost this request")
        text, count = "".join(pieces), len(pieces)
        tokens, logprobs = tuple(range(known, known + count)), (reply.avg_logprob,) * count
        spelling = tuple(piece.encode() for piece in pieces)
        seconds = reply.covers_seconds or len(request.samples) / self._limits.sample_rate
        segment = Segment(0.0, seconds, text, tokens, logprobs, spelling)
        outcome = Outcome(
            "length" if known + count < len(reply.pieces) else reply.finish_reason,
            Usage(len(request.samples) // 320, 1, count),
            reply.avg_logprob,
            reply.no_speech_prob,
            (segment,) if count else (),
            encode_seconds=reply.first_seconds,
            engine_seconds=reply.first_seconds + reply.piece_seconds * max(0, count - 1),
        )
        if request.deltas:
            yield Delta("", language=language, outcome=outcome)
        else:
            yield Delta(text, tokens, logprobs, spelling, language, outcome)

    async def _pause(self, seconds: float | None) -> None:
        """Sleep, for ever if need be, unless the engine dies meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                await self._dead.wait()
        except TimeoutError:
            return
        raise EngineFailedError("the engine died while it decoded this request")

    async def _take_slot(self, place: int) -> None:
        if self._running < self._limits.concurrency and not self._waiting:
            self._running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (place, next(self._arrivals), turn))
        try:
            await turn  # the slot passes from hand to hand: `_running` stays as it is
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_slot()
            raise

    def _give_slot(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._running -= 1
