"""A file that is read while it still arrives: one side writes, in an event loop, and another reads, in a worker thread.

It lies in memory while it is small, then on disk. A read beyond what has come waits for it. What may be decoded from front to
back says that it cannot seek, or FFmpeg would look at its end first; formats that need to look elsewhere may, and wait.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from tempfile import SpooledTemporaryFile

from app.errors import UploadBrokenError

MEMORY_BYTES = 1 << 20
HEAD_BYTES = 256  # enough to tell a format
# WAV, RF64, FLAC, Ogg, Matroska and WebM, MP3 with a tag.
_FRONT_TO_BACK = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"\x1aE\xdf\xa3", b"ID3")


class _Arriving:
    """Bytes that one side still writes while another waits for them.

    Args:
        idle: held while a read waits.

    """

    def __init__(self, idle: Callable[[], AbstractContextManager[None]]) -> None:
        self._idle = idle
        self._changed = threading.Condition()
        self._position = 0
        self._error: Exception | None = None
        self.complete = False
        self.waited = 0.0  # seconds, by reads

    def finish(self) -> None:
        """Say that all has come."""
        with self._changed:
            self.complete = True
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Say that no more will come; reads raise `error` from now on."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def tell(self) -> int:
        """Return how far was read."""
        return self._position

    def _wait_until(self, is_enough: Callable[[], bool]) -> None:
        """Wait until enough has come, or all, or it has failed; then raise what it failed with."""

        def is_settled() -> bool:
            return self._error is not None or self.complete or is_enough()

        with self._changed:
            waits = not is_settled()
        if waits:
            began = time.monotonic()
            with self._idle(), self._changed:
                self._changed.wait_for(is_settled)
            self.waited += time.monotonic() - began
        if self._error is not None:
            raise self._error


class ArrivingFile(_Arriving):
    """A binary file for `app.audio.decode.AudioReader`, and for whoever receives its bytes.

    Args:
        idle: held while a read waits for bytes.

    """

    def __init__(self, *, idle: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        super().__init__(idle)
        self._spool = SpooledTemporaryFile(max_size=MEMORY_BYTES)  # noqa: SIM115 - closed by `close`
        self._interrupted = False
        self.size = 0

    # --- the writer's side --------------------------------------------------------------------------------------------

    @property
    def on_disk(self) -> bool:
        """Whether a write may have to wait for the disk."""
        return self.size > MEMORY_BYTES

    def write(self, data: bytes) -> None:
        """Add bytes at the end."""
        with self._changed:
            self._spool.seek(self.size)
            self._spool.write(data)
            self.size += len(data)
            self._changed.notify_all()

    def close(self) -> None:
        """Free the memory or the disk. Nothing may read any more."""
        self._spool.close()

    # --- the reader's side --------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Make a read that waits, and every one after it, raise UploadBrokenError, until the file is rewound."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def rewind(self) -> None:
        """Go back to the beginning, for another reader."""
        with self._changed:
            self._position, self._interrupted = 0, False

    def read(self, size: int, /) -> bytes:
        """Return bytes from the position on, up to `size`; wait for the first of them. None at all mean the end.

        Raises:
            UploadBrokenError: see `interrupt`.
            Exception: what `fail` was told.

        """
        self._wait_for(self._position + 1)
        with self._changed:
            self._spool.seek(self._position)
            data = self._spool.read(max(0, min(size, self.size - self._position)))
            self._position += len(data)
            return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move the position, as for any file; from the end, once that is known."""
        if whence == 2:
            self._wait_for(None)
        base = (0, self._position, self.size)[whence]
        self._position = max(0, base + offset)
        return self._position

    def seekable(self) -> bool:
        """Whether FFmpeg should look around in the file."""
        self._wait_for(HEAD_BYTES)
        with self._changed:
            self._spool.seek(0)
            return self.complete or not _is_front_to_back(self._spool.read(HEAD_BYTES))

    def _wait_for(self, size: int | None) -> None:
        """Wait until so many bytes have come, or all."""
        self._wait_until(lambda: self._interrupted or (size is not None and self.size >= size))
        if self._interrupted:
            raise UploadBrokenError


def _is_front_to_back(head: bytes) -> bool:
    """Say whether a file that begins so can be decoded as it comes; MP4 can if its index stands before its sound."""
    if head[4:8] == b"ftyp":
        next_box = int.from_bytes(head[:4], "big")
        return head[next_box + 4 : next_box + 8] == b"moov"
    return head.startswith(_FRONT_TO_BACK)


class ArrivingStream(_Arriving):
    """Bytes that are read once, from front to back, while they arrive. Who writes them waits for room first.

    Args:
        idle: held while a read waits for bytes.
        capacity: how many bytes may wait to be read.

    """

    def __init__(self, *, idle: Callable[[], AbstractContextManager[None]] = nullcontext, capacity: int = 64 * 1024) -> None:
        super().__init__(idle)
        self._capacity = capacity
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Event()
        self._room.set()
        self._waiting = bytearray()

    @property
    def has_room(self) -> bool:
        """Whether there are few enough bytes."""
        return self._room.is_set()

    async def wait_for_room(self) -> None:
        """Wait while there are too many bytes."""
        await self._room.wait()

    def write(self, data: bytes) -> None:
        """Add bytes at the end."""
        with self._changed:
            self._waiting += data
            if len(self._waiting) > self._capacity:
                self._room.clear()
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Say that no more will come; reads raise `error` from now on."""
        super().fail(error)
        self._room.set()

    def interrupt(self) -> None:
        """Make a read that waits raise UploadBrokenError."""
        self.fail(UploadBrokenError())

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; wait for the first of them. None at all mean the end.

        Raises:
            Exception: what `fail` was told.

        """
        self._wait_until(lambda: bool(self._waiting))
        with self._changed:
            data = bytes(self._waiting[:size])
            del self._waiting[:size]
            self._position += len(data)
            if len(self._waiting) <= self._capacity and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._room.set)
        return data

    def seek(self, _offset: int, _whence: int = 0, /) -> int:
        """Refuse: what was read is gone."""
        raise OSError("a stream cannot seek")

    def seekable(self) -> bool:
        """Say no."""
        return False
