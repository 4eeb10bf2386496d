"""What a transcription is made of: options in, segments and text out. Pure values, and the joining of texts into one."""

import unicodedata
from dataclasses import dataclass, field

from app.words import Word
from engine.base import Usage
from engine.prompts import Task

# Scripts without spaces between words, beside the wide characters of East Asia.
_UNSPACED = (
    range(0x0E00, 0x0F00),  # Thai, Lao
    range(0x1000, 0x10A0),  # Myanmar
    range(0x1780, 0x1800),  # Khmer
)
_HANGUL = (range(0x1100, 0x1200), range(0x3130, 0x3190), range(0xA960, 0xA980), range(0xAC00, 0xD800))  # wide, yet spaced


@dataclass(frozen=True, slots=True)
class Options:
    """How to transcribe a file.

    Attributes:
        language: a code of the engine, or None to detect it once for the whole file.
        languages: when several are spoken: each window's is detected among these.
        prompt: text before the audio.
        temperature: 0 decodes greedily.
        task: transcribe, or translate into English.
        words: whether their times are wanted.
        continuous: whether a window is told what the one before it said; windows are then decoded one after another.

    """

    language: str | None = None
    languages: tuple[str, ...] = ()
    prompt: str = ""
    temperature: float = 0.0
    task: Task = "transcribe"
    words: bool = False
    continuous: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of speech with its times in the file, in seconds, and the signals of the decode that it comes from.

    `tokens`, `logprobs` and `spelling` (the tokens' bytes) are of one length.
    `text` begins with a space where its script has them; `window_start` is where its window begins, in seconds.
    """

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spelling: tuple[bytes, ...]
    window_start: float
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Text as it was decoded, with its tokens' bytes and log-probabilities."""

    text: str
    spelling: tuple[bytes, ...] = ()
    logprobs: tuple[float, ...] = ()

    def __add__(self, other: "Piece") -> "Piece":
        return Piece(self.text + other.text, self.spelling + other.spelling, self.logprobs + other.logprobs)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text to append to what was sent before, and the tokens that were decoded for it."""

    text: str
    spelling: tuple[bytes, ...] = ()
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """So much of the file is transcribed, in seconds of its audio."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Stages:
    """Where the time went, in seconds. Each is a sum over a file's windows, which overlap.

    `decode` and `vad` are work in threads of the gateway; `queue` is waiting in the engine, `engine` its decoding.
    """

    decode: float = 0.0
    vad: float = 0.0
    queue: float = 0.0
    engine: float = 0.0

    def __add__(self, other: "Stages") -> "Stages":
        return Stages(self.decode + other.decode, self.vad + other.vad, self.queue + other.queue, self.engine + other.engine)


@dataclass(frozen=True, slots=True)
class Transcript:
    """The whole text of a file. The deltas before it join to `text` exactly.

    `languages` are the codes of those heard, in the order in which they were first spoken; `seconds` is the audio's length.
    """

    text: str
    languages: tuple[str, ...]
    seconds: float
    segments: tuple[Segment, ...]
    usage: Usage
    stages: Stages = field(default_factory=Stages)

    @property
    def language(self) -> str | None:
        """The first language that was heard."""
        return self.languages[0] if self.languages else None


class TextJoiner:
    """Joins pieces of text as they come: no space at either end, one where two windows meet, none between CJK characters.

    Fed piece by piece, it returns what may be shown now; a trailing space is held back until a word follows. What it
    returned joins to `text` at every moment.
    """

    def __init__(self) -> None:
        self.text = ""
        self._held = ""
        self._at_seam = False

    def feed(self, piece: str) -> str:
        """Take a piece and return what it adds to the text."""
        piece = self._held + piece
        shown = piece.rstrip()
        self._held = piece[len(shown) :]
        if not shown:
            return ""
        if not self.text:
            shown = shown.lstrip()
        elif self._at_seam:
            first = shown.lstrip()
            shown = first if _is_unspaced(self.text[-1]) and _is_unspaced(first[0]) else " " + first
        self._at_seam = False
        self.text += shown
        return shown

    def end_window(self) -> None:
        """Say that the next piece begins another window."""
        self._held = ""
        self._at_seam = True


def _is_unspaced(character: str) -> bool:
    if any(ord(character) in block for block in _HANGUL):
        return False
    return unicodedata.east_asian_width(character) in "WF" or any(ord(character) in block for block in _UNSPACED)
