"""A file that is read while it arrives: the same bytes and the same sound as of a whole one, as early as its format allows."""

import contextlib
import io
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.audio.arriving import MEMORY_BYTES, ArrivingFile
from app.audio.decode import AudioReader
from app.errors import UploadBrokenError
from tests import speech
from tests.gateway import wait_until
from tests.test_probes import CONTAINERS, ffmpeg

# Its sound can be decoded as it comes: all but MP4 whose index stands last.
EARLY = {name: source for name, source in CONTAINERS.items() if name != "m4a with its index last"}
EARLY["mp4 with its index first"] = ("-c:a aac -f mp4 -movflags +faststart", False)
EARLY["flac"] = ("-c:a flac -f flac", False)


class InThread:
    """Runs something that blocks, and keeps what it returned or raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:
            self.error = error

    def join(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.result


def read_all(file: ArrivingFile, size: int = 4096) -> bytes:
    return b"".join(iter(lambda: file.read(size), b""))


@given(st.lists(st.binary(max_size=40), max_size=12), st.lists(st.integers(1, 60), min_size=1, max_size=6))
@settings(max_examples=300)
def test_what_is_read_is_what_was_written_however_it_came(chunks: list[bytes], sizes: list[int]):
    file = ArrivingFile()
    whole = b"".join(chunks)

    def read() -> bytes:
        got, turn = b"", 0
        while piece := file.read(sizes[turn % len(sizes)]):
            got += piece
            turn += 1
        return got

    reading = InThread(read)
    for chunk in chunks:
        file.write(chunk)
    file.finish()
    assert reading.join() == whole
    file.rewind()
    assert read_all(file) == whole
    file.close()


@given(st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.integers(-30, 60), st.integers(1, 20)), max_size=20))
def test_positions_are_those_of_any_file(moves: list[tuple[int, int, int]]):
    data = bytes(range(50))
    ours, theirs = ArrivingFile(), io.BytesIO(data)
    ours.write(data)
    ours.finish()
    for whence, offset, size in moves:
        if (0, theirs.tell(), len(data))[whence] + offset >= 0:
            assert ours.seek(offset, whence) == theirs.seek(offset, whence)
        assert ours.read(size) == theirs.read(size)
        assert ours.tell() == theirs.tell()


def test_beyond_its_share_of_memory_it_lies_on_disk_and_is_the_same():
    data = random.Random(1).randbytes(3 * MEMORY_BYTES)
    file = ArrivingFile()
    for i in range(0, len(data), 100_000):
        file.write(data[i : i + 100_000])
    file.finish()
    assert file.on_disk
    assert read_all(file) == data


def test_a_read_waits_idle_and_is_woken_by_bytes():
    waits = []

    @contextlib.contextmanager
    def idle() -> Iterator[None]:
        waits.append("begun")
        yield
        waits.append("ended")

    file = ArrivingFile(idle=idle)
    reading = InThread(lambda: file.read(10))
    wait_until(lambda: waits == ["begun"])
    file.write(b"abc")
    assert reading.join() == b"abc"
    assert waits == ["begun", "ended"]
    file.write(b"d")
    assert file.read(10) == b"d"
    assert len(waits) == 2


@pytest.mark.parametrize("end", ["interrupt", "fail", "finish"])
def test_a_read_that_waits_ends_with_the_file(end: str):
    file = ArrivingFile()
    file.write(b"abc")
    reading = InThread(lambda: read_all(file))
    if end == "fail":
        file.fail(LookupError("gone"))
    else:
        getattr(file, end)()
    reading.join()
    expected = {"interrupt": UploadBrokenError, "fail": LookupError, "finish": type(None)}[end]
    assert type(reading.error) is expected
    if end == "interrupt":
        file.rewind()
        assert file.read(3) == b"abc"


@pytest.mark.parametrize("name", EARLY)
def test_sound_is_decoded_before_its_file_has_arrived(name: str, tmp_path: Path):
    arguments, pipe = EARLY[name]
    data = ffmpeg(speech.two_cities().path.read_bytes(), arguments, None if pipe else tmp_path / "x")
    whole = speech.decode(data).samples
    file = ArrivingFile()
    file.write(data[: len(data) // 3])
    reader = AudioReader(file, rate=speech.RATE, max_seconds=100)  # returns, though most is missing
    first = reader.read(2 * speech.RATE)
    file.write(data[len(data) // 3 :])
    file.finish()
    got = np.concatenate([first, reader.read(100 * speech.RATE)])
    # LAME's count of the samples that it added at the end is not used, where the end is not known.
    assert abs(len(got) - len(whole)) <= (50 if name == "mp3" else 0)
    assert np.abs(got[: len(whole)] - whole[: len(got)]).max() < 1e-5


def test_what_must_be_whole_is_waited_for(tmp_path: Path):
    data = ffmpeg(speech.beckett().path.read_bytes(), CONTAINERS["m4a with its index last"][0], tmp_path / "x")
    file = ArrivingFile()
    reading = InThread(lambda: AudioReader(file, rate=speech.RATE, max_seconds=100).read(100 * speech.RATE))
    for i in range(0, len(data), 1000):
        file.write(data[i : i + 1000])
        time.sleep(0.0001)
    assert reading.result is None
    file.finish()
    assert np.array_equal(reading.join(), speech.decode(data).samples)


def test_a_failure_of_the_upload_is_not_taken_for_the_end_of_the_sound():
    data = speech.wav(speech.tone(20.0))
    file = ArrivingFile()
    file.write(data[:200_000])
    reader = AudioReader(file, rate=speech.RATE, max_seconds=100)
    file.fail(UploadBrokenError())
    with pytest.raises(UploadBrokenError):
        reader.read(100 * speech.RATE)
