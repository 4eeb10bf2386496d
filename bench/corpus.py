"""Speech to send: a folder, a JSONL manifest, or the built-in recordings; and the order in which requests take it."""

import importlib.util
import io
import json
import random
import wave
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt

RATE = 16_000
JOINT = "+"  # between the names of clips that are joined
GAP_SECONDS = 0.3  # of silence between clips that are joined
SUFFIXES = frozenset({".aac", ".flac", ".m4a", ".mka", ".mp3", ".mp4", ".oga", ".ogg", ".opus", ".wav", ".webm"})

# The opening of Dickens's novel, Beckett's lines, and a scene of his: cut in pauses. Seconds.
_BUILT_IN: tuple[tuple[str, float, float, str | None], ...] = (
    ("two_cities.wav", 0.6, 4.6, "It was the best of times, it was the worst of times,"),
    ("two_cities.wav", 4.6, 8.3, "it was the age of wisdom, it was the age of foolishness,"),
    ("two_cities.wav", 8.3, 13.1, "it was the epoch of belief, it was the epoch of incredulity,"),
    ("two_cities.wav", 13.1, 16.9, "it was the season of Light, it was the season of Darkness,"),
    ("two_cities.wav", 16.9, 20.8, "it was the spring of hope, it was the winter of despair,"),
    ("two_cities.wav", 20.8, 24.2, "we had everything before us, we had nothing before us,"),
    ("two_cities.wav", 24.2, 28.6, "we were all going direct to Heaven, we were all going direct the other way"),
    (
        "two_cities.wav",
        28.6,
        34.5,
        "in short, the period was so far like the present period, that some of its noisiest authorities",
    ),
    (
        "two_cities.wav",
        34.5,
        42.9,
        "insisted on its being received, for good or for evil, in the superlative degree of comparison only.",
    ),
    ("beckett.wav", 0.0, 3.1, "Ever tried. Ever failed."),
    ("beckett.wav", 3.1, 6.1, "No matter. Try again."),
    ("beckett.wav", 6.1, 9.9, "Fail again. Fail better."),
    ("endgame_nagg_nell.wav", 0.0, 8.4, None),
    ("endgame_nagg_nell.wav", 8.4, 14.3, None),
    ("endgame_nagg_nell.wav", 14.3, 19.1, None),
    ("endgame_nagg_nell.wav", 19.1, 28.0, None),
)


class CorpusError(Exception):
    """There is no speech to send."""


@dataclass(frozen=True, eq=False)
class Clip:
    """Speech of one or several recordings.

    Attributes:
        name: of the recording, unique; several are joined by `+`, which no name has.
        samples: shape (n,), int16, mono, 16 kHz.
        text: what is said, if it is known.

    """

    name: str
    samples: npt.NDArray[np.int16]
    text: str | None

    @property
    def seconds(self) -> float:
        """Length."""
        return len(self.samples) / RATE

    def at(self, rate: int) -> npt.NDArray[np.int16]:
        """Return the samples at another rate, in Hz."""
        if rate == RATE or not len(self.samples):
            return self.samples
        resampler = av.AudioResampler("s16", "mono", rate)
        frame = av.AudioFrame.from_ndarray(self.samples[None], format="s16", layout="mono")
        frame.sample_rate = RATE
        return np.concatenate([piece.to_ndarray()[0] for piece in [*resampler.resample(frame), *resampler.resample(None)]])

    @cached_property
    def wav(self) -> bytes:
        """The clip as a WAV file."""
        buffer = io.BytesIO()
        with wave.open(buffer, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(self.samples.astype("<i2").tobytes())
        return buffer.getvalue()


def load_corpus(source: Path | None) -> list[Clip]:
    """Read a folder (`x.wav` beside `x.txt`), a manifest (lines of `{"audio": ..., "text": ...}`), or the built-in speech.

    Raises:
        CorpusError: naming the file that cannot be read.

    """
    if source is None:
        clips = _built_in()
    elif source.is_dir():
        clips = [
            Clip(str(path.relative_to(source)), read_audio(path), _text_beside(path))
            for path in sorted(source.rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
    else:
        clips = list(_of_manifest(source))
    clips = [Clip(clip.name.replace(JOINT, " "), clip.samples, clip.text) for clip in clips if len(clip.samples)]
    if not clips:
        raise CorpusError(f"{source} has no audio")
    return clips


def read_audio(path: Path) -> npt.NDArray[np.int16]:
    """Decode a file to 16 kHz mono.

    Raises:
        CorpusError: if it is not audio.

    """
    resampler = av.AudioResampler("s16", "mono", RATE)
    pieces: list[npt.NDArray[np.int16]] = [np.empty(0, np.int16)]
    try:
        with av.open(str(path)) as container:
            for frame in container.decode(audio=0):
                pieces.extend(piece.to_ndarray()[0] for piece in resampler.resample(frame))
        pieces.extend(piece.to_ndarray()[0] for piece in resampler.resample(None))
    except (av.FFmpegError, IndexError, OSError) as error:
        raise CorpusError(f"{path} is not audio that can be read: {error}") from error
    return np.concatenate(pieces)


def _text_beside(path: Path) -> str | None:
    text = path.with_suffix(".txt")
    return text.read_text(encoding="utf-8").strip() if text.is_file() else None


def _of_manifest(path: Path) -> Iterable[Clip]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            audio = path.parent / (row.get("audio") or row["audio_filepath"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorpusError(
                f'{path}:{number} is no line of a manifest, such as {{"audio": "a.wav", "text": "..."}}'
            ) from error
        yield Clip(str(row.get("audio") or row["audio_filepath"]), read_audio(audio), row.get("text"))


def _built_in() -> list[Clip]:
    spec = importlib.util.find_spec("moonshine_voice")
    if spec is None or not spec.submodule_search_locations:
        raise CorpusError("there is no built-in speech: run `make setup`, or name a folder or a manifest with --corpus")
    folder = Path(spec.submodule_search_locations[0]) / "assets"
    recordings = {name: read_audio(folder / name) for name in dict.fromkeys(row[0] for row in _BUILT_IN)}
    return [
        Clip(f"{name}@{start:g}", recordings[name][int(start * RATE) : int(end * RATE)], text)
        for name, start, end, text in _BUILT_IN
    ]


class Deck:
    """Deals clips in a seeded order, so that no two requests in flight send the same audio.

    Clips are shuffled and dealt until all were; one that is in flight is passed over. When a request shall be longer, or all
    clips are in flight, several are joined, each time in another order.
    """

    def __init__(self, clips: Sequence[Clip], *, seconds: float = 0.0, seed: int = 0) -> None:
        self._clips = list(clips)
        self._seconds = seconds
        self._random = random.Random(seed)
        self._left: list[Clip] = []
        self._in_flight: Counter[str] = Counter()

    def deal(self) -> Clip:
        """Return the next request's speech. It is in flight until it is given back."""
        parts = [self._next()]
        while sum(part.seconds for part in parts) < self._seconds or self._in_flight[JOINT.join(p.name for p in parts)]:
            parts.append(self._next())
        clip = _joined(parts)
        self._in_flight[clip.name] += 1
        return clip

    def give_back(self, clip: Clip) -> None:
        """Say that a clip is no longer in flight."""
        self._in_flight[clip.name] -= 1

    def _next(self) -> Clip:
        if not self._left:
            self._left = self._random.sample(self._clips, len(self._clips))
        free = next((i for i, clip in enumerate(self._left) if not self._in_flight[clip.name]), 0)
        return self._left.pop(free)


def _joined(parts: list[Clip]) -> Clip:
    if len(parts) == 1:
        return parts[0]
    gap = np.zeros(int(GAP_SECONDS * RATE), np.int16)
    samples = np.concatenate([piece for part in parts for piece in (part.samples, gap)][:-1])
    known = [part.text for part in parts if part.text is not None]
    text = " ".join(known) if len(known) == len(parts) else None
    return Clip(JOINT.join(part.name for part in parts), samples, text)
