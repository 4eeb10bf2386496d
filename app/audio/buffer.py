"""The samples of a stream that may still be wanted."""

from collections import deque

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]


class SampleBuffer:
    """Keeps the end of a stream, in the pieces in which it came. Positions count from the stream's beginning."""

    def __init__(self) -> None:
        self._pieces: deque[Samples] = deque()
        self._start = self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    def append(self, samples: Samples) -> None:
        """Add samples at the end."""
        self._pieces.append(samples)
        self._end += len(samples)

    def cut_out(self, start: int, end: int) -> Samples:
        """Return the samples from `start` to `end`, which must be kept."""
        pieces, position = [], self._start
        for piece in self._pieces:
            if position < end and position + len(piece) > start:
                pieces.append(piece[max(0, start - position) : end - position])
            position += len(piece)
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.float32)

    def drop_before(self, position: int) -> None:
        """Let go of the pieces that lie before a position as a whole."""
        while self._pieces and self._start + len(self._pieces[0]) <= position:
            self._start += len(self._pieces.popleft())
