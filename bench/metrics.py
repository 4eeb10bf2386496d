"""What is measured, each with its formula, and the figures of one level of load. Pure."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import jiwer

from bench.record import Record
from bench.results import Distribution, Interval
from bench.statistics import interval, percentile

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of one request.

    Attributes:
        name: as in results and in `--slo`.
        unit: of its values.
        formula: how it is computed, in words.
        workloads: which have it.
        of: its value, None where there is none.

    """

    name: str
    unit: str
    formula: str
    workloads: frozenset[str]
    of: Callable[[Record], float | None]


def _ms(end: float | None, start: float | None) -> float | None:
    return None if end is None or start is None else (end - start) * 1000


def _tpot(record: Record) -> float | None:
    if record.tokens is None or record.tokens < 2:
        return None
    generation = _ms(record.ended, record.first_text)
    return None if generation is None else generation / (record.tokens - 1)


REQUESTS, STREAM, LIVE = frozenset({"file", "stream"}), frozenset({"stream"}), frozenset({"live"})

METRICS = (
    Metric("e2e", "ms", "request sent to answer complete", REQUESTS, lambda r: _ms(r.ended, r.start)),
    Metric("ttft", "ms", "request sent to first non-empty text", STREAM, lambda r: _ms(r.first_text, r.start)),
    Metric(
        "generation", "ms", "first non-empty text to answer complete: e2e - ttft", STREAM, lambda r: _ms(r.ended, r.first_text)
    ),
    Metric("tpot", "ms", "generation / (tokens - 1): time per token without the first", STREAM, _tpot),
    Metric("first_update", "ms", "audio start to first event, even an empty one", LIVE, lambda r: _ms(r.first_update, r.start)),
    Metric(
        "first_text",
        "ms",
        "audio start to first non-blank text; none stays none",
        LIVE,
        lambda r: _ms(r.first_text, r.start),
    ),
    Metric(
        "first_confirmed",
        "ms",
        "audio start to first text that is never taken back",
        LIVE,
        lambda r: _ms(r.first_confirmed, r.start),
    ),
    Metric("final", "ms", "last audio sent to final text (final_after_stop)", LIVE, lambda r: _ms(r.ended, r.stopped)),
    Metric(
        "lag",
        "ms",
        "largest response lag of a session: time since audio start, minus the audio that a partial covers",
        LIVE,
        lambda r: max(r.lags) * 1000 if r.lags else None,
    ),
    Metric("partials", "", "partials of a session", LIVE, lambda r: float(r.partials)),
    Metric(
        "flicker",
        "words",
        "words of a session that were shown as uncertain and then changed",
        LIVE,
        lambda r: float(r.taken_back),
    ),
)
BY_NAME = {metric.name: metric for metric in METRICS}
MAIN = {"file": "e2e", "stream": "e2e", "live": "final"}  # the latency by which levels are compared


def distribution(values: Sequence[float | None]) -> Distribution:
    """Describe values; None counts for nothing but is told by n."""
    present = [value for value in values if value is not None]
    bounds = {name: interval(present, q) for name, q in QUANTILES.items()}
    return Distribution(
        n=len(present),
        mean=fmean(present) if present else None,
        max=max(present, default=None),
        **{name: percentile(present, q) for name, q in QUANTILES.items()},
        intervals={name: None if found is None else Interval(low=found[0], high=found[1]) for name, found in bounds.items()},
    )


def distributions(workload: str, records: Sequence[Record]) -> dict[str, Distribution]:
    """Describe each metric of a workload over the requests that succeeded."""
    succeeded = [record for record in records if record.ok]
    return {m.name: distribution([m.of(r) for r in succeeded]) for m in METRICS if workload in m.workloads}


def stages(records: Sequence[Record]) -> dict[str, Distribution]:
    """Describe what the server says of its own stages, in milliseconds."""
    succeeded = [record for record in records if record.ok]
    names = dict.fromkeys(name for record in succeeded for name in record.server)
    return {name: distribution([record.server.get(name) for record in succeeded]) for name in names}


def errors(records: Sequence[Record]) -> dict[str, int]:
    """Count the failures by kind."""
    return dict(Counter(record.error for record in records if record.error is not None).most_common())


def words(text: str) -> str:
    """Reduce a text to its words, without case and punctuation, as WER compares them."""
    plain = unicodedata.normalize("NFKC", text).lower().replace("’", "'")
    return " ".join(re.findall(r"[^\W_]+(?:'[^\W_]+)*", plain))


def word_error_rate(records: Sequence[Record]) -> float | None:
    """Return the word error rate over all requests that succeeded and whose words are known; None if there are none."""
    pairs = [(words(r.reference), words(r.text)) for r in records if r.ok and r.reference and words(r.reference)]
    return float(jiwer.wer([p[0] for p in pairs], [p[1] for p in pairs])) if pairs else None


def changed_words(before: str, after: str) -> int:
    """Count the words at the end of what was shown that are no longer there."""
    old, new = before.split(), after.split()
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    return len(old) - same
