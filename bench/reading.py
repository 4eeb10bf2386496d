"""What a table of levels says, in words. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.metrics import MAIN
from bench.results import Level, Result

LEAST_GAIN = 0.10  # of throughput, below which more load brings nothing
MOST_GROWTH = 0.50  # of the p95, above which it costs too much
STEADY = 0.05  # growth that is none
ALIKE = 0.1  # difference of two growths that is none
MILESTONE = (50, 8)  # requests, at once: the level by which machines are compared


@dataclass(frozen=True, slots=True)
class Reading:
    """Which levels stand out. Each is an index of the levels, None if there is none.

    Attributes:
        sweet_spot: the last level before the knee; without a knee the one of the highest throughput.
        knee: the first whose throughput is under 10% higher than the one before, and whose p95 is over 50% higher.

    """

    sweet_spot: int | None
    knee: int | None
    words: tuple[str, ...]


def read_levels(result: Result) -> list[str]:
    """Return what a result's table says."""
    unit = "a second" if result.load_kind == "open" else "at once"
    return list(read(result.workload, result.levels, unit=unit).words)


def read(workload: str, levels: Sequence[Level], *, unit: str = "at once") -> Reading:
    """Read a table whose levels rise."""
    name = MAIN[workload]
    usable = [i for i, level in enumerate(levels) if level.ok and level.metrics[name].p95 is not None]
    if not usable:
        return Reading(None, None, ("No request succeeded.",))
    first = levels[usable[0]]
    words = [
        f"Baseline: {first.load:g} {unit}: {name} p50 {_ms(first.metrics[name].p50)}, {first.rtfx:.2f} s of audio a second."
    ]
    knee = next((b for a, b in pairwise(usable) if _is_knee(levels[a], levels[b], name)), None)
    sweet = max(usable, key=lambda i: levels[i].rtfx) if knee is None else usable[usable.index(knee) - 1]
    if len(usable) > 1:
        spot = levels[sweet]
        words.append(
            f"Sweet spot: {spot.load:g} {unit}: {name} p95 {_ms(spot.metrics[name].p95)}, {spot.rtfx:.2f} s of audio a second."
        )
        words.append(_knee_words(levels, knee, name, unit))
        words.extend(_binding(first, levels[usable[-1]]))
    for level in levels:
        if (level.sent, level.load) == MILESTONE and unit == "at once":
            words.append(f"p95 at N={level.sent} and {level.load:g} at once: {name} {_ms(level.metrics[name].p95)}.")
        if level.failed:
            kinds = ", ".join(f"{kind} {count}" for kind, count in level.errors.items())
            words.append(f"At {level.load:g} {unit} {level.failed} of {level.sent} failed ({kinds}).")
        if not level.client.valid:
            words.append(f"At {level.load:g} {unit} the figures are not the server's: {level.client.why}.")
    return Reading(sweet, knee, tuple(words))


def _is_knee(before: Level, after: Level, name: str) -> bool:
    p95, next_p95 = before.metrics[name].p95, after.metrics[name].p95
    if p95 is None or next_p95 is None or before.rtfx <= 0:
        return False
    return after.rtfx / before.rtfx < 1 + LEAST_GAIN and next_p95 > p95 * (1 + MOST_GROWTH)


def _knee_words(levels: Sequence[Level], knee: int | None, name: str, unit: str) -> str:
    if knee is None:
        return "Knee: none within these levels."
    level = levels[knee]
    return (
        f"Knee: {level.load:g} {unit}: throughput grows by less than {LEAST_GAIN:.0%} there, and p95 of {name} by more than "
        f"{MOST_GROWTH:.0%}, to {_ms(level.metrics[name].p95)}."
    )


def _binding(first: Level, last: Level) -> list[str]:
    """Say what grows with load: the time to the first text, or that of the tokens after it."""
    if "ttft" not in first.metrics:
        return []
    grown = {name: _growth(first, last, name) for name in ("ttft", "e2e")}
    ttft, e2e = grown["ttft"], grown["e2e"]
    if ttft is None or e2e is None:
        return []
    figures = f"from {first.load:g} to {last.load:g}, TTFT grows {ttft:.1f}x and the whole {e2e:.1f}x"
    if max(ttft, e2e) < 1 + STEADY:
        return [f"Nothing binds yet: {figures}."]
    if abs(ttft / e2e - 1) < ALIKE:
        return [f"Prefill, queueing and decoding grow alike: {figures}."]
    if ttft > e2e:
        return [f"Prefill and queueing bind: {figures}."]
    return [f"Decoding binds: {figures}."]


def _growth(first: Level, last: Level, name: str) -> float | None:
    before, after = first.metrics[name].p50, last.metrics[name].p50
    return None if not before or after is None else after / before


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"
