"""Where utterances begin and end while the audio is still coming. Pure and incremental.

An utterance opens when somebody has spoken for a moment, a little before he did, so that no first sound is lost. Silence closes
it, and the longer the utterance, the less silence it takes: a long one is wanted soon, and its next pause is a good place.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from app.speech.vad import FRAME_SAMPLES
from app.speech.windows import SpeechRun

# The longest utterance, in seconds, that so much silence closes (FunASR's realtime server).
SHRINKING_SILENCE = ((5.0, 2.0), (10.0, 1.5), (15.0, 1.0), (30.0, 0.8))
LEAST_SILENCE = 0.4
LEAST_CLOSING_SILENCE = 0.1  # of what a client may ask for: less is a pause within a word


@dataclass(frozen=True, slots=True)
class EndpointPolicy:
    """When speech begins and ends.

    Attributes:
        threshold: the probability from which on a frame is speech.
        before_seconds, after_seconds: silence kept at either end of an utterance.
        silence_seconds: silence that closes an utterance; None shrinks it as the utterance grows.

    """

    threshold: float = 0.4
    before_seconds: float = 0.4
    after_seconds: float = 0.4
    silence_seconds: float | None = None

    @classmethod
    def of_server_vad(cls, *, threshold: float, prefix_padding_ms: int, silence_duration_ms: int) -> "EndpointPolicy":
        """Return what OpenAI's `server_vad` asks for with its three numbers."""
        silence = max(silence_duration_ms / 1000, LEAST_CLOSING_SILENCE)
        return cls(
            threshold=threshold,
            before_seconds=prefix_padding_ms / 1000,
            after_seconds=min(silence, cls().after_seconds),
            silence_seconds=silence,
        )

    def closing_silence(self, spoken_seconds: float) -> float:
        """Return how much silence closes an utterance of this length."""
        if self.silence_seconds is not None:
            return self.silence_seconds
        return next((silence for longest, silence in SHRINKING_SILENCE if spoken_seconds <= longest), LEAST_SILENCE)


class Edge(NamedTuple):
    """An utterance begins or ends at a sample of the stream."""

    kind: Literal["open", "close"]
    at: int


class Endpointer:
    """Follows speech probabilities, frame by frame of `FRAME_SAMPLES`, from a sample of the stream on."""

    def __init__(self, rate: int, policy: EndpointPolicy, position: int = 0) -> None:
        self._rate, self._policy = rate, policy
        self._position = position
        self._start: int | None = None  # of the open utterance
        self._speech_end = 0
        self._run = SpeechRun(policy.threshold)
        self._last_end = position  # no utterance begins before it

    def feed(self, probabilities: npt.NDArray[np.float32]) -> Iterator[Edge]:
        """Take the probabilities of the next frames and yield the edges that they show."""
        for probability in probabilities.tolist():
            self._position += FRAME_SAMPLES
            if edge := self._take(probability):
                yield edge

    def close(self, at: int) -> Edge | None:
        """Close the open utterance at a sample, as somebody wants it; no utterance begins before it any more."""
        was_open, self._start, self._last_end = self._start is not None, None, at
        return Edge("close", at) if was_open else None

    def change(self, policy: EndpointPolicy) -> None:
        """Follow another policy from here on."""
        self._policy = policy
        self._run = SpeechRun(policy.threshold, self._run.frames)

    def cut(self, at: int) -> None:
        """Begin a new utterance at a sample: the one before has become too long."""
        self._start = self._last_end = at
        self._speech_end = max(self._speech_end, at)

    def _take(self, probability: float) -> Edge | None:
        policy = self._policy
        if self._run.take(probability):
            self._speech_end = self._position
            if self._start is None:
                first = self._position - self._run.samples
                self._start = max(self._last_end, first - self._samples(policy.before_seconds))
                return Edge("open", self._start)
        if self._start is None:
            return None
        silence = self._position - self._speech_end
        if silence < self._samples(policy.closing_silence((self._speech_end - self._start) / self._rate)):
            return None
        end = self._speech_end + self._samples(policy.after_seconds)
        return self.close(min(end, self._position))

    def _samples(self, seconds: float) -> int:
        return int(seconds * self._rate)
