"""Cut a stream of audio into windows of speech that the engine can take. Pure and incremental.

A window begins a little before somebody speaks and ends a little after; silence outside windows is left out. Silence of some
length closes a window, and so does its limit: then it is cut at the quietest point of its last third, and the next begins
where it ends, so that of continuous speech every sample belongs to exactly one window. Times of a window need no
translation: it is a contiguous piece of the audio.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from app.speech.vad import FRAME_SAMPLES

QUIET_SECONDS = 0.1  # the cut falls into the middle of the quietest stretch of this length
SEARCH_SHARE = 1 / 3  # how much of a window's end is searched for it
TAIL_SHARE = 1 / 6  # the rest of a cut stretch is no shorter than this: Whisper invents words for scraps
HYSTERESIS = 0.15  # speech goes on until its probability is this much below the threshold (silero's own choice)
AFTER_SECONDS = 0.4  # silence kept after speech
MIN_SPEECH_FRAMES = 3  # a click is no speech

Samples = npt.NDArray[np.float32]


@dataclass(slots=True)
class SpeechRun:
    """How many frames in a row somebody has spoken, up to the newest one. Pure.

    Speech begins at the threshold, and goes on until its probability is `HYSTERESIS` below.
    """

    threshold: float
    frames: int = 0

    def take(self, probability: float) -> bool:
        """Take a frame, and say whether it is speech and no click."""
        speaking = probability >= self.threshold - (HYSTERESIS if self.frames else 0.0)
        self.frames = self.frames + 1 if speaking else 0
        return self.frames >= MIN_SPEECH_FRAMES

    @property
    def samples(self) -> int:
        """The run's length, in samples."""
        return self.frames * FRAME_SAMPLES


@dataclass(frozen=True, slots=True)
class CutPolicy:
    """How to find windows.

    Attributes:
        limit_seconds: the longest window.
        first_limit_seconds: the longest first one, where somebody waits for its text.
        threshold: the probability from which on a frame is speech.
        before_seconds, after_seconds: silence kept at either end of the speech, so that no first sound is lost.
        silence_seconds: silence that closes a window; shorter pauses stay inside.

    """

    limit_seconds: float = 30.0
    first_limit_seconds: float = 30.0
    threshold: float = 0.4
    before_seconds: float = 0.4
    after_seconds: float = AFTER_SECONDS
    silence_seconds: float = 4.0


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of the audio: its first sample's number in the stream, and the samples, mono float32."""

    start: int
    samples: Samples


@dataclass(slots=True)
class WindowCutter:
    """Takes samples with their speech probabilities, gives windows as soon as they are complete."""

    rate: int
    policy: CutPolicy = field(default_factory=CutPolicy)
    _buffer: Samples = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    _buffer_start: int = 0  # stream position of the buffer's first sample
    _position: int = 0  # stream position up to which speech was looked for
    _window_start: int | None = None
    _speech_end: int = 0  # of the open window
    _last_end: int = 0  # no window begins before it
    _limit_seconds: float = field(init=False)  # of the open window, or the next
    _run: SpeechRun = field(init=False)

    def __post_init__(self) -> None:
        self._run = SpeechRun(self.policy.threshold)
        self._limit_seconds = min(self.policy.first_limit_seconds, self.policy.limit_seconds)

    def feed(self, samples: Samples, probabilities: Samples) -> Iterator[Window]:
        """Take whole frames and yield the windows that they complete."""
        self._buffer = np.concatenate([self._buffer, samples])
        for probability in probabilities.tolist():
            self._position += FRAME_SAMPLES
            yield from self._take_frame(probability)
        self._forget()

    def flush(self, rest: Samples) -> Iterator[Window]:
        """Take the last samples, too few for a frame, and yield what is still open."""
        self._buffer = np.concatenate([self._buffer, rest])
        end = self._buffer_start + len(self._buffer)
        if self._window_start is not None:
            at_the_end = self._speech_end == self._position
            self._speech_end = end if at_the_end else self._speech_end
            yield from self._close(min(end, self._speech_end + self._samples(self.policy.after_seconds)))

    def _take_frame(self, probability: float) -> Iterator[Window]:
        policy = self.policy
        if self._run.take(probability):
            if self._window_start is None:
                first = self._position - self._run.samples
                self._window_start = max(self._last_end, first - self._samples(policy.before_seconds))
            self._speech_end = self._position
        if self._window_start is None:
            return
        if self._position - self._speech_end >= self._samples(policy.silence_seconds):
            yield from self._close(self._speech_end + self._samples(policy.after_seconds))
        elif self._position - self._window_start >= self._samples(self._limit_seconds * (1 + TAIL_SHARE)):
            yield self._cut()

    def _close(self, end: int) -> Iterator[Window]:
        """Yield the open window up to `end`, in two if it is longer than the limit."""
        while self._window_start is not None and end - self._window_start > self._samples(self._limit_seconds):
            yield self._cut(end)
        assert self._window_start is not None
        yield self._window(self._window_start, end)
        self._window_start = None

    def _cut(self, end: int | None = None) -> Window:
        """Cut the open window at the quietest point before its limit; the rest stays open."""
        assert self._window_start is not None
        start, limit = self._window_start, self._samples(self._limit_seconds)
        latest = min(limit, (end or self._position) - start - int(limit * TAIL_SHARE))
        earliest = min(int(limit * (1 - SEARCH_SHARE)), latest)
        offset = start - self._buffer_start
        searched = self._buffer[offset + earliest : offset + latest]
        cut = start + earliest + quietest(searched, self._samples(QUIET_SECONDS))
        window = self._window(start, cut)
        self._window_start = cut
        return window

    def _window(self, start: int, end: int) -> Window:
        self._last_end = end
        self._limit_seconds = self.policy.limit_seconds
        return Window(start, self._buffer[start - self._buffer_start : end - self._buffer_start].copy())

    def _forget(self) -> None:
        """Drop what no window can need any more."""
        kept = self._window_start
        if kept is None:
            kept = max(self._last_end, self._position - self._run.samples - self._samples(self.policy.before_seconds))
        if kept > self._buffer_start:
            self._buffer = self._buffer[kept - self._buffer_start :].copy()
            self._buffer_start = kept

    def _samples(self, seconds: float) -> int:
        return int(seconds * self.rate)


def quietest(samples: Samples, width: int) -> int:
    """Return the middle of the stretch of `width` samples with the least energy; the latest of equals."""
    if len(samples) <= width:
        return len(samples)
    energy = np.concatenate([[0.0], np.cumsum(samples.astype(np.float64) ** 2)])
    stretches = energy[width:] - energy[:-width]
    return len(stretches) - 1 - int(np.argmin(stretches[::-1])) + width // 2
