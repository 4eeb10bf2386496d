"""Decode an uploaded file to mono float32 at the engine's rate, by its content and never by its name.

FFmpeg (through PyAV) is given bytes from a stranger. So the containers are a fixed list: playlists and other formats that
open further files or addresses are not on it, nor are formats that any bytes would pass for. Both the bytes and the decoded
seconds are bounded, the seconds while decoding. A damaged frame is skipped, as players do; a file without one good frame is
an error. Every channel is heard: they are averaged.

Blocks; runs in a worker thread. PyAV releases the interpreter's lock while FFmpeg works.
"""

import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

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

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Audio:
    """Decoded sound: mono float32, shape (n,), at `rate` Hz."""

    samples: Samples
    rate: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return len(self.samples) / self.rate


def decode(data: bytes | BinaryIO, *, rate: int, max_seconds: float) -> Audio:
    """Decode a whole file.

    Args:
        data: the file, as bytes or as something seekable to read from.
        rate: sample rate of the result, in Hz.
        max_seconds: longer audio is refused as soon as it is known to be longer.

    Raises:
        AudioError: if it is not audio, is shorter than 0.1 s, or longer than `max_seconds`.

    """
    source = io.BytesIO(data) if isinstance(data, bytes) else data
    blocks, total, limit = [], 0, int(max_seconds * rate)
    for block in _mono_blocks(source, rate):
        blocks.append(block)
        total += len(block)
        if total > limit:
            raise AudioError(
                f"The audio is longer than {max_seconds:g} seconds, which is the maximum here.", code="invalid_value"
            )
    if not blocks:
        raise AudioError("Audio file might be corrupted or unsupported: it holds no sound that can be decoded.")
    if total < MIN_SECONDS * rate:
        raise AudioError("Audio file is too short. Minimum audio length is 0.1 seconds.", code="audio_too_short")
    samples = np.concatenate(blocks)
    peak = max(float(samples.max()), -float(samples.min()))
    return Audio(samples / np.float32(peak) if peak > 1 else samples, rate)


def _mono_blocks(source: BinaryIO, rate: int) -> Iterator[Samples]:
    try:
        container = av.open(source, mode="r", metadata_errors="ignore", options={"format_whitelist": CONTAINERS})
    except (av.error.FFmpegError, ValueError, OSError) as error:
        logger.debug("not opened: %s", error)
        raise AudioError(f"Invalid file format. Supported formats: {FORMATS_FOR_PEOPLE}") from error
    with container:
        stream = next((s for s in container.streams.audio if s.codec_context is not None), None)
        if stream is None:
            raise AudioError("The file has no audio track that can be decoded.")
        if channels := stream.codec_context.channels:
            # PyAV 18 frees a list of named channels twice, and the process dies: here they have no names.
            stream.codec_context.layout = f"{channels} channels"
        try:
            yield from _resampled(_good_frames(container, stream), rate)
        except (av.error.FFmpegError, ValueError) as error:
            logger.debug("not resampled: %s", error)
            raise AudioError("Audio file might be corrupted or unsupported: its sound cannot be converted.") from error


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
        block = frame.to_ndarray().reshape(-1, frame.layout.nb_channels).mean(axis=1, dtype=np.float32)
        yield np.nan_to_num(block, copy=False, nan=0.0, posinf=0.0, neginf=0.0).clip(-1, 1)
