"""Decode one window of speech into text that can be trusted: Whisper's fallbacks around the engine.

A decode whose own signals speak against it is made again at a higher temperature; what is probably silence is dropped; a
loop that no temperature breaks is cut to its first turn. A decode that ends before the speech does is taken up again from its
last timestamp. What is dropped says so in the log.

Text may be shown before its window has ended. It is held back until the decode can be believed so far: a window whose text
was shown is not decoded again, so that nothing shown is taken back.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from app.quality import AVG_LOGPROB_LIMIT, COMPRESSION_RATIO_LIMIT, NO_SPEECH_LIMIT, compression_ratio, judge, temperatures
from app.tracing import span, tell_engine_stages
from app.transcript import Piece, Segment, Stages
from app.words import words_of
from engine.base import AudioContext, DecodeRequest, Engine, Outcome, Usage
from engine.segments import Segment as Heard

logger = logging.getLogger(__name__)

TOKENS_TO_BELIEVE = 6  # so many must have come before text is shown
UNCOVERED_SECONDS = 1.5  # speech that a decode left out is taken up again if it is longer than this
MIN_PROGRESS_SECONDS = 1.0
# What a text that repeats itself must be likelier by than another, in average log-probability: loops are sure of themselves.
LOOP_PENALTY = 2.0
COMPRESSIBLE_PENALTY = 1.0  # a list, or somebody who repeats himself, compresses as well as a loop
LOOP_TURNS = 4  # a loop that no temperature breaks is cut if it comes round so often
_LOOP = re.compile(rf"(.{{2,200}}?)\1{{{LOOP_TURNS - 1},}}", re.DOTALL)


@dataclass(slots=True)
class WindowText:
    """What became of a window that ends at `end` seconds of the file. `temperature` is that of its last decode."""

    end: float
    segments: list[Segment] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    stages: Stages = field(default_factory=Stages)
    language: str | None = None
    temperature: float = 0.0

    @property
    def text(self) -> str:
        """What was said."""
        return "".join(segment.text for segment in self.segments)


@dataclass(frozen=True, slots=True)
class _Attempt:
    text: str
    language: str | None
    outcome: Outcome
    shown: bool


class WindowDecoder:
    """Decodes windows on an engine.

    Args:
        engine: where.
        words: whether the times of words are wanted.
        stream: whether somebody waits for text before its window has ended.
        show: receives the window's text, piece by piece; they join to the text of its segments.
        tell_language: receives the language as soon as the engine tells it.

    """

    def __init__(
        self,
        engine: Engine,
        *,
        words: bool = False,
        stream: bool,
        show: Callable[[Piece], None],
        tell_language: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._words = words
        self._stream = stream
        self._show = show
        self._tell_language = tell_language
        self._decodes = 0
        self._taking_up = False  # what an earlier decode left out

    async def decode(self, request: DecodeRequest, *, start: float) -> WindowText:
        """Decode one window that begins at `start` seconds of the file.

        Raises:
            EngineError: as the engine does.

        """
        samples, rate = request.samples, self._engine.limits.sample_rate
        result = WindowText(start + len(samples) / rate)
        if request.language is None and request.previous_text and "detection" in self._engine.limits.abilities:
            request = replace(request, language=await self._spoken_language(request))
        while True:
            attempt, temperature = await self._best_attempt(replace(request, samples=samples), result)
            if self._taking_up and attempt.outcome.no_speech_prob > NO_SPEECH_LIMIT:
                return result  # the decode that left it out was right
            result.language, result.temperature = attempt.language, temperature
            segments = _placed(attempt, temperature, start)
            if not attempt.shown:
                for segment in segments:
                    self._show(Piece(segment.text, segment.spelling, segment.logprobs))
            if self._words and segments:
                segments = await self._with_words(replace(request, samples=samples, language=attempt.language), segments, start)
            result.segments += segments
            seconds = len(samples) / rate
            covered = max((segment.end for segment in segments), default=start + seconds) - start
            if seconds - covered <= UNCOVERED_SECONDS or covered < MIN_PROGRESS_SECONDS:
                return result
            logger.info("%s: %.1f s of speech were left out, taking them up again", request.id, seconds - covered)
            self._taking_up = True
            samples = samples[int(covered * rate) :]
            start += covered

    async def _spoken_language(self, request: DecodeRequest) -> str | None:
        """Ask for the language alone, without the previous text: that would decide it, whatever is spoken."""
        self._decodes += 1
        request = replace(request, id=f"{request.id}.{self._decodes}", previous_text="", deltas=True)
        async with aclosing(self._engine.transcribe(request)) as deltas:
            async for delta in deltas:
                if delta.language is not None:
                    return delta.language
        return None

    async def _with_words(self, request: DecodeRequest, segments: list[Segment], start: float) -> list[Segment]:
        """Align the segments' tokens with the sound, and give each segment its words."""
        tokens = [token for segment in segments for token in segment.tokens]
        times = [start + time for time in await self._engine.align(request, tokens)]
        timed, first = [], 0
        for segment in segments:
            last = first + len(segment.tokens)
            words = words_of(segment.spelling, times[first : last + 1], request.language)
            timed.append(replace(segment, words=tuple(words)))
            first = last
        return timed

    async def _best_attempt(self, request: DecodeRequest, result: WindowText) -> tuple[_Attempt, float]:
        """Decode until the text can be trusted, in the whole window and then at rising temperatures; else return the best.

        People do repeat themselves, and read lists: what looks like a loop may be right, and is better than what a high
        temperature made up.
        """
        attempts: list[tuple[_Attempt, float]] = []
        for temperature, context in self._ways(request):
            attempt = await self._attempt(replace(request, temperature=temperature, audio_context=context))
            outcome = attempt.outcome
            result.usage += outcome.usage
            result.stages += Stages(queue=outcome.queue_seconds, engine=outcome.engine_seconds)
            verdict = judge(
                attempt.text,
                avg_logprob=outcome.avg_logprob,
                no_speech_prob=outcome.no_speech_prob,
                looped=outcome.finish_reason == "repetition",
            )
            if verdict == "silence" and not attempt.shown:
                logger.info(
                    "%s: dropped as silence (no speech %.2f, average log-probability %.2f)",
                    request.id,
                    outcome.no_speech_prob,
                    outcome.avg_logprob,
                )
                return replace(attempt, text="", outcome=replace(outcome, segments=())), temperature
            attempts.append((attempt, temperature))
            if verdict == "good" or attempt.shown:
                break
            logger.info("%s: the decode at temperature %.1f (%s) is %s", request.id, temperature, context or "first", verdict)
        return max(attempts, key=lambda made: (made[0].shown, _worth(made[0])))

    def _ways(self, request: DecodeRequest) -> Iterator[tuple[float, AudioContext | None]]:
        """Yield the temperature and the audio context of each decode: the whole window before a higher temperature."""
        first, *higher = temperatures(request.temperature)
        yield first, request.audio_context
        is_short = (request.audio_context or self._engine.limits.audio_context) == "true"
        if is_short:
            yield first, "full"
        for temperature in higher:
            yield temperature, "full" if is_short else request.audio_context

    async def _attempt(self, request: DecodeRequest) -> _Attempt:
        self._decodes += 1
        request = replace(request, id=f"{request.id}.{self._decodes}", deltas=self._stream and not self._taking_up)
        held, text, shown, language = Piece(""), "", False, None
        logprobs: list[float] = []
        asked = {"temperature": request.temperature, "audio_context": request.audio_context or ""}
        with span("decode", **asked):
            async with aclosing(self._engine.transcribe(request)) as deltas:
                async for delta in deltas:
                    if delta.language is not None and language is None:
                        language = delta.language
                        self._tell_language(language)
                    text += delta.text
                    held += Piece(delta.text, delta.spelling, delta.logprobs)
                    logprobs += delta.logprobs
                    if request.deltas and held.text and _believable(text, logprobs):
                        self._show(held)
                        held, shown = Piece(""), True
                    if delta.outcome is not None:
                        tell_engine_stages(delta.outcome)
                        if shown and held.text and delta.outcome.finish_reason == "stop":
                            self._show(held)
                        return _Attempt(text, language, delta.outcome, shown)
        raise AssertionError("an engine ends a request with its outcome")


def _believable(text: str, logprobs: list[float]) -> bool:
    """Say whether text may be shown before its decode has ended."""
    return (
        len(logprobs) >= TOKENS_TO_BELIEVE
        and float(np.mean(logprobs)) > AVG_LOGPROB_LIMIT
        and compression_ratio(text) < COMPRESSION_RATIO_LIMIT
    )


def _worth(attempt: _Attempt) -> float:
    penalty = COMPRESSIBLE_PENALTY if _loops(attempt) else 0.0
    if attempt.outcome.finish_reason == "repetition" or _LOOP.search(attempt.text):
        penalty = LOOP_PENALTY
    return attempt.outcome.avg_logprob - penalty


def _loops(attempt: _Attempt) -> bool:
    return attempt.outcome.finish_reason == "repetition" or compression_ratio(attempt.text) > COMPRESSION_RATIO_LIMIT


def _placed(attempt: _Attempt, temperature: float, start: float) -> list[Segment]:
    """Give the attempt's segments their times in the file; a loop is cut to its first turn."""
    outcome = attempt.outcome
    loops = _loops(attempt) and not attempt.shown
    segments: list[Segment] = []
    for segment in _without_turns(outcome.segments) if loops else outcome.segments:
        text = _LOOP.sub(r"\1", segment.text) if loops else segment.text
        segments.append(
            Segment(
                start=start + segment.start,
                end=start + segment.end,
                text=text,
                tokens=segment.tokens,
                logprobs=segment.logprobs,
                spelling=segment.spelling,
                window_start=start,
                temperature=temperature,
                avg_logprob=outcome.avg_logprob,
                compression_ratio=compression_ratio(attempt.text),
                no_speech_prob=outcome.no_speech_prob,
            )
        )
    return segments


def _without_turns(segments: Iterable[Heard]) -> Iterator[Heard]:
    """Pass over the turns of a loop after its first."""
    for _, run in groupby(segments, key=lambda segment: segment.text):
        turns = list(run)
        yield from turns[:1] if len(turns) >= LOOP_TURNS else turns
