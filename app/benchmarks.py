"""Runs of the bench against this gateway, each a process of its own: the load shares no event loop with the server.

One runs at a time. Results lie in a folder, a run each, and outlive the gateway.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.errors import BenchRunningError, UnknownBenchError

logger = logging.getLogger(__name__)

MAX_EVENTS = 2000  # kept of a run; what came before is not told to those who come late
STOP_SECONDS = 5.0
NAME = "result"  # of a run's files
DETAIL = 2000  # characters kept of what a run that fails says

Status = Literal["running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class BenchOrder:
    """What to measure: the flags of `steno bench`."""

    workload: str
    concurrency: tuple[int, ...]
    n: int
    slo: str
    clip_seconds: float
    seed: int

    def arguments(self) -> list[str]:
        """Return them as a command line."""
        words = ["--workload", self.workload, "--n", str(self.n), "--seed", str(self.seed)]
        if self.concurrency:
            words += ["--concurrency", ",".join(map(str, self.concurrency))]
        if self.slo:
            words += ["--slo", self.slo]
        if self.clip_seconds:
            words += ["--clip-seconds", str(self.clip_seconds)]
        return words


@dataclass
class BenchRun:
    """One run. Times are seconds since the epoch."""

    id: str
    order: BenchOrder
    folder: Path
    created: float = field(default_factory=time.time)
    ended: float | None = None
    status: Status = "running"
    detail: str = ""
    exit_status: int | None = None
    events: deque[tuple[int, dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, event: dict[str, Any]) -> None:
        """Add an event for those who follow."""
        number = self.events[-1][0] + 1 if self.events else 0
        self.events.append((number, event))
        self.changed.set()
        self.changed = asyncio.Event()

    def summary(self) -> dict[str, Any]:
        """Describe the run, without its result."""
        return {
            "id": self.id,
            "object": "bench.run",
            "created": int(self.created),
            "ended": None if self.ended is None else int(self.ended),
            "status": self.status,
            "detail": self.detail,
            "exit_status": self.exit_status,
            "order": asdict(self.order),
        }

    def result(self) -> dict[str, Any] | None:
        """Return what was measured; None while there is nothing."""
        return _read_json(self.folder / f"{NAME}.json")

    @property
    def page(self) -> Path:
        """The report, once it is written."""
        return self.folder / f"{NAME}.html"


class Benchmarks:
    """Starts, keeps and ends runs. Enter it before, leave it after: then a run in progress is ended."""

    def __init__(
        self,
        folder: Path,
        *,
        max_seconds: float,
        api_key: str = "",
        command: Sequence[str] = (sys.executable, "-m", "bench"),
    ) -> None:
        self._folder = folder
        self._api_key = api_key
        self._max_seconds = max_seconds
        self._command = tuple(command)
        self._runs: dict[str, BenchRun] = {}
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Benchmarks":
        for path in await asyncio.to_thread(lambda: sorted(self._folder.glob("*/run.json"))):
            if (run := _restored(path)) is not None:
                self._runs[run.id] = run
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    @property
    def runs(self) -> list[BenchRun]:
        """All of them, the newest first."""
        return sorted(self._runs.values(), key=lambda run: -run.created)

    def find(self, run_id: str) -> BenchRun:
        """Look a run up.

        Raises:
            UnknownBenchError: if there is none.

        """
        if run_id not in self._runs:
            raise UnknownBenchError(run_id)
        return self._runs[run_id]

    def start(self, order: BenchOrder, url: str) -> BenchRun:
        """Start a run against an address.

        Raises:
            BenchRunningError: if another is in progress.

        """
        busy = next((run for run in self._runs.values() if run.status == "running"), None)
        if busy is not None:
            raise BenchRunningError(busy.id)
        run_id = f"bench_{time.strftime('%Y%m%d-%H%M%S')}_{secrets.token_hex(3)}"
        run = BenchRun(run_id, order, self._folder / run_id)
        self._runs[run.id] = run
        self._running = asyncio.create_task(self._run(run, url))
        return run

    async def delete(self, run: BenchRun) -> None:
        """End a run if it is in progress, and forget it with its files."""
        if run.status == "running" and self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        self._runs.pop(run.id, None)
        await asyncio.to_thread(_remove, run.folder)

    async def follow(self, run: BenchRun, after: int | None = None) -> AsyncGenerator[tuple[int | None, dict[str, Any]], None]:
        """Yield a run's numbered events, those that were and those that come, until it ends."""
        seen = -1 if after is None else after
        while True:
            changed = run.changed
            for number, event in [pair for pair in run.events if pair[0] > seen]:
                seen = number
                yield number, event
            if run.status != "running":
                return
            await changed.wait()

    async def _run(self, run: BenchRun, url: str) -> None:
        run.tell({"type": "bench.started"} | run.summary())
        try:
            await asyncio.to_thread(_prepare, run)
            async with asyncio.timeout(self._max_seconds):
                await self._measure(run, url)
        except TimeoutError:
            run.status, run.detail = "failed", f"It took longer than {self._max_seconds:g} seconds."
        except asyncio.CancelledError:
            run.status, run.detail = "cancelled", "It was cancelled."
            raise
        except OSError as error:
            run.status, run.detail = "failed", f"It could not be started: {error}."
        finally:
            run.ended = time.time()
            if run.folder.is_dir():
                with contextlib.suppress(OSError):
                    _write_json(run.folder / "run.json", run.summary())
            logger.info("%s: %s%s", run.id, run.status, f" ({run.detail})" if run.detail else "")
            run.tell({"type": f"bench.{run.status}"} | run.summary() | {"result": run.result()})

    async def _measure(self, run: BenchRun, url: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *("--url", url, "--progress", "json", "--out", str(run.folder), "--name", NAME),
            *run.order.arguments(),
            *(["--insecure"] if url.startswith("https") else []),  # it is our own address, and no certificate's name
            env=os.environ | {"STENO_BENCH_API_KEY": self._api_key},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            said = asyncio.create_task(_tail(process))
            assert process.stdout is not None
            async for line in process.stdout:
                with contextlib.suppress(ValueError):
                    run.tell(json.loads(line) | {"type": "bench.progress"})
            run.exit_status = await process.wait()
            detail = await said
        finally:
            await _end(process)
        if run.result() is None:
            run.status, run.detail = "failed", detail or f"The bench ended with status {run.exit_status}."
        else:
            run.status = "done"


async def _tail(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    kept = b""
    while piece := await process.stderr.read(4096):
        kept = (kept + piece)[-DETAIL:]
    return kept.decode(errors="replace").strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _prepare(run: BenchRun) -> None:
    run.folder.mkdir(parents=True)
    _write_json(run.folder / "run.json", run.summary())


def _remove(folder: Path) -> None:
    if folder.is_dir():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def _restored(path: Path) -> BenchRun | None:
    """Read a run of an earlier gateway; one that was in progress then is lost."""
    kept = _read_json(path)
    try:
        assert kept is not None
        order = BenchOrder(**(kept["order"] | {"concurrency": tuple(kept["order"]["concurrency"])}))
        status: Status = "cancelled" if kept["status"] == "running" else kept["status"]
        run = BenchRun(path.parent.name, order, path.parent, kept["created"], kept["ended"], status)
        run.detail, run.exit_status = kept["detail"], kept["exit_status"]
    except (AssertionError, KeyError, TypeError):
        logger.warning("%s is no run of a bench", path)
        return None
    run.tell({"type": f"bench.{run.status}"} | run.summary() | {"result": run.result()})
    return run


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
