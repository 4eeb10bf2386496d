"""What a live session tells, and where its time went. Values."""

import time
from dataclasses import dataclass, field
from statistics import median

from app.errors import StenoError
from app.session.agreement import Token
from app.transcript import Segment, Transcript


@dataclass(frozen=True, slots=True)
class UtteranceOpened:
    """Somebody speaks, from `start` seconds on."""

    utterance: int
    start: float


@dataclass(frozen=True, slots=True)
class UtteranceClosed:
    """The utterance has ended at `end` seconds; the rest of its text will come.

    `cut` says that it was as long as may be, and that the speaker goes on in the next one.
    """

    utterance: int
    end: float
    cut: bool = False


@dataclass(frozen=True, slots=True)
class UtteranceDropped:
    """The client has taken the utterance back; nothing more of it will come."""

    utterance: int


@dataclass(frozen=True, slots=True)
class AudioCleared:
    """All that the client has taken back is forgotten: what is told after this is of other audio, or of closed utterances."""


@dataclass(frozen=True, slots=True)
class UtteranceLost:
    """The utterance's final has failed, and the session goes on. What was told of it is all of its text."""

    utterance: int
    error: StenoError


@dataclass(frozen=True, slots=True)
class LiveDelta:
    """Text to append to all that was told before. It is never taken back."""

    utterance: int
    text: str
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class LivePartial:
    """What is heard after the text that was told; it replaces the partial before. `revision` rises within an utterance.

    `seconds` of the session's audio are in it.
    """

    utterance: int
    revision: int
    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class UtteranceChanged:
    """The final says something else than the deltas did: this is the utterance's text. Only with free finals."""

    utterance: int
    text: str


@dataclass(frozen=True, slots=True)
class UtteranceFinal:
    """All text of an utterance has been told."""

    segment: Segment
    utterance: int
    language: str | None


LiveEvent = (
    UtteranceOpened
    | UtteranceClosed
    | UtteranceDropped
    | AudioCleared
    | UtteranceLost
    | LiveDelta
    | LivePartial
    | UtteranceChanged
    | UtteranceFinal
    | Transcript
)


@dataclass(slots=True)
class Profile:
    """Where a session's time went, so that a slow one can be explained. Times in seconds, from the first audio's receipt."""

    began: float = field(default_factory=time.monotonic)
    first_text: float | None = None
    stopped: float | None = None
    ended: float | None = None
    waited: float = 0.0  # by the sender, for room
    decode: float = 0.0
    vad: float = 0.0
    partials: int = 0
    partials_heard: int = 0
    partials_stale: int = 0
    partials_doubted: int = 0
    finals: int = 0
    words_taken_back: int = 0
    turn_waits: list[float] = field(default_factory=list)  # of partials, for a place
    confirms: list[float] = field(default_factory=list)  # of tokens, from when they were first heard
    encodes: list[float] = field(default_factory=list)
    queues: list[float] = field(default_factory=list)
    engines: list[float] = field(default_factory=list)
    deliveries: list[float] = field(default_factory=list)  # from the engine's answer to the reader's asking

    def summary(self) -> dict[str, float | int | None]:
        """Write it down, in milliseconds."""

        def ms(seconds: float | None) -> float | None:
            return None if seconds is None else round(seconds * 1000, 1)

        def spread(name: str, values: list[float]) -> dict[str, float | None]:
            return {f"{name}_ms_p50": ms(median(values)) if values else None, f"{name}_ms_max": ms(max(values, default=None))}

        return {
            "partials": self.partials,
            "partials_stale": self.partials_stale,
            "partials_doubted": self.partials_doubted,
            "finals": self.finals,
            "words_taken_back": self.words_taken_back,
            "first_text_ms": ms(self.first_text),
            "final_after_stop_ms": ms(self.ended - self.stopped if self.ended and self.stopped else None),
            "sender_waited_ms": ms(self.waited),
            "decode_ms": ms(self.decode),
            "vad_ms": ms(self.vad),
            **spread("turn", self.turn_waits),
            **spread("queue", self.queues),
            **spread("encode", self.encodes),
            **spread("engine", self.engines),
            **spread("deliver", self.deliveries),
            **spread("confirm", self.confirms),
        }
