"""Percentiles, what a sample says about them, and whether it shows that a limit holds. Pure.

Intervals are order statistics' (distribution-free): of n values in order, the number below the true q-quantile is binomial
with n and q. See H. A. David and H. N. Nagaraja, Order Statistics, 3rd edition, section 7.1.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Literal

import numpy as np

CONFIDENCE = 0.95
Judgement = Literal["holds", "fails", "open"]


def percentile(values: Iterable[float | None], q: float) -> float | None:
    """Return the q-quantile, 0 to 1, interpolated linearly between neighbours; None counts for nothing."""
    present = [value for value in values if value is not None]
    return float(np.quantile(present, q)) if present else None


@cache
def _cumulated(n: int, p: float) -> tuple[float, ...]:
    """Return P(B <= k) for k = 0..n, where B is binomial with n and p."""
    log_p, log_not = math.log(p), math.log1p(-p)

    def probability(k: int) -> float:
        ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        return math.exp(ways + k * log_p + (n - k) * log_not)

    return tuple(accumulate(probability(k) for k in range(n + 1)))


@cache
def ranks(n: int, q: float) -> tuple[int, int] | None:
    """Return the ranks (from 1) of the two values that hold the true q-quantile between them; None if n is too small.

    Of all pairs that do with 95% confidence, the closest; of several such, the lowest.
    """
    if n < 2:
        return None
    below = _cumulated(n, q)
    best: tuple[int, int] | None = None
    for low in range(1, n):
        missed = below[low - 1]
        if missed > 1 - CONFIDENCE:
            break
        for high in range(max(low + 1, math.floor(n * q)), n + 1):
            if below[high - 1] - missed >= CONFIDENCE:
                candidate = (high - low, low)
                best = min(best or candidate, candidate)
                break
    return None if best is None else (best[1], best[1] + best[0])


def interval(values: Sequence[float], q: float) -> tuple[float, float] | None:
    """Return the values that hold the true q-quantile between them with 95% confidence; None if there are too few."""
    found = ranks(len(values), q)
    if found is None:
        return None
    ordered = sorted(values)
    return ordered[found[0] - 1], ordered[found[1] - 1]


def least_n(q: float) -> int:
    """Return how many values an interval for the q-quantile needs: 59 for p95, 299 for p99."""
    return next(n for n in range(2, 100_000) if 1 - q**n - (1 - q) ** n >= CONFIDENCE)


def judge(n: int, over: int, q: float) -> Judgement:
    """Say whether a sample shows that the q-quantile keeps a limit, or that it does not, each with 95% confidence.

    Args:
        n: size of the sample.
        over: how many of it are over the limit.
        q: the quantile, 0 to 1.

    """
    if n == 0:
        return "open"
    cumulated = _cumulated(n, 1 - q)
    if cumulated[over] <= 1 - CONFIDENCE:
        return "holds"
    if over and 1 - cumulated[over - 1] <= 1 - CONFIDENCE:
        return "fails"
    return "open"


def needed_n(n: int, over: int, q: float, *, most: int = 5000) -> int | None:
    """Return about how large a sample must be to be judged, if the share over the limit stays what it is; None past `most`."""

    def decides(size: int) -> bool:
        return judge(size, round(over * size / max(n, 1)), q) != "open"

    low, high = 0, max(n, 1)
    while not decides(high):
        low, high = high, 2 * high
        if low >= most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high
