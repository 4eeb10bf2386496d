"""How much load keeps a service level: a ramp, a bisection, and a longer run at the answer. Pure.

search = Search(slos)
while (trial := search.next()) is not None:
    search.tell(trial, outcome of that many requests in flight)
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.metrics import BY_NAME
from bench.record import Record
from bench.results import SloAnswer
from bench.statistics import Judgement, judge, needed_n, percentile

_TERM = re.compile(r"(?P<metric>[a-z_]+)_p(?P<percent>\d{1,2}(?:\.\d+)?)\s*(?:<=|=|<)\s*(?P<limit>\d+(?:\.\d+)?)(?:ms)?")


@dataclass(frozen=True, slots=True)
class Slo:
    """A limit of a percentile. A request that failed, or never had the value, is over every limit.

    Attributes:
        metric: name of a metric.
        q: the quantile, 0 to 1.
        limit: in the metric's unit.

    """

    metric: str
    q: float
    limit: float

    @property
    def name(self) -> str:
        """As it is written in `--slo`."""
        return f"{self.metric}_p{self.q * 100:g}"

    def __str__(self) -> str:
        return f"{self.name}={self.limit:g}"

    def values(self, records: Sequence[Record]) -> list[float]:
        """Return the metric of each request; what did not succeed is infinite."""
        found = ((BY_NAME[self.metric].of(record) if record.ok else None) for record in records)
        return [float("inf") if value is None else value for value in found]


def parse_slos(text: str, workload: str) -> tuple[Slo, ...]:
    """Read `first_text_p95=1000,final_p95=1500`.

    Raises:
        ValueError: naming what is wrong.

    """
    slos = []
    for term in filter(None, (part.strip() for part in text.split(","))):
        match = _TERM.fullmatch(term)
        known = [name for name, metric in BY_NAME.items() if workload in metric.workloads]
        if match is None:
            raise ValueError(f"{term!r} is no limit; write it as final_p95=1500")
        if match["metric"] not in known:
            raise ValueError(f"{match['metric']!r} is no metric of the workload {workload}; it has {', '.join(known)}")
        if not 0 < float(match["percent"]) < 100:
            raise ValueError(f"{term!r}: a percentile lies between 0 and 100")
        slos.append(Slo(match["metric"], float(match["percent"]) / 100, float(match["limit"])))
    if not slos:
        raise ValueError("there is no limit in it; write one as final_p95=1500")
    return tuple(slos)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a level of load did to the limits.

    Attributes:
        judgements: of each limit, by name, with 95% confidence.
        holds: whether the percentiles as they stand keep all limits.
        binding: the limit that is exceeded most, as a ratio; or the one nearest to it.
        needs_n: about how many requests would decide those that are open.

    """

    judgements: dict[str, Judgement]
    holds: bool
    binding: str
    needs_n: int | None


def assess(slos: Sequence[Slo], records: Sequence[Record]) -> Outcome:
    """Hold a level's requests against the limits."""
    judgements: dict[str, Judgement] = {}
    ratios: dict[str, float] = {}
    needs: list[int | None] = []
    for slo in slos:
        values = slo.values(records)
        over = sum(value > slo.limit for value in values)
        judgements[slo.name] = judge(len(values), over, slo.q)
        ratios[slo.name] = _percentile_with_failures(values, slo.q) / slo.limit if slo.limit else float("inf")
        if judgements[slo.name] == "open":
            needs.append(needed_n(len(values), over, slo.q))
    return Outcome(
        judgements,
        holds=all(ratio <= 1 for ratio in ratios.values()),
        binding=max(ratios, key=lambda name: ratios[name]),
        needs_n=None if not needs or None in needs else max(n for n in needs if n is not None),
    )


def _percentile_with_failures(values: list[float], q: float) -> float:
    """Return the q-quantile; infinite where a failure takes part in it."""
    if not values:
        return float("inf")
    big = 1e300
    found = percentile([min(value, big) for value in values], q)
    assert found is not None
    return float("inf") if found > big / 1e6 else found


@dataclass(frozen=True, slots=True)
class Trial:
    """A level of load to measure; a sustained one with more requests."""

    load: int
    sustained: bool = False


@dataclass
class Search:
    """Finds the highest concurrency that keeps the limits: doubles it until one fails, halves the gap, then sustains.

    The figures as they stand steer the search; the sustained run must prove them.
    """

    slos: Sequence[Slo]
    start: int = 1
    most: int = 256
    _outcomes: dict[int, Outcome] = field(default_factory=dict)
    _sustained: dict[int, Outcome] = field(default_factory=dict)

    def next(self) -> Trial | None:
        """Return what to measure next; None when the answer is known."""
        passing, failing = self._passing(), self._failing()
        if passing is None:
            if failing is None:
                return Trial(min(self.start, self.most))
            return Trial(failing // 2) if failing > 1 else None
        if failing is None and passing < self.most:
            return Trial(min(passing * 2, self.most))
        if failing is not None and failing - passing > 1:
            return Trial((passing + failing) // 2)
        return None if passing in self._sustained else Trial(passing, sustained=True)

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        """Take what a trial showed."""
        (self._sustained if trial.sustained else self._outcomes)[trial.load] = outcome

    def _failing(self) -> int | None:
        return min((load for load in self._outcomes if not self._holds(load)), default=None)

    def _passing(self) -> int | None:
        failing = self._failing()
        return max((load for load in self._outcomes if self._holds(load) and (failing is None or load < failing)), default=None)

    def _holds(self, load: int) -> bool:
        return self._sustained.get(load, self._outcomes[load]).holds

    def answer(self) -> SloAnswer:
        """Say what was found."""
        passing, failing = self._passing(), self._failing()
        failed = None if failing is None else self._sustained.get(failing, self._outcomes[failing])
        proof = None if passing is None else self._sustained.get(passing)
        conclusive = proof is not None and all(j == "holds" for j in proof.judgements.values())
        hopeless = passing is None and failed is not None and "fails" in failed.judgements.values()
        needs = None if conclusive else (proof.needs_n if proof else failed.needs_n if failed else None)
        return SloAnswer(
            slo=",".join(map(str, self.slos)),
            last_passing=passing,
            first_failing=failing,
            binding=failed.binding if failed else None,
            conclusive=conclusive or hopeless,
            needs_n=needs,
            words=self._words(failed, conclusive=conclusive or hopeless, needs=needs),
        )

    def _words(self, failed: Outcome | None, *, conclusive: bool, needs: int | None) -> str:
        passing, failing = self._passing(), self._failing()
        limits = " and ".join(f"{slo.name} <= {slo.limit:g} {BY_NAME[slo.metric].unit}".strip() for slo in self.slos)
        said = (
            f"Not even {failing} at once keeps {limits}"
            if passing is None
            else f"{passing} at once keep{'s' * (passing == 1)} {limits}"
        )
        if passing is not None and failing is None:
            said += f"; more than {self.most} were not tried"
        elif failing is not None and failed is not None:
            said += f"; {failing} fail by {failed.binding}"
        if conclusive:
            return said + "."
        need = f"needs N={needs}" if needs else "needs more requests than are sensible: it lies too close to the limit"
        return f"Inconclusive, {need}. As the figures stand: {said[0].lower()}{said[1:]}."
