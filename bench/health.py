"""Watches the client itself: a load generator that does not keep up measures itself."""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from bench.record import Record
from bench.results import ClientHealth
from bench.statistics import percentile

TICK_SECONDS = 0.05
MOST_CPU_SHARE = 0.9
MOST_LATE_MS = 100.0  # p99: a whole packet


class Watch:
    """Measures, while entered, the CPU time of the event loop's thread, and how late the loop is."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self.wall_seconds = self.cpu_seconds = 0.0

    async def __aenter__(self) -> Self:
        self._began, self._cpu = time.monotonic(), time.thread_time()
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ticking.cancel()
        self.wall_seconds += time.monotonic() - self._began
        self.cpu_seconds += time.thread_time() - self._cpu

    async def _tick(self) -> None:
        while True:
            due = time.monotonic() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self._lags.append(time.monotonic() - due)

    def health(self, records: Sequence[Record]) -> ClientHealth:
        """Say whether the client kept up."""
        share = self.cpu_seconds / self.wall_seconds if self.wall_seconds else 0.0
        lag = percentile(self._lags, 0.99)
        late = percentile([seconds for record in records for seconds in record.late], 0.99)
        why = []
        if share > MOST_CPU_SHARE:
            why.append(f"the client used {share:.0%} of a core")
        if late is not None and late * 1000 > MOST_LATE_MS:
            why.append(f"packets were sent up to {late * 1000:.0f} ms late (p99)")
        return ClientHealth(
            cpu_share=round(share, 4),
            loop_lag_ms_p99=None if lag is None else round(lag * 1000, 3),
            send_late_ms_p99=None if late is None else round(late * 1000, 3),
            valid=not why,
            why=" and ".join(why),
        )
