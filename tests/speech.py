"""Real speech with known words: from the package moonshine-voice (MIT), and from ../shared/audio where that lies beside us."""

import importlib.util
import io
import re
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from app.audio.decode import AudioReader

RATE = 16_000
SHARED = Path(__file__).resolve().parents[2] / "shared" / "audio"


@dataclass(frozen=True)
class Audio:
    samples: np.ndarray
    rate: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


def decode(data: bytes | BinaryIO, *, rate: int = RATE, max_seconds: float = 3600.0) -> Audio:
    """Read a whole file."""
    reader = AudioReader(io.BytesIO(data) if isinstance(data, bytes) else data, rate=rate, max_seconds=max_seconds)
    pieces = []
    while len(piece := reader.read(10 * rate)):
        pieces.append(piece)
    return Audio(np.concatenate(pieces), rate)


@dataclass(frozen=True)
class Clip:
    path: Path
    words: str

    @property
    def audio(self) -> Audio:
        return decode(self.path.read_bytes())


def _packaged(name: str, words: str) -> Clip:
    spec = importlib.util.find_spec("moonshine_voice")
    if spec is None or not spec.submodule_search_locations:
        pytest.fail("the package moonshine-voice, which carries the tests' speech, is not installed: run `make test`")
    return Clip(Path(spec.submodule_search_locations[0]) / "assets" / name, words)


def _shared(name: str, words: str) -> Clip:
    if not (SHARED / name).is_file():
        pytest.skip(f"no {name} beside the project")
    return Clip(SHARED / name, words)


def beckett() -> Clip:
    """Ten seconds, six short sentences."""
    return _packaged("beckett.wav", "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better.")


def two_cities() -> Clip:
    """Forty-four seconds: two windows. The opening of Dickens's novel."""
    return _packaged(
        "two_cities.wav",
        "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
        "was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
        "Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing "
        "before us, we were all going direct to Heaven, we were all going direct the other way - in short, the period was "
        "so far like the present period, that some of its noisiest authorities insisted on its being received, for good or "
        "for evil, in the superlative degree of comparison only.",
    )


def jfk() -> Clip:
    """Eleven seconds, 44.1 kHz stereo."""
    return _shared(
        "jfk.flac",
        "And so, my fellow Americans, ask not what your country can do for you, ask what you can do for your country.",
    )


def multilingual() -> Clip:
    """A minute: a licence read in English, then in German."""
    return _shared("multilingual.mp3", "")


def words(text: str) -> list[str]:
    """Reduce a text to its words, without case and punctuation."""
    return re.findall(r"[^\W_]+(?:['’][^\W_]+)*", text.lower())


def wav(samples: np.ndarray, rate: int = RATE, channels: int = 1) -> bytes:
    """Write samples in -1 to 1, shape (n,) or (n, channels), as a 16 bit WAV file."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def tone(seconds: float, *, frequency: float = 440.0, rate: int = RATE) -> np.ndarray:
    """Make a sine of half the full scale."""
    return (0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)).astype(np.float32)
