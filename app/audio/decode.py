"""Decode an uploaded file to mono float32 at the engine's rate, by its content and never by its name.

FFmpeg (through PyAV) is given bytes from a stranger. So the containers are a fixed list: playlists and other formats that
open further files or addresses are not on it, nor are formats that any bytes would pass for. Both the bytes and the decoded
seconds are bounded, the seconds while decoding. A damaged frame is skipped, as players do; a file without one good frame is
an error. Every channel is heard: they are averaged.

Blocks; runs in a worker thread. PyAV releases the interpreter's lock while FFmpeg works.
"""

import functools
import logging
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import av
import av.error
import numpy as np
import numpy.typing as npt

from app.errors import AudioError

logger = logging.getLogger(__name__)

# FFmpeg's demuxers for what people record and send, by FFmpeg's names.
CONTAINERS = (
    "wav,w64,rf64,aiff,au,caf,flac,mp3,aac,ogg,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,asf,avi,mpeg,mpegts,flv,amr,amrnb,amrwb,"
    "ac3,eac3,wv,ape,tta,opus"
)
FORMATS_FOR_PEOPLE = ["flac", "m4a", "mp3", "mp4", "mpeg", "mpga", "oga", "ogg", "wav", "webm"]
MIN_SECONDS = 0.1  # what OpenAI asks for
MIN_RATE = 4000  # Hz: half of a telephone's. A file of a few bytes that claims 1 Hz would fill the memory with its hours

LIVE_PROBE_BYTES = 2048  # of a live stream are looked at before its sound is decoded
ABSURD = 1e8  # integers of 24 bits that nobody scaled reach 8e6; what lies beyond is damage

Samples = npt.NDArray[np.float32]


class AudioSource(Protocol):
    """What audio is read from: any binary file. One that cannot seek is read from front to back."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none mean the end."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move the position, and return it."""

    def tell(self) -> int:
        """Return the position."""

    def seekable(self) -> bool:
        """Whether FFmpeg may look around."""


@dataclass(frozen=True, slots=True)
class RawFormat:
    """How samples lie in a file without a header: FFmpeg's name of the encoding, samples a second, channels."""

    encoding: Literal["s16le", "s16be", "f32le", "mulaw", "alaw"]
    rate: int
    channels: int = 1

    @property
    def bytes_per_second(self) -> int:
        """How many bytes a second of audio takes."""
        return self.rate * self.channels * {"f32le": 4, "mulaw": 1, "alaw": 1}.get(self.encoding, 2)


class AudioReader:
    """Reads an audio file piece by piece. The file must stay open as long.

    Args:
        file: to read from.
        rate: sample rate of what comes out, in Hz.
        max_seconds: longer audio is refused as soon as it is known to be longer.
        raw: the samples' form in a file without a header; else the content tells.
        live: somebody still speaks; look at no more of the file than must be before its sound comes out.

    Raises:
        AudioError: if it is not audio, is shorter than 0.1 s, or says that it is too long.

    """

    def __init__(
        self, file: AudioSource, *, rate: int, max_seconds: float, raw: RawFormat | None = None, live: bool = False
    ) -> None:
        self.rate = rate
        self._max_seconds = max_seconds
        self._taken = 0
        self._blocks = _mono_blocks(file, rate, max_seconds, _open_options(raw, live=live))
        self._rest = self._gather(int(MIN_SECONDS * rate))
        if len(self._rest) < int(MIN_SECONDS * rate):
            raise too_short(len(self._rest))

    @property
    def seconds(self) -> float:
        """How much has been read."""
        return self._taken / self.rate

    def read(self, samples: int) -> Samples:
        """Return the next samples, mono float32, shape (n,): as many as asked for, or fewer at the end.

        Raises:
            AudioError: if the audio is longer than allowed.

        """
        got = (
            self._rest if len(self._rest) >= samples else np.concatenate([self._rest, self._gather(samples - len(self._rest))])
        )
        self._rest = got[samples:]
        self._taken += len(got[:samples])
        if self._taken > self._max_seconds * self.rate:
            raise too_long(self._max_seconds)
        return got[:samples]

    def close(self) -> None:
        """Let go of the file."""
        self._blocks.close()

    def _gather(self, at_least: int) -> Samples:
        blocks: list[Samples] = []
        missing = at_least
        while missing > 0 and (block := next(self._blocks, None)) is not None:
            blocks.append(block)
            missing -= len(block)
        return np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.float32)


def too_short(samples: int) -> AudioError:
    """Return the error for so few samples, or none."""
    if not samples:
        return AudioError("Audio file might be corrupted or unsupported: it holds no sound that can be decoded.")
    return AudioError("Audio file is too short. Minimum audio length is 0.1 seconds.", code="audio_too_short")


def too_long(max_seconds: float) -> AudioError:
    """Return the error for audio past the bound."""
    return AudioError(f"The audio is longer than {max_seconds:g} seconds, which is the maximum here.", code="invalid_value")


def _open_options(raw: RawFormat | None, *, live: bool) -> dict[str, Any]:
    """Choose how PyAV opens a file."""
    if raw is not None:
        layout = {1: "mono", 2: "stereo"}.get(raw.channels, f"{raw.channels} channels")
        return {"format": raw.encoding, "options": {"sample_rate": str(raw.rate), "ch_layout": layout}}
    few = {"probesize": str(LIVE_PROBE_BYTES), "analyzeduration": "0"} if live else {}
    return {"options": {"format_whitelist": CONTAINERS} | few}


class _RaisesOnce:
    """A source that raises once, and then has ended. FFmpeg reads on after an error, and PyAV prints the second one."""

    def __init__(self, source: AudioSource) -> None:
        self._source = source
        self._failed = False
        self.seek, self.tell, self.seekable = source.seek, source.tell, source.seekable

    def read(self, size: int, /) -> bytes:
        """Read."""
        if self._failed:
            return b""
        try:
            return self._source.read(size)
        except Exception:
            self._failed = True
            raise


def _mono_blocks(
    source: AudioSource, rate: int, max_seconds: float, how_to_open: dict[str, Any]
) -> Generator[Samples, None, None]:
    try:
        seekable = source.seekable()
        container = av.open(_RaisesOnce(source), mode="r", metadata_errors="ignore", **how_to_open)
    except (av.error.FFmpegError, ValueError, OSError) as error:
        logger.debug("not opened: %s", error)
        raise AudioError(f"Invalid file format. Supported formats: {FORMATS_FOR_PEOPLE}") from error
    with container:
        stream = next((s for s in container.streams.audio if s.codec_context is not None), None)
        if stream is None:
            raise AudioError("The file has no audio track that can be decoded.")
        if seekable and _surely_longer(container, stream, max_seconds):
            raise too_long(max_seconds)
        if channels := stream.codec_context.channels:
            # PyAV 18 frees a list of named channels twice, and the process dies: here they have no names.
            stream.codec_context.layout = f"{channels} channels"
        try:
            yield from _resampled(_good_frames(container, stream), rate)
        except (av.error.FFmpegError, ValueError) as error:
            logger.debug("not resampled: %s", error)
            raise AudioError("Audio file might be corrupted or unsupported: its sound cannot be converted.") from error


def _surely_longer(container: av.container.InputContainer, stream: av.AudioStream, seconds: float) -> bool:
    """Say whether the file is longer, by what it declares and, since headers lie, by its packets too."""
    if not stream.duration or stream.time_base is None or float(stream.duration * stream.time_base) <= seconds:
        return False
    try:
        length = sum(packet.duration or 0 for packet in container.demux(stream))
        container.seek(0)
    except av.error.FFmpegError:
        return False
    return float(length * stream.time_base) > seconds


def _good_frames(container: av.container.InputContainer, stream: av.AudioStream) -> Iterator[av.AudioFrame]:
    """Decode frame by frame, passing over those that are damaged."""
    damaged = 0
    try:
        for packet in container.demux(stream):
            try:
                yield from packet.decode()
            except av.error.FFmpegError:
                damaged += 1
    except av.error.FFmpegError:  # the container itself ends in the middle: what came before it counts
        damaged += 1
    if damaged:
        logger.info("passed over %d damaged pieces of the audio", damaged)


def _resampled(frames: Iterator[av.AudioFrame], rate: int) -> Iterator[Samples]:
    """Resample each run of frames of one form (a file may change form in its middle), and average the channels."""
    resampler: av.AudioResampler | None = None
    form = None
    for frame in frames:
        if resampler is None or (frame.format.name, frame.layout.name, frame.sample_rate) != form:
            if resampler is not None:
                yield from _means(resampler.resample(None))
            form = (frame.format.name, frame.layout.name, frame.sample_rate)
            if frame.sample_rate < MIN_RATE:
                raise AudioError(f"The audio has a sample rate of {frame.sample_rate} Hz; {MIN_RATE} Hz is the least.")
            # Packed samples: PyAV 18 reads past the end of a frame with eight planes or more, and the process dies.
            resampler = av.AudioResampler(format="flt", layout=frame.layout.name, rate=rate)
        frame.pts = None  # damaged time stamps must not invent or drop sound
        yield from _means(resampler.resample(frame))
    if resampler is not None:
        yield from _means(resampler.resample(None))


def _means(frames: list[av.AudioFrame]) -> Iterator[Samples]:
    for frame in frames:
        yield _mono(frame.to_ndarray().reshape(-1, frame.layout.nb_channels))


def _mono(samples: npt.NDArray[Any]) -> Samples:
    """Average the channels of samples, shape (n, channels), and silence what is damage."""
    one = samples.shape[1] == 1
    block: Samples = samples[:, 0].astype(np.float32) if one else samples.mean(axis=1, dtype=np.float32)
    if not _peak(block) < ABSURD:  # NaN compares false
        block[~(np.abs(block) < ABSURD)] = 0.0
    return block


def not_too_loud(samples: Samples) -> Samples:
    """Scale samples down that exceed 1, as floating point numbers may."""
    peak = _peak(samples)
    return samples / np.float32(peak) if peak > 1 else samples


def _peak(samples: Samples) -> float:
    """Return the largest magnitude, NaN if one is NaN, without a copy of the samples."""
    return max(float(samples.max()), -float(samples.min())) if len(samples) else 0.0


class PcmDecoder:
    """Turns samples without a header into mono float32 at another rate, piece by piece and to the sample.

    Quick enough for the event loop: a second of audio takes less than a millisecond.
    """

    _TYPES: ClassVar = {"s16le": ("<i2", 1 / 32768), "s16be": (">i2", 1 / 32768), "f32le": ("<f4", 1.0)}

    def __init__(self, form: RawFormat, *, rate: int) -> None:
        self._form, self._rate = form, rate
        self._kind, self._scale = self._TYPES.get(form.encoding, ("u1", 1.0))
        self._table = _companding_table(form.encoding) if form.encoding in ("mulaw", "alaw") else None
        self._held = b""
        self._resampler = self._new_resampler()

    def feed(self, data: bytes) -> Samples:
        """Take bytes, which may end in the middle of a sample; return the samples that they complete."""
        data = self._held + data
        size = np.dtype(self._kind).itemsize * self._form.channels
        whole = len(data) // size * size
        self._held = data[whole:]
        values = np.frombuffer(data[:whole], self._kind)
        samples = self._table[values] if self._table is not None else values.astype(np.float32) * np.float32(self._scale)
        samples = _mono(samples.reshape(-1, self._form.channels))
        return self._resampled(samples) if self._resampler else samples

    def flush(self) -> Samples:
        """Return what the resampler still holds: afterwards all that was fed has come out."""
        if self._resampler is None:
            return np.zeros(0, dtype=np.float32)
        rest = _joined(self._resampler.resample(None))
        self._resampler = self._new_resampler()
        return rest

    def _resampled(self, samples: Samples) -> Samples:
        assert self._resampler is not None
        if not len(samples):
            return samples
        frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
        frame.sample_rate = self._form.rate
        return _joined(self._resampler.resample(frame))

    def _new_resampler(self) -> av.AudioResampler | None:
        same = self._form.rate == self._rate
        return None if same else av.AudioResampler(format="flt", layout="mono", rate=self._rate)


def _joined(frames: list[av.AudioFrame]) -> Samples:
    return np.concatenate([np.zeros(0, dtype=np.float32), *(frame.to_ndarray()[0] for frame in frames)])


@functools.cache
def _companding_table(encoding: str) -> Samples:
    """Decode each of the 256 values of a telephone's encoding (ITU-T G.711)."""
    codec = av.CodecContext.create(f"pcm_{encoding}", "r")
    assert isinstance(codec, av.AudioCodecContext)
    codec.sample_rate, codec.layout = 8000, "mono"
    (frame,) = codec.decode(av.Packet(bytes(range(256))))
    table: Samples = frame.to_ndarray()[0].astype(np.float32) / 32768
    return table
