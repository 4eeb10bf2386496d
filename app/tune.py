"""Finds how the engine is to run on this machine: starts it in several ways, one after another, and measures each.

One setting is tried at a time, from the first that matters most, and the best value stays. What is measured is seconds of short
speech a second, as many clients see it that send clips at once.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.corpus import Clip
from bench.sweep import Plan, Sweep, Target

AT_ONCE = 8
REQUESTS = 32
START_SECONDS = 1800
LEAST_GAIN = 0.03  # a value that is so little better than a smaller one is not worth its cost


Measure = Callable[[dict[str, int]], Awaitable["Candidate"]]


class TuneError(Exception):
    """The engine did not start."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings, by their names, and what they gave."""

    values: dict[str, int]
    rtfx: float = 0.0
    p95_ms: float | None = None


@dataclass
class Tuning:
    """What is tried, in order: setting -> its values, small ones first; what was tried; and what was chosen."""

    values: dict[str, tuple[int, ...]]
    tried: list[Candidate] = field(default_factory=list)
    chosen: dict[str, int] = field(default_factory=dict)


def on_this_machine() -> Tuning:
    """Return what is worth trying here."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = tuple(sorted({1, max(1, cores // 2), max(1, cores - 1), cores}))
    return Tuning({"engine_threads": threads, "encoders_per_step": (1, 2, 4), "engine_concurrency": (8, 16)})


async def tune(tuning: Tuning, measure: Measure) -> AsyncIterator[Candidate]:
    """Try the values of each setting in turn, and yield what each gave.

    Raises:
        TuneError: if the engine does not start.

    """
    tuning.chosen = {name: values[0] for name, values in tuning.values.items()}
    for name, values in tuning.values.items():
        best: Candidate | None = None
        for value in values:
            wanted = tuning.chosen | {name: value}
            known = next((candidate for candidate in tuning.tried if candidate.values == wanted), None)
            candidate = known or await measure(wanted)
            if known is None:
                tuning.tried.append(candidate)
                yield candidate
            if best is None or candidate.rtfx > best.rtfx * (1 + LEAST_GAIN):
                best = candidate
        assert best is not None
        tuning.chosen = dict(best.values)


async def measured(values: dict[str, int], clips: list[Clip], *, model: str) -> Candidate:
    """Start a gateway with these settings, and measure it."""
    flags = [word for name, value in values.items() for word in ("--" + name.replace("_", "-"), str(value))]
    async with _gateway("--model", model, *flags) as url:
        plan = Plan(workload="file", loads=(AT_ONCE,), n=REQUESTS, warmup=4)
        (result,) = await Sweep(plan, [Target("steno", url)], clips, on_progress=lambda progress: None).run()
    (level,) = result.result.levels
    return Candidate(values, level.rtfx, level.metrics["e2e"].p95)


@contextlib.asynccontextmanager
async def _gateway(*flags: str) -> AsyncIterator[str]:
    """Run a gateway of its own until left."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "app.cli", "serve", "--port", str(port), *flags]
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await _ready(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _ready(url: str, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(START_SECONDS), httpx.AsyncClient(trust_env=False) as http:
        while True:
            if process.returncode is not None:
                raise TuneError(f"the gateway ended with status {process.returncode}")
            with contextlib.suppress(httpx.HTTPError):
                response = await http.get(f"{url}/health/ready")
                if response.status_code == 200:
                    return
                if response.json().get("status") == "failed":
                    raise TuneError(str(response.json().get("reason")))
            await asyncio.sleep(0.5)


def write_settings(path: Path, values: dict[str, int]) -> None:
    """Put settings into a `.env` file, in place of what it said of them; all else in it stays."""
    names = {f"STENO_{name.upper()}": value for name, value in values.items()}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    kept = [line for line in lines if line.partition("=")[0].strip().upper() not in names]
    written = [f"{name}={value}" for name, value in names.items()]
    path.write_text("\n".join([*kept, *written]) + "\n", encoding="utf-8")
