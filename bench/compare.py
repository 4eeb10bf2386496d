"""Two results side by side, as ratios with intervals. Pure but for `load_run`.

The intervals are percentile bootstraps (B. Efron and R. J. Tibshirani, An Introduction to the Bootstrap, chapter 13) over the
requests of both sides, with a fixed seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.metrics import BY_NAME
from bench.record import Record, read_rows
from bench.results import Result, load_result

RESAMPLES = 2000
UNMATCHED = 0.10  # difference of the partials' counts, past which live latencies do not compare

Run = tuple[Result, Sequence[Record]]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of both sides, and A by B.

    Attributes:
        what: the figure's name.
        load: the level.
        a, b: its values; None where there is none.
        ratio: a / b.
        low, high: hold the true ratio between them with 95% confidence, if each side's requests are independent.
        better: whether a smaller ratio is better for A.

    """

    what: str
    load: float
    a: float | None
    b: float | None
    ratio: float | None
    low: float | None
    high: float | None
    better: str


def load_run(path: Path) -> Run:
    """Read a result and the rows beside it.

    Raises:
        ValueError: if either is none.
        OSError: if either cannot be read.

    """
    return load_result(path), read_rows(path.with_suffix(".jsonl"))


def compare(a: Run, b: Run) -> list[Ratio]:
    """Compare the levels that both have.

    Raises:
        ValueError: if the workloads differ, or no level is common.

    """
    (result_a, rows_a), (result_b, rows_b) = a, b
    if (result_a.workload, result_a.load_kind) != (result_b.workload, result_b.load_kind):
        raise ValueError(f"a {result_a.workload} run does not compare with a {result_b.workload} run")
    loads = [level.load for level in result_a.levels if any(level.load == other.load for other in result_b.levels)]
    if not loads:
        raise ValueError("the two have no level in common")
    ratios: list[Ratio] = []
    for load in loads:
        side_a = [record for record in rows_a if record.level == load and record.ok]
        side_b = [record for record in rows_b if record.level == load and record.ok]
        for metric in BY_NAME.values():
            if result_a.workload not in metric.workloads or metric.name in ("partials", "flicker"):
                continue
            values = _values(metric.of, side_a), _values(metric.of, side_b)
            ratios.extend(_ratio(f"{metric.name} p{q:g}", load, *values, q) for q in (50, 95))
        if result_a.workload != "live" and result_a.load_kind == "closed":
            ratios.append(_throughput(load, side_a, side_b))
    return ratios


def unmatched(a: Result, b: Result) -> list[str]:
    """Say at which levels of a live run the sides' work differs so much that their latencies do not compare."""
    words = []
    for level in a.levels:
        other = next((found for found in b.levels if found.load == level.load), None)
        if other is None or "partials" not in level.metrics:
            continue
        ours, theirs = level.metrics["partials"].mean, other.metrics["partials"].mean
        if ours is None or theirs is None or not max(ours, theirs):
            continue
        if abs(ours - theirs) / max(ours, theirs) > UNMATCHED:
            words.append(f"At {level.load:g} the partials differ ({ours:.1f} and {theirs:.1f} a session): not the same work.")
    return words


def _values(of: Callable[[Record], float | None], records: Sequence[Record]) -> Values:
    return np.array([value for record in records if (value := of(record)) is not None], dtype=np.float64)


def _ratio(what: str, load: float, a: Values, b: Values, q: float) -> Ratio:
    if not len(a) or not len(b):
        return Ratio(what, load, None, None, None, None, None, "less")
    value_a, value_b = float(np.percentile(a, q)), float(np.percentile(b, q))
    draws = np.random.default_rng(0)
    drawn_a = np.percentile(a[draws.integers(0, len(a), (RESAMPLES, len(a)))], q, axis=1)
    drawn_b = np.percentile(b[draws.integers(0, len(b), (RESAMPLES, len(b)))], q, axis=1)
    return _with_interval(what, load, "less", (value_a, drawn_a), (value_b, drawn_b))


def _throughput(load: float, a: Sequence[Record], b: Sequence[Record]) -> Ratio:
    """Compare seconds of audio by second of a request: with as many requests at once, the ratio of RTFx."""
    what = "audio s / request s"
    if not a or not b:
        return Ratio(what, load, None, None, None, None, None, "more")
    draws = np.random.default_rng(0)
    sides = []
    for side in (a, b):
        audio = np.array([record.audio_seconds for record in side])
        took = np.array([(record.ended or 0.0) - record.sent for record in side])
        chosen = draws.integers(0, len(side), (RESAMPLES, len(side)))
        sides.append((float(audio.sum() / took.sum()), audio[chosen].sum(axis=1) / took[chosen].sum(axis=1)))
    return _with_interval(what, load, "more", *sides)


def _with_interval(what: str, load: float, better: str, a: tuple[float, Values], b: tuple[float, Values]) -> Ratio:
    (value_a, drawn_a), (value_b, drawn_b) = a, b
    if not value_b or not drawn_b.all():
        return Ratio(what, load, value_a, value_b, None, None, None, better)
    low, high = np.percentile(drawn_a / drawn_b, (2.5, 97.5))
    return Ratio(what, load, value_a, value_b, value_a / value_b, float(low), float(high), better)
