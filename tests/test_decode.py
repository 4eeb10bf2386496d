"""Decoding, with files made here by PyAV and by hand: what people send is heard, what is not sound is refused."""

import io
import random
import socket
import struct
import subprocess
import sys
import threading
import wave
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from app.errors import AudioError
from tests import speech
from tests.speech import Audio, decode

RATE = 16_000
LAYOUTS = {1: "mono", 2: "stereo", 4: "4.0", 6: "5.1", 8: "7.1"}


def _audio_stream(container: av.container.OutputContainer, codec: str, rate: int, layout: str) -> av.AudioStream:
    # FFmpeg calls its own Vorbis encoder experimental.
    options = {"strict": "experimental"} if codec == "vorbis" else {}
    return container.add_stream(codec, rate=rate, layout=layout, options=options)


def _mux(container: av.container.OutputContainer, stream: av.AudioStream, samples: np.ndarray) -> None:
    packed = np.ascontiguousarray(samples.reshape(1, -1), dtype=np.float32)
    frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=stream.layout.name)
    frame.sample_rate, frame.pts, frame.time_base = stream.rate, 0, Fraction(1, stream.rate)
    for packet in (*stream.encode(frame), *stream.encode(None)):
        container.mux(packet)


def encode(samples: np.ndarray, codec: str, container: str, *, rate: int = RATE) -> bytes:
    """Make a file of samples in -1 to 1, shape (n,) or (n, channels)."""
    samples = samples.reshape(len(samples), -1)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        _mux(output, _audio_stream(output, codec, rate, LAYOUTS[samples.shape[1]]), samples)
    return buffer.getvalue()


def encode_with_video(container: str, video_codec: str, samples: np.ndarray | None) -> bytes:
    """Make a file with a second of a grey picture, and with AAC beside it if there are samples."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        video = output.add_stream(video_codec, rate=5, width=64, height=64, pix_fmt="yuv420p")
        audio = None if samples is None else _audio_stream(output, "aac", RATE, "mono")
        for number in range(5):
            frame = av.VideoFrame.from_ndarray(np.full((96, 64), 90, np.uint8), format="yuv420p")
            frame.pts = number
            output.mux(video.encode(frame))
        output.mux(video.encode(None))
        if audio is not None:
            _mux(output, audio, samples)
    return buffer.getvalue()


def ieee_float_wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    """Make a WAV file of 32 bit floats as they are, by hand."""
    data = samples.astype("<f4").tobytes()
    form = struct.pack("<HHIIHH", 3, 1, rate, 4 * rate, 4, 32)
    chunks = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


def caf(labels: list[int], samples: np.ndarray) -> bytes:
    """Make a CAF file of 16 bit samples whose channels are labelled one by one, by hand."""
    channels = len(labels)
    chunks = {
        b"desc": struct.pack(">d4s5I", RATE, b"lpcm", 0, 2 * channels, 1, channels, 16),
        b"chan": struct.pack(">3I", 0, 0, channels) + b"".join(struct.pack(">2I3f", label, 0, 0, 0, 0) for label in labels),
        b"data": bytes(4) + (samples * 32767).astype(">i2").tobytes(),
    }
    return b"caff" + struct.pack(">2H", 1, 0) + b"".join(n + struct.pack(">q", len(c)) + c for n, c in chunks.items())


def png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(b"\0\x7f\x7f\x7f" * 4)
    header = struct.pack(">2I5B", 1, 4, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def with_id3_picture(mp3: bytes) -> bytes:
    picture = b"\0image/png\0\x03\0" + png()
    frame = b"APIC" + struct.pack(">IH", len(picture), 0) + picture
    size = bytes(len(frame) >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\x03\0\0" + size + frame + mp3


def heard(data: bytes) -> Audio:
    return decode(data, rate=RATE, max_seconds=3600)


def frequency(samples: np.ndarray) -> float:
    """Find the loudest frequency, to 0.1 Hz."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples)), 10 * RATE))
    return float(spectrum.argmax()) / 10


def on_channels(channels: int, *, rate: int = RATE, seconds: float = 1.0, only: int | None = None) -> np.ndarray:
    """Put a tone of 440 Hz on each channel, or on only one."""
    samples = np.repeat(speech.tone(seconds, rate=rate)[:, None], channels, axis=1)
    if only is not None:
        samples[:, [c for c in range(channels) if c != only]] = 0
    return samples


# --- what is heard --------------------------------------------------------------------------------------------------

# Codec, container, sample rates, channels, and how far the length may be off, in seconds.
FORMS = {
    "wav, u8": ("pcm_u8", "wav", (8000, 16_000, 44_100, 48_000), (1, 2), 1e-4),
    "wav, s16": ("pcm_s16le", "wav", (8000, 16_000, 44_100, 48_000), (1, 2, 6, 8), 1e-4),
    "wav, s24": ("pcm_s24le", "wav", (44_100, 48_000), (1, 2, 6), 1e-4),
    "wav, f32": ("pcm_f32le", "wav", (16_000, 44_100), (1, 2, 8), 1e-4),
    "wav, f64": ("pcm_f64le", "wav", (16_000, 48_000), (1, 2), 1e-4),
    "wav, mu-law": ("pcm_mulaw", "wav", (8000,), (1, 2), 1e-4),
    "wav, A-law": ("pcm_alaw", "wav", (8000,), (1, 2), 1e-4),
    "aiff": ("pcm_s16be", "aiff", (44_100,), (2,), 1e-4),
    "caf": ("pcm_s16le", "caf", (44_100,), (4,), 1e-4),
    "flac": ("flac", "flac", (8000, 16_000, 44_100, 48_000), (1, 2, 6, 8), 1e-4),
    "mp3": ("libmp3lame", "mp3", (8000, 16_000, 44_100, 48_000), (1, 2), 0.06),
    "ogg, opus": ("libopus", "ogg", (8000, 16_000, 48_000), (1, 2, 6, 8), 0.06),
    "ogg, vorbis": ("vorbis", "ogg", (44_100, 48_000), (2,), 0.06),
    "webm, opus": ("libopus", "webm", (48_000,), (1, 2, 8), 0.06),
    "mp4, aac": ("aac", "mp4", (8000, 16_000, 44_100, 48_000), (1, 2, 6, 8), 0.06),
    "m4a, aac": ("aac", "ipod", (44_100,), (1, 2), 0.06),
    "m4a, alac": ("alac", "ipod", (44_100,), (2, 6), 0.06),
    "mpegts, mp2": ("mp2", "mpegts", (48_000,), (2,), 0.06),
    "amr": ("libopencore_amrnb", "amr", (8000,), (1,), 0.06),
}


@pytest.mark.parametrize(
    ("form", "rate", "channels"),
    [(form, rate, channels) for form, (_, _, rates, counts, _) in FORMS.items() for rate in rates for channels in counts],
)
def test_a_tone_keeps_its_pitch_loudness_and_length(form, rate, channels):
    codec, container, _, _, tolerance = FORMS[form]
    audio = heard(encode(on_channels(channels, rate=rate), codec, container, rate=rate))
    assert audio.rate == RATE
    assert (audio.samples.dtype, audio.samples.ndim) == (np.float32, 1)
    assert audio.seconds == pytest.approx(1.0, abs=tolerance)
    assert frequency(audio.samples) == pytest.approx(440, abs=2)
    middle = audio.samples[4000:12_000]
    assert np.sqrt(2 * np.mean(middle**2)) == pytest.approx(0.5, abs=0.09)  # AAC keeps little of a tone in 5.1's low channel


@pytest.mark.parametrize("codec", ["pcm_s16le", "pcm_s24le", "pcm_f32le", "pcm_f64le"])
def test_pcm_at_the_engines_rate_is_left_sample_for_sample(codec):
    sent = np.random.default_rng(1).uniform(-0.99, 0.99, 40_000).astype(np.float32)
    np.testing.assert_allclose(heard(encode(sent, codec, "wav")).samples, sent, rtol=0, atol=1 / 32768)


def test_16_bit_samples_are_their_number_over_32768():
    numbers = np.arange(-32768, 32768, dtype="<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(numbers.tobytes())
    np.testing.assert_array_equal(heard(buffer.getvalue()).samples, numbers / np.float32(32768))


@pytest.mark.parametrize(("channels", "speaker"), [(n, speaker) for n in (2, 6, 8) for speaker in range(n)])
@pytest.mark.parametrize(("codec", "rate"), [("pcm_s16le", 16_000), ("flac", 44_100)])
def test_whichever_channel_alone_speaks_it_is_heard_as_the_mean_of_all(channels, speaker, codec, rate):
    container = "wav" if codec == "pcm_s16le" else "flac"
    audio = heard(encode(on_channels(channels, rate=rate, only=speaker), codec, container, rate=rate))
    middle = audio.samples[4000:12_000]
    assert frequency(audio.samples) == pytest.approx(440, abs=2)
    assert np.sqrt(2 * np.mean(middle**2)) == pytest.approx(0.5 / channels, rel=0.01)


@pytest.mark.parametrize("channels", [2, 3, 7, 9, 16, 64])
def test_channels_are_averaged_however_many_they_are(channels):
    sent = np.random.default_rng(channels).uniform(-1, 1, (RATE, channels))
    mean = (sent * 32767).astype("<i2").mean(axis=1) / 32768
    audio = heard(speech.wav(sent, channels=channels))
    np.testing.assert_allclose(audio.samples, mean, rtol=0, atol=1e-6)


def test_frames_that_crash_pyav_when_taken_as_they_are_do_not_crash_us():
    # PyAV 18.1: eight planes are read as more (AudioFrame.planes); a list of named channels is freed twice (AudioLayout).
    # In a process of its own, since a failure takes the process with it.
    files = [
        encode(on_channels(8), "aac", "mp4"),
        speech.wav(on_channels(8), channels=8),
        caf([2, 1], on_channels(2)),  # right, left
        caf([3, 1, 1], on_channels(3)),
    ]
    code = "import sys; from tests.test_decode import heard; print([heard(bytes.fromhex(x)).seconds for x in sys.stdin])"
    child = subprocess.run(
        [sys.executable, "-c", code],
        input="\n".join(file.hex() for file in files * 5),
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.strip() == str([1.024, 1.0, 1.0, 1.0] * 5)


@pytest.mark.parametrize("name", ["talk.txt", "talk.m3u8", "talk.mp3", "", None, 7])
def test_a_files_name_does_not_matter(name):
    file = io.BytesIO(encode(speech.tone(1), "flac", "flac"))
    file.name = name
    assert decode(file, rate=RATE, max_seconds=60).seconds == 1


@pytest.mark.parametrize("rate", [8000, 24_000])
def test_the_result_has_the_rate_that_was_asked_for(rate):
    audio = decode(encode(speech.tone(1, rate=44_100), "flac", "flac", rate=44_100), rate=rate, max_seconds=60)
    assert (audio.rate, len(audio.samples)) == (rate, rate)


def test_speech_is_heard_the_same_whatever_carries_it():
    clip = speech.beckett().audio.samples
    for codec, container in (("flac", "flac"), ("libmp3lame", "mp3"), ("libopus", "webm"), ("aac", "mp4")):
        samples = heard(encode(clip, codec, container)).samples[: len(clip)]
        assert np.corrcoef(samples, clip[: len(samples)])[0, 1] > 0.95, codec


# --- sound beside other things --------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts", "mov", "avi"])
def test_sound_is_heard_beside_a_video_track(container):
    audio = heard(encode_with_video(container, "mpeg4", speech.tone(1)))
    assert audio.seconds == pytest.approx(1, abs=0.1)  # some of these do not say where the sound's padding begins and ends
    assert frequency(audio.samples) == pytest.approx(440, abs=2)


def test_sound_is_heard_beside_an_attached_picture():
    data = with_id3_picture(encode(speech.tone(1), "libmp3lame", "mp3"))
    with av.open(io.BytesIO(data)) as container:
        assert [stream.type for stream in container.streams] == ["audio", "video"]
    assert frequency(heard(data).samples) == pytest.approx(440, abs=2)


def test_a_track_without_a_decoder_is_passed_over():
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        streams = [_audio_stream(output, codec, 48_000, "mono") for codec in ("libopus", "flac")]
        for stream, pitch in zip(streams, (440, 880), strict=True):
            _mux(output, stream, speech.tone(1, frequency=pitch, rate=48_000))
    data = buffer.getvalue()
    assert frequency(heard(data).samples) == pytest.approx(440, abs=2)
    assert frequency(heard(data.replace(b"A_OPUS", b"A_XPUS")).samples) == pytest.approx(880, abs=2)
    with pytest.raises(AudioError):
        heard(data.replace(b"A_OPUS", b"A_XPUS").replace(b"A_FLAC", b"A_XLAC"))


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFFFFF])
def test_a_wav_file_that_was_streamed_and_does_not_know_its_size_is_heard_whole(size):
    data = bytearray(speech.wav(speech.tone(2)))
    data[4:8] = data[40:44] = struct.pack("<I", size)
    assert heard(bytes(data)).seconds == 2


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "container"), [("libmp3lame", "mp3"), ("aac", "adts"), ("libopus", "ogg"), ("libopus", "webm"), ("flac", "flac")]
)
@pytest.mark.parametrize("damage", ["cut", "300 bytes", "30 bytes"])
def test_a_damaged_file_keeps_most_of_its_sound(codec, container, damage):
    data = bytearray(encode(speech.tone(30), codec, container))
    if damage == "cut":
        del data[len(data) * 6 // 10 :]
    else:
        start, length = len(data) // 2, int(damage.split()[0])
        data[start : start + length] = random.Random(1).randbytes(length)
    audio = heard(bytes(data))
    # A WebM player goes on at the next cluster: five seconds.
    assert (16 if damage == "cut" else 24) < audio.seconds < (20 if damage == "cut" else 30.2)
    assert frequency(audio.samples[:RATE]) == pytest.approx(440, abs=2)
    assert frequency(audio.samples[-RATE:]) == pytest.approx(440, abs=2)


@pytest.mark.parametrize("rate", [16_000, 44_100])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30, -3e38])
def test_no_number_comes_out_that_is_not_between_minus_one_and_one(bad, rate):
    sent = speech.tone(2, rate=rate)
    sent[rate // 2 :: 7919] = bad
    audio = heard(ieee_float_wav(sent, rate))
    assert audio.seconds == pytest.approx(2, abs=1e-4)
    assert np.isfinite(audio.samples).all()
    assert np.abs(audio.samples).max() <= 1
    assert frequency(audio.samples[: RATE // 2 - 200]) == pytest.approx(440, abs=2)


@pytest.mark.parametrize("stamp", [0, 0x7FFF])
def test_wrong_time_stamps_neither_invent_nor_drop_sound(stamp):
    data = bytearray(encode(speech.tone(12), "libopus", "webm"))
    second = data.rindex(b"\x1f\x43\xb6\x75")  # a cluster; its time stamp comes first, in milliseconds: E7 82 and two bytes
    at = data.index(b"\xe7\x82", second) + 2
    assert at < second + 20
    data[at : at + 2] = stamp.to_bytes(2, "big")
    assert heard(bytes(data)).seconds == 12


@pytest.mark.parametrize(
    ("codec", "container", "first", "second"),
    [
        ("libmp3lame", "mp3", (44_100, 1), (24_000, 1)),
        ("libmp3lame", "mp3", (16_000, 1), (48_000, 2)),
        ("aac", "adts", (48_000, 2), (16_000, 1)),
        ("flac", "ogg", (48_000, 1), (16_000, 2)),
        ("libopus", "ogg", (48_000, 2), (48_000, 2)),  # of the same form: FFmpeg plays no other second half in Ogg Opus
    ],
)
def test_a_file_whose_form_changes_in_its_middle_keeps_the_sound_of_both_halves(codec, container, first, second):
    halves = []
    for pitch, (rate, channels) in ((440, first), (880, second)):
        tone = np.repeat(speech.tone(2, frequency=pitch, rate=rate)[:, None], channels, axis=1)
        halves.append(encode(tone, codec, container, rate=rate))
    audio = heard(b"".join(halves))
    assert audio.seconds == pytest.approx(4, abs=0.3)
    assert frequency(audio.samples[: 3 * RATE // 2]) == pytest.approx(440, abs=2)
    assert frequency(audio.samples[-3 * RATE // 2 :]) == pytest.approx(880, abs=2)


@pytest.mark.parametrize("form", FORMS)
def test_damage_gives_sound_or_an_audio_error_and_nothing_else(form):
    codec, container, rates, counts, _ = FORMS[form]
    whole = encode(on_channels(counts[-1], rate=rates[-1], seconds=0.4), codec, container, rate=rates[-1])
    for seed in range(20):
        numbers, data = random.Random(f"{form} {seed}"), bytearray(whole)
        for _ in range(numbers.choice([1, 4, 16])):  # half of the files are hurt in their headers
            data[numbers.randrange(min(len(data), 400) if seed % 2 else len(data))] = numbers.choice([0, 127, 128, 255])
        try:
            audio = heard(bytes(data))
        except AudioError as error:
            assert error.param == "file"  # noqa: PT017 - either outcome is right
        else:
            assert np.isfinite(audio.samples).all()


# --- refusals -------------------------------------------------------------------------------------------------------


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("talk.wav", speech.wav(speech.tone(1)))
    return buffer.getvalue()


def _raw_speech(skip: int) -> bytes:
    with wave.open(str(speech.beckett().path)) as file:
        return file.readframes(file.getnframes())[skip:]


def _webm_header() -> bytes:
    data = encode(speech.tone(1), "libopus", "webm")
    return data[: data.index(b"\x1f\x43\xb6\x75")]  # where the first cluster begins


NOT_SOUND = {
    "no bytes": lambda: b"",
    "one byte": lambda: b"R",
    "text": lambda: b"Ever tried. Ever failed. " * 200,
    "zeros": lambda: bytes(20_000),
    "a zip archive with sound in it": _zip,
    "a PNG": png,
    "headerless 16 bit samples of speech": lambda: _raw_speech(0),
    "headerless samples from the middle of speech": lambda: _raw_speech(100_000),
    "the header of a WAV file": lambda: speech.wav(np.zeros(0)),
    "half the header of a WAV file": lambda: speech.wav(speech.tone(1))[:30],
    "the header of a WebM file": _webm_header,
    "an MP4 file cut before its index": lambda: encode(speech.tone(1), "aac", "mp4")[:5000],
    "video without sound": lambda: encode_with_video("mp4", "mpeg4", None),
    "half an hour in 1,800 samples": lambda: speech.wav(speech.tone(1)[:1800], rate=1),
    "a WAV file with more channels than FFmpeg mixes": lambda: speech.wav(on_channels(65), channels=65),
}


@pytest.mark.parametrize("what", NOT_SOUND)
def test_what_is_not_sound_is_refused(what):
    with pytest.raises(AudioError) as refusal:
        heard(NOT_SOUND[what]())
    assert refusal.value.param == "file"


@pytest.mark.parametrize("size", [500, 20_000])
@pytest.mark.parametrize("seed", range(50))
def test_random_bytes_are_refused(seed, size):
    with pytest.raises(AudioError, match="Invalid file format"):
        heard(random.Random(seed).randbytes(size))


@pytest.mark.parametrize(("samples", "short"), [(800, True), (1599, True), (1600, False)])
def test_less_than_a_tenth_of_a_second_is_refused(samples, short):
    data = speech.wav(speech.tone(1)[:samples])
    if short:
        with pytest.raises(AudioError, match="too short") as refusal:
            heard(data)
        assert (refusal.value.param, refusal.value.code) == ("file", "audio_too_short")
    else:
        assert len(heard(data).samples) == samples


@pytest.mark.parametrize(("samples", "long"), [(32_000, False), (32_001, True)])
def test_more_than_the_longest_audio_is_refused(samples, long):
    data = speech.wav(speech.tone(3)[:samples])
    if long:
        with pytest.raises(AudioError, match="longer than 2 seconds") as refusal:
            decode(data, rate=RATE, max_seconds=2)
        assert refusal.value.param == "file"
    else:
        assert len(decode(data, rate=RATE, max_seconds=2).samples) == samples


@pytest.mark.parametrize(("codec", "container"), [("aac", "adts"), ("libmp3lame", "mp3"), ("libopus", "ogg"), ("flac", "flac")])
def test_hours_of_silence_are_decoded_no_further_than_the_limit(codec, container, monkeypatch):
    if container == "flac":
        data = encode(np.zeros(1800 * 8000, np.float32), codec, container, rate=8000)
    else:  # a second or a minute of them, many times over
        data = encode(np.zeros(60 * 48_000, np.float32), codec, container, rate=48_000) * 20
    frames = 0
    resample = av.AudioResampler.resample

    class Counting:
        def __init__(self, *args: object, **kwargs: object) -> None:
            self._resampler = av_resampler(*args, **kwargs)

        def resample(self, frame: av.AudioFrame | None) -> list[av.AudioFrame]:
            nonlocal frames
            frames += 1
            return resample(self._resampler, frame)

    av_resampler = av.AudioResampler
    monkeypatch.setattr(av, "AudioResampler", Counting)
    with pytest.raises(AudioError, match="longer than 10 seconds"):
        decode(data, rate=RATE, max_seconds=10)
    assert frames < 2000  # the whole has more than 3,000


@pytest.fixture
def server() -> Iterator[tuple[str, list[object]]]:
    """A loopback server that hangs up on everyone, and who called it."""
    callers: list[object] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, address = listener.accept()
                except OSError:
                    return
                callers.append(address)
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", callers
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


PLAYLISTS = {
    "m3u8": "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{}\n#EXT-X-ENDLIST\n",
    "m3u8 of m3u8s": "#EXTM3U\n#EXT-X-STREAM-INF:BANDWIDTH=64000\n{}\n",
    "m3u": "#EXTM3U\n#EXTINF:10,talk\n{}\n",
    "ffconcat": "ffconcat version 1.0\nfile '{}'\n",
    "concat": "file '{}'\n",
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=talk\nc=IN IP4 127.0.0.1\na=control:{}\nm=audio 5004 RTP/AVP 0\n",
    "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" mediaPresentationDuration="PT10S">'
    '<Period><AdaptationSet mimeType="audio/mp4"><Representation id="1" bandwidth="64000"><BaseURL>{}</BaseURL>'
    '<SegmentBase indexRange="0-100"/></Representation></AdaptationSet></Period></MPD>',
    "pls": "[playlist]\nNumberOfEntries=1\nFile1={}\n",
}


@pytest.mark.parametrize("kind", PLAYLISTS)
@pytest.mark.parametrize("named", ["talk.bin", "talk.m3u8", None])
def test_a_playlist_is_refused_and_opens_neither_addresses_nor_files(kind, named, server, tmp_path):
    url, callers = server
    local = tmp_path / "talk.wav"
    local.write_bytes(speech.wav(speech.tone(1)))
    for target in (f"{url}/talk.wav", str(local), f"file:{local}"):
        file = io.BytesIO(PLAYLISTS[kind].format(target).encode())
        file.name = named
        with pytest.raises(AudioError) as refusal:
            decode(file, rate=RATE, max_seconds=60)
        assert refusal.value.param == "file"
    assert callers == []
