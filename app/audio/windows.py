"""Cut audio into windows that the engine can take, at the quietest point before each window's end.

Pure. The windows are contiguous: every sample belongs to exactly one, so that nothing is said twice and nothing is lost.
"""

import numpy as np
import numpy.typing as npt

QUIET_SECONDS = 0.1  # the cut falls into the middle of the quietest stretch of this length
SEARCH_SHARE = 1 / 3  # how much of a window's end is searched for it
TAIL_SHARE = 1 / 6  # the last window is no shorter than this: Whisper invents words for scraps


def cut_windows(samples: npt.NDArray[np.float32], *, rate: int, limit: int) -> list[tuple[int, int]]:
    """Return the windows as (first sample, end), each at most `limit` samples long.

    Args:
        samples: mono, shape (n,).
        rate: samples a second.
        limit: the longest window, in samples.

    """
    windows, start = [], 0
    while len(samples) - start > limit:
        latest = min(limit, len(samples) - start - int(limit * TAIL_SHARE))
        earliest = min(int(limit * (1 - SEARCH_SHARE)), latest)
        cut = start + earliest + _quietest(samples[start + earliest : start + latest], int(rate * QUIET_SECONDS))
        windows.append((start, cut))
        start = cut
    windows.append((start, len(samples)))
    return windows


def _quietest(samples: npt.NDArray[np.float32], width: int) -> int:
    """Return the middle of the stretch of `width` samples with the least energy; the latest of equals."""
    if len(samples) <= width:
        return len(samples)
    energy = np.concatenate([[0.0], np.cumsum(samples.astype(np.float64) ** 2)])
    stretches = energy[width:] - energy[:-width]
    return len(stretches) - 1 - int(np.argmin(stretches[::-1])) + width // 2
