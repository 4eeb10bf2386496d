"""The samples of a stream that may still be wanted."""

import numpy as np
import numpy.typing as npt

LEAST_CAPACITY = 16_000

Samples = npt.NDArray[np.float32]


class SampleBuffer:
    """Keeps the end of a stream in one piece, so that a look at it copies nothing. Positions count from the stream's beginning.

    What is written once is never written again: when the piece is full, a new one takes what is kept, and the views that others
    have of the old one stay as they are.
    """

    def __init__(self) -> None:
        self._piece = np.zeros(0, dtype=np.float32)
        self._first = 0  # the position of the piece's first sample
        self._start = self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    def append(self, samples: Samples) -> None:
        """Add samples at the end."""
        if self._end - self._first + len(samples) > len(self._piece):
            kept = self.cut_out(self._start, self._end)
            self._piece = np.empty(max(LEAST_CAPACITY, 2 * (len(kept) + len(samples))), dtype=np.float32)
            self._piece[: len(kept)] = kept
            self._first = self._start
        at = self._end - self._first
        self._piece[at : at + len(samples)] = samples
        self._end += len(samples)

    def cut_out(self, start: int, end: int) -> Samples:
        """Return a read-only view of the samples from `start` to `end`, which must be kept."""
        view = self._piece[max(start, self._start) - self._first : max(0, min(end, self._end) - self._first)]
        view.flags.writeable = False
        return view

    def drop_before(self, position: int) -> None:
        """Let go of the samples before a position."""
        self._start = min(max(position, self._start), self._end)
        if self._start == self._end:
            self._piece, self._first = self._piece[:0].copy(), self._end
