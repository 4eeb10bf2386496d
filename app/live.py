"""Use case: a live session. The asyncio shell of `app.session`: it owns the audio, the tasks and the bounds.

Audio is taken as it comes, whatever the engine does: voice activity finds utterances, the machine says what to decode, tasks
decode it and bring the answers back. All of it runs in one event loop, so the machine needs no lock; what computes runs in
worker threads.

Bounds: a session keeps the audio of open and undecoded utterances only. Past `buffer_seconds` of it, or `MAX_EVENTS` that
nobody has read, `feed` waits, and whoever sends the audio with it. Nothing is dropped. Partials of all sessions together leave
some of the engine's places to finals, which also go before them.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from app.admission import Permit
from app.audio.buffer import SampleBuffer
from app.audio.decode import not_too_loud
from app.cores import Cores
from app.decoding import WindowDecoder
from app.errors import InvalidInputError, StenoError, TranscriptionFailedError
from app.live_events import (
    AudioCleared,
    LiveDelta,
    LiveEvent,
    LivePartial,
    Profile,
    UtteranceChanged,
    UtteranceClosed,
    UtteranceDropped,
    UtteranceFinal,
    UtteranceLost,
    UtteranceOpened,
)
from app.metrics import Metrics, Outcome
from app.quality import judge
from app.session import machine
from app.session.agreement import AgreementPolicy, Token
from app.session.machine import Hypothesis, Pace, Session
from app.speech.endpointing import Endpointer, EndpointPolicy
from app.speech.listener import Listener
from app.speech.vad import FRAME_SAMPLES, VoiceActivity
from app.speech.windows import QUIET_SECONDS, quietest
from app.tracing import span, tell_engine_stages
from app.transcribe import translate_engine_error
from app.transcript import Options, Segment, Stages, TextJoiner, Transcript
from app.words import text_of
from engine.base import AudioContext, DecodeRequest, Engine, EngineError, EngineUnavailableError, Usage

logger = logging.getLogger(__name__)

MAX_EVENTS = 1000
FEED_SECONDS = 0.5  # audio is taken in pieces of this length at most
FINALS_AT_ONCE = 2  # of one session; more of them wait their turn
PARTIAL_PRIORITY = 10  # finals and files have 0, which goes first
TOKENS_PER_SECOND = 8  # of speech, at most: what a partial may decode, beside TOKENS_AT_LEAST
TOKENS_AT_LEAST = 16

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LivePolicy:
    """How sessions are run.

    Attributes:
        first_seconds, step_seconds: audio before the first partial of an utterance, and between partials.
        agreement: which words are confirmed.
        free_finals: decode finals without the confirmed words.
        partial_context: how much of the window partials encode; finals follow the engine's own setting.
        buffer_seconds: how much audio a session may keep.
        max_seconds: the longest session, in seconds of audio.
        final_places: the engine's places that partials leave free.

    """

    first_seconds: float = 0.5
    step_seconds: float = 0.5
    agreement: AgreementPolicy = field(default_factory=AgreementPolicy)
    free_finals: bool = False
    partial_context: AudioContext = "true"
    buffer_seconds: float = 90.0
    max_seconds: float = 3 * 3600.0
    final_places: int = 4


# --- all sessions -------------------------------------------------------------------------------------------------------


class LiveSessions:
    """Makes sessions, and shares the engine's places among their partials.

    Args:
        engine: decodes.
        voice_activity: makes what finds speech, for each session.
        cores: what may compute at once.
        policy: how sessions are run.
        metrics: counts them.

    """

    def __init__(
        self,
        engine: Engine,
        *,
        voice_activity: Callable[[], VoiceActivity],
        cores: Cores,
        policy: LivePolicy,
        metrics: Metrics,
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self.policy = policy
        self.cores = cores
        self.listener = Listener(cores)
        self.open: set[LiveSession] = set()
        self._voice_activity = voice_activity
        self._partials = 0
        self._waiting: deque[LiveSession] = deque()

    def start(
        self,
        permit: Permit,
        options: Options,
        *,
        request_id: str,
        endpoints: EndpointPolicy | None,
        lasting: bool = False,
    ) -> "LiveSession":
        """Begin a session. `endpoints` None leaves it to the client to close utterances.

        A lasting session goes on when an utterance's final has failed, and tells that it is lost.

        Raises:
            UnavailableError: if the engine is not ready.

        """
        if self.engine.state.phase != "ready":
            raise translate_engine_error(EngineUnavailableError(self.engine.state))
        session = LiveSession(
            self,
            options,
            client=permit.client,
            decode_id=f"{request_id}-{permit.number}",
            voice_activity=self._voice_activity(),
            endpoints=endpoints,
            lasting=lasting,
        )
        self.open.add(session)
        return session

    def drain(self) -> None:
        """Let every session end with the audio that it has."""
        for session in list(self.open):
            session.stop()

    # --- the places of partials -----------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many sessions wait for a place for a partial."""
        return len(self._waiting)

    @property
    def _places(self) -> int:
        return max(1, self.engine.limits.concurrency - self.policy.final_places)

    def take_place(self, session: "LiveSession") -> bool:
        """Take a place for a partial, or stand in line for one."""
        if self._partials < self._places:
            self._partials += 1
            return True
        if session not in self._waiting:
            self._waiting.append(session)
        return False

    def give_place(self) -> None:
        """Give a place back; who has waited longest may take it."""
        self._partials -= 1
        while self._waiting and self._partials < self._places:
            self._waiting.popleft().advance()

    def leave(self, session: "LiveSession") -> None:
        """Forget a session."""
        self.open.discard(session)
        if session in self._waiting:
            self._waiting.remove(session)


class LiveSession:
    """One session. `feed` takes audio, `events` tells what is heard; `close` ends all at any moment."""

    def __init__(
        self,
        sessions: LiveSessions,
        options: Options,
        *,
        client: str,
        decode_id: str,
        voice_activity: VoiceActivity,
        endpoints: EndpointPolicy | None,
        lasting: bool,
    ) -> None:
        policy, limits = sessions.policy, sessions.engine.limits
        self._sessions, self._engine, self._policy, self._options = sessions, sessions.engine, policy, options
        self._options_of: dict[int, Options] = {}  # of utterances whose text has not all come: as they were when it began
        self._client, self._id = client, decode_id
        self._rate = limits.sample_rate
        self._machine = Session(
            Pace(self._samples(policy.first_seconds), self._samples(policy.step_seconds), limits.window_samples),
            policy.agreement,
            free_finals=policy.free_finals,
            lasting=lasting,
        )
        self._voice_activity = voice_activity
        self._endpoints = endpoints
        self._audio = SampleBuffer()  # what may still be decoded
        self._listen_anew()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._starts: dict[int, float] = {}  # of utterances whose final has not come
        self._ends: dict[int, float] = {}
        self._results: dict[int, tuple[Segment, str | None]] = {}  # of utterances, until their turn
        self._spoken: dict[int, list[Token]] = {}
        self._heard_at: dict[int, list[float]] = {}  # when each token of an utterance was first heard
        self._events: asyncio.Queue[tuple[float, LiveEvent] | StenoError | None] = asyncio.Queue()
        self._room = asyncio.Event()
        self._room.set()
        self._feeding = asyncio.Lock()
        self._stop_wanted = self._stopping = False
        self._finals = asyncio.Semaphore(FINALS_AT_ONCE)
        self._joiner = TextJoiner()
        self._segments: list[Segment] = []
        self._languages: dict[str, None] = {}
        self._usage, self._stages = Usage(), Stages()
        self._wanted_at: float | None = None
        self._resting_until = 0.0
        self._over = False
        self.profile = Profile()

    # --- audio in ---------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """How much audio has come."""
        return self._machine.received / self._rate

    @property
    def open_seconds(self) -> float:
        """How much audio the open utterance has; 0 if none is open."""
        return self._machine.open_samples / self._rate

    @property
    def kept_seconds(self) -> float:
        """How much of the audio is kept."""
        return len(self._audio) / self._rate

    @property
    def over(self) -> bool:
        """Whether nothing more will be told."""
        return self._over

    @property
    def has_room(self) -> bool:
        """Whether the session keeps less than it may."""
        return self._room.is_set()

    async def wait_for_room(self) -> None:
        """Wait while the session has more than it may keep."""
        await self._room.wait()

    async def feed(self, samples: Samples) -> None:
        """Take audio, mono float32 at the engine's rate. Waits while the session has more than it may keep.

        Raises:
            InvalidInputError: if the session has become too long, or has ended.

        """
        async with self._feeding:
            began = time.monotonic()
            await self._room.wait()
            self.profile.waited += time.monotonic() - began
            if self._over or self._stopping:
                raise InvalidInputError("The session has ended.", code="session_ended")
            if self.seconds > self._policy.max_seconds:
                raise InvalidInputError(
                    f"The session is longer than {self._policy.max_seconds:g} seconds, which is the maximum here.",
                    code="invalid_value",
                )
            step = self._samples(FEED_SECONDS)
            try:
                for i in range(0, len(samples), step):
                    await self._take(samples[i : i + step])
            finally:
                if self._stop_wanted:
                    self._stop()

    async def commit(self) -> None:
        """Close the open utterance after the last sample that has come."""
        async with self._feeding:
            self._apply(self._machine.close(self._machine.received))
            self._listen_anew()

    async def clear(self) -> None:
        """Take the open utterance back, with all audio that has come: nothing more is told of it."""
        async with self._feeding:
            self._apply(self._machine.drop())
            self._listen_anew()
            self._tell(AudioCleared())

    async def change(self, options: Options, endpoints: EndpointPolicy | None) -> None:
        """Change how utterances that begin from now on are transcribed, and how they are found.

        An open one is closed where its finding passes to the client, or from it.
        """
        async with self._feeding:
            self._options = options
            if endpoints is not None and self._endpointer is not None:
                self._endpointer.change(endpoints)
                self._endpoints = endpoints
            elif endpoints != self._endpoints:
                self._endpoints = endpoints
                self._apply(self._machine.close(self._machine.received))
                self._listen_anew()

    def _listen_anew(self) -> None:
        """Look for utterances in what comes from now on."""
        at = self._scanned = self._machine.received
        self._endpointer = Endpointer(self._rate, self._endpoints, at) if self._endpoints else None

    def stop(self) -> None:
        """Take no more audio; the rest of the text comes, and then the end. What is being fed is taken first."""
        self._stop_wanted = True
        if not self._feeding.locked():
            self._stop()

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            self.profile.stopped = time.monotonic()
            self._cut_at_limit(self._machine.received)
            self._apply(self._machine.stop())

    async def _take(self, samples: Samples) -> None:
        """Take a short piece of audio."""
        self._machine.audio(len(samples))
        self._audio.append(samples)
        if self._endpointer is not None:
            await self._find_utterances()
        else:
            if self._machine.state == machine.State.QUIET:
                self._apply(self._machine.open(self._machine.received - len(samples)))
            self._cut_at_limit(self._machine.received)
        self._make_room()
        self.advance()

    def fail(self, error: StenoError) -> None:
        """End the session with an error of its audio; one that takes no more of it goes on to its end."""
        if not self._over and not self._stopping:
            self._apply(self._machine.cancel())
            self._end("failed", error)

    def close(self) -> None:
        """End the session at once: nobody waits any more."""
        if not self._over:
            self._apply(self._machine.cancel())
            self._end("left")

    # --- events out -------------------------------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[LiveEvent, None]:
        """Tell what is heard, to one reader; the Transcript is the last. Close it to end the session.

        Raises:
            StenoError: if the session ended with an error.

        """
        try:
            while (item := await self._events.get()) is not None:
                if isinstance(item, StenoError):
                    raise item
                told_at, event = item
                self.profile.deliveries.append(time.monotonic() - told_at)
                self._make_room()
                yield event
        finally:
            self.close()

    # --- utterances -------------------------------------------------------------------------------------------------

    async def _find_utterances(self) -> None:
        """Look for speech in the whole frames that have come."""
        assert self._endpointer is not None
        count = (self._machine.received - self._scanned) // FRAME_SAMPLES * FRAME_SAMPLES
        if not count:
            return
        frames = self._audio.cut_out(self._scanned, self._scanned + count)
        began = time.monotonic()
        try:
            probabilities = await self._sessions.listener.feed(self._voice_activity, frames)
        except Exception as error:
            logger.exception("%s: voice activity failed", self._id)
            failure = TranscriptionFailedError(f"The transcription failed: {type(error).__name__}.")
            self.fail(failure)
            raise failure from error
        self.profile.vad += time.monotonic() - began
        self._scanned += count
        for edge in self._endpointer.feed(probabilities):
            if edge.kind == "open":
                self._apply(self._machine.open(edge.at))
            else:
                self._cut_at_limit(edge.at, endpointer=False)
                self._apply(self._machine.close(edge.at))
        self._cut_at_limit(self._scanned)

    def _cut_at_limit(self, known: int, *, endpointer: bool = True) -> None:
        """Cut the open utterance while it is longer than its limit within what is known of the audio."""
        while (found := self._machine.cut_range(known)) is not None:
            earliest, latest = found
            searched = self._audio.cut_out(earliest, latest)
            at = earliest + quietest(searched, self._samples(QUIET_SECONDS))
            if self._endpointer is not None and endpointer:
                self._endpointer.cut(at)
            self._apply(self._machine.cut(at))

    # --- decoding ---------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Decode a partial, if one is due and there is a place for it."""
        if not self._machine.wants_turn or self._over or time.monotonic() < self._resting_until:
            self._wanted_at = None
            return
        self._wanted_at = self._wanted_at or time.monotonic()
        if self._sessions.take_place(self):
            self.profile.turn_waits.append(time.monotonic() - self._wanted_at)
            self._wanted_at = None
            self._apply(self._machine.turn())

    def _apply(self, effects: list[machine.Effect]) -> None:
        """Do what the machine says."""
        for effect in effects:
            match effect:
                case machine.Decode():
                    task = asyncio.create_task(self._decode(effect, self._audio.cut_out(effect.start, effect.end)))
                    self._tasks[effect.job] = task
                    if not effect.final:  # not in the task, which may be cancelled before it begins
                        self.profile.partials += 1
                        task.add_done_callback(lambda _: self._sessions.give_place())
                case machine.Abort(job):
                    self._tasks.pop(job).cancel()
                    self.profile.partials_stale += 1
                case machine.Failed(error):
                    self._end("failed", _as_ours(error))
                case machine.Ended():
                    self._tell_transcript()
                case _:
                    self._tell_effect(effect)
        self._forget_audio()
        self._make_room()

    def _tell_effect(self, effect: machine.Effect) -> None:
        """Tell what the machine says of an utterance."""
        match effect:
            case machine.Opened(utterance, start):
                self._starts[utterance] = start / self._rate
                self._options_of[utterance] = self._options
                self._tell(UtteranceOpened(utterance, start / self._rate))
            case machine.Closed(utterance, end, cut):
                self._ends[utterance] = end / self._rate
                self._tell(UtteranceClosed(utterance, end / self._rate, cut))
            case machine.Dropped(utterance):
                self._forget(utterance)
                self._tell(UtteranceDropped(utterance))
            case machine.Lost(utterance, error):
                self._forget(utterance)
                self._tell(UtteranceLost(utterance, _as_ours(error)))
            case machine.Confirmed(utterance, tokens, final):
                self._tell_tokens(utterance, tokens, final=final)
            case machine.Changed(utterance, tokens):
                self._spoken[utterance] = list(tokens)
                self._tell(UtteranceChanged(utterance, _text(tokens).strip()))
            case machine.Tail(utterance, revision, text, heard_to):
                self._tell(LivePartial(utterance, revision, text.strip(), heard_to / self._rate))

    async def _decode(self, job: machine.Decode, samples: Samples) -> None:
        try:
            with span("final" if job.final else "partial", utterance=job.utterance, seconds=len(samples) / self._rate):
                hypothesis = await (self._final(job, samples) if job.final else self._partial(job, samples))
        except EngineError as error:
            effects = self._machine.failed(job.job, translate_engine_error(error))
        except Exception as error:
            logger.exception("%s: a decode failed", self._id)
            effects = self._machine.failed(
                job.job, TranscriptionFailedError(f"The transcription failed: {type(error).__name__}.")
            )
        else:
            effects = self._machine.heard(job.job, hypothesis)
        self._tasks.pop(job.job, None)
        self._apply(effects)
        self.advance()

    def _request(self, job: machine.Decode, samples: Samples) -> DecodeRequest:
        options = self._options_of[job.utterance]
        return DecodeRequest(
            id=f"{self._id}-{job.job}",
            samples=not_too_loud(samples),
            language=job.language or options.language,
            languages=options.languages,
            previous_text=options.prompt,
            temperature=options.temperature,
            prefix=job.prefix,
        )

    async def _partial(self, job: machine.Decode, samples: Samples) -> Hypothesis | None:
        began = time.monotonic()
        try:
            return await self._decode_partial(job, samples)
        finally:
            # A loaded engine takes longer: then partials come less often, and leave it time for finals.
            now = time.monotonic()
            if (took := now - began) > self._policy.step_seconds:
                self._resting_until = now + took

    async def _decode_partial(self, job: machine.Decode, samples: Samples) -> Hypothesis | None:
        request = self._request(job, samples)
        # A prompt would sway which language is heard, and to ask for it apart would cost as much as the partial.
        swayed = request.language is None and "detection" in self._engine.limits.abilities
        request = replace(
            request,
            previous_text="" if swayed else request.previous_text,
            max_tokens=int(len(samples) / self._rate * TOKENS_PER_SECOND) + TOKENS_AT_LEAST,
            audio_context=self._policy.partial_context,
            priority=PARTIAL_PRIORITY,
        )
        async with aclosing(self._engine.transcribe(request)) as deltas:
            async for delta in deltas:
                if (outcome := delta.outcome) is None:
                    continue
                self.profile.queues.append(outcome.queue_seconds)
                self.profile.encodes.append(outcome.encode_seconds)
                self.profile.engines.append(outcome.engine_seconds)
                self._usage += outcome.usage
                tell_engine_stages(outcome)
                verdict = judge(
                    delta.text,
                    avg_logprob=outcome.avg_logprob,
                    no_speech_prob=outcome.no_speech_prob,
                    looped=outcome.finish_reason == "repetition",
                )
                if verdict != "good":
                    self.profile.partials_doubted += 1
                    return None
                known = zip(delta.tokens, delta.spelling, delta.logprobs, strict=True)
                heard_at = self._heard_at.setdefault(job.utterance, [])
                missing = len(job.prefix) + len(delta.tokens) - len(heard_at)
                heard_at += [time.monotonic()] * missing
                self.profile.partials_heard += 1
                return Hypothesis(tuple(Token(*token) for token in known), delta.language)
        raise AssertionError("an engine ends a request with its outcome")

    async def _final(self, job: machine.Decode, samples: Samples) -> Hypothesis | None:
        async with self._finals:
            return await self._decode_final(job, samples)

    async def _decode_final(self, job: machine.Decode, samples: Samples) -> Hypothesis | None:
        self.profile.finals += 1
        decoder = WindowDecoder(self._engine, stream=False, show=lambda _: None, tell_language=lambda _: None)
        start = job.start / self._rate
        heard = await decoder.decode(self._request(job, samples), start=start)
        self.profile.queues.append(heard.stages.queue)
        self.profile.engines.append(heard.stages.engine)
        self._usage += heard.usage
        self._stages += heard.stages
        if not heard.segments:
            return None
        self._results[job.utterance] = heard.segments[0], heard.language
        return Hypothesis(tuple(token for segment in heard.segments for token in _tokens(segment)), heard.language)

    # --- telling ----------------------------------------------------------------------------------------------------

    def _tell(self, event: LiveEvent) -> None:
        self._events.put_nowait((time.monotonic(), event))

    def _tell_tokens(self, utterance: int, tokens: tuple[Token, ...], *, final: bool) -> None:
        if not final:
            self._count_lag(utterance, len(tokens))
        self._spoken.setdefault(utterance, []).extend(tokens)
        if text := self._joiner.feed(_text(tokens)):
            if self.profile.first_text is None:
                self.profile.first_text = time.monotonic() - self.profile.began
            self._tell(LiveDelta(utterance, text, tokens))
        if final:
            self._tell_final(utterance)

    def _count_lag(self, utterance: int, count: int) -> None:
        first, now = len(self._spoken.get(utterance, ())), time.monotonic()
        self.profile.confirms += [now - heard for heard in self._heard_at[utterance][first : first + count]]

    def _tell_final(self, utterance: int) -> None:
        start, end = self._starts[utterance], self._ends[utterance]
        spoken = self._spoken.get(utterance, [])
        segment, language = self._results.get(utterance, (None, None))
        self._forget(utterance)
        whole = Segment(
            start=start,
            end=end,
            text=_text(spoken),
            tokens=tuple(token.id for token in spoken),
            logprobs=tuple(token.logprob for token in spoken),
            spelling=tuple(token.spelling for token in spoken),
            window_start=start,
            temperature=segment.temperature if segment else 0.0,
            avg_logprob=segment.avg_logprob if segment else 0.0,
            compression_ratio=segment.compression_ratio if segment else 0.0,
            no_speech_prob=segment.no_speech_prob if segment else 1.0,
        )
        if whole.text.strip():
            self._segments.append(whole)
            if language:
                self._languages[language] = None
        self._tell(UtteranceFinal(whole, utterance, language))

    def _forget(self, utterance: int) -> None:
        """Drop what is known of an utterance of which nothing more will be told."""
        self._joiner.end_window()
        for known in (self._starts, self._ends, self._spoken, self._results, self._heard_at, self._options_of):
            known.pop(utterance, None)

    def _tell_transcript(self) -> None:
        stages = self._stages + Stages(decode=self.profile.decode, vad=self.profile.vad)
        languages = (self._options.language,) if self._options.language else tuple(self._languages)
        text = self._joiner.text
        self._tell(Transcript(text, languages, self.seconds, tuple(self._segments), self._usage, stages))
        self._end("completed")

    def _end(self, outcome: Outcome, error: StenoError | None = None) -> None:
        if self._over:
            return
        self._over = True
        self.profile.ended = time.monotonic()
        self.profile.words_taken_back = self._machine.words_taken_back
        self._events.put_nowait(error)
        if error is not None:
            self._events.put_nowait(None)
        self._sessions.leave(self)
        self._sessions.metrics.live(self._client, outcome, audio=self.seconds, profile=self.profile)
        self._audio.drop_before(self._machine.received)
        self._room.set()
        facts = " ".join(f"{name}={value}" for name, value in self.profile.summary().items() if value is not None)
        logger.info("%s: %.1f s live, %s, %s%s", self._id, self.seconds, outcome, facts, f", {error.message}" if error else "")

    # --- bounds -------------------------------------------------------------------------------------------------------

    def _forget_audio(self) -> None:
        """Drop what no decode can need any more."""
        kept = self._machine.kept_from
        if self._endpoints is not None:
            kept = min(kept, self._scanned - self._samples(self._endpoints.before_seconds) - 8 * FRAME_SAMPLES)
        self._audio.drop_before(kept)

    def _make_room(self) -> None:
        if self._over or (self.kept_seconds <= self._policy.buffer_seconds and self._events.qsize() <= MAX_EVENTS):
            self._room.set()
        else:
            self._room.clear()

    def _samples(self, seconds: float) -> int:
        return int(seconds * self._rate)


def _as_ours(error: Exception) -> StenoError:
    return error if isinstance(error, StenoError) else TranscriptionFailedError(str(error))


def _text(tokens: Iterable[Token]) -> str:
    return text_of(token.spelling for token in tokens)


def _tokens(segment: Segment) -> tuple[Token, ...]:
    """Take a segment's tokens; the text of a loop that was cut short is no longer theirs."""
    if segment.text.strip() != text_of(segment.spelling).strip():
        return (Token(-1, segment.text.encode()),)
    known = zip(segment.tokens, segment.spelling, segment.logprobs, strict=True)
    return tuple(Token(*token) for token in known)
