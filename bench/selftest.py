"""Measures the client on a server whose times are known: does it report what happened, and how many speakers does it carry?

The server is scripted and runs in a process of its own. Both processes read the same monotonic clock, so that the moment at
which the server sent a text compares with the one at which the client says that it came.
"""

import asyncio
import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
from aiohttp import web

from bench.clients import LiveClient, StreamClient
from bench.corpus import RATE, Clip, Deck
from bench.health import Watch
from bench.load import Load
from bench.record import Record
from bench.statistics import percentile

FIRST_SECONDS = 0.3
TOKEN_SECONDS = 0.05
TOKENS = 11
MOST_ERROR = 0.05
LATE_AIM_MS = 10.0


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, and whether it is good enough."""

    name: str
    found: str
    good: bool


async def run(sessions: int = 200, seconds: float = 10.0, requests: int = 40) -> list[Check]:
    """Send streamed requests, then so many paced live sessions, to a scripted server."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    try:
        url = await asyncio.to_thread(ours.recv)
        return [*await _streams(url, requests), *await _sessions(url, sessions, seconds)]
    finally:
        ours.send(None)
        await asyncio.to_thread(server.join, 10)


async def _streams(url: str, n: int) -> list[Check]:
    clips = [Clip(f"noise {i}", _noise(1.0, seed=i), None) for i in range(16)]
    async with StreamClient(url, {"model": "scripted"}) as client:
        load = Load("stream", client.send, Deck(clips))
        await load.closed(n, 4)
    return streams_agree(load.records)


def streams_agree(records: Sequence[Record]) -> list[Check]:
    """Compare what the client reports of streams with what their server says: `first_sent`, `last_sent`, ms of the clock."""
    ok = [record for record in records if record.ok]
    checks = [Check("streams that succeeded", f"{len(ok)} of {len(records)}", len(ok) == len(records) > 0)]
    for name in ("first", "last"):
        off = []
        for record in ok:
            sent = record.server[f"{name}_sent"] / 1000 - record.sent
            seen = record.first_text if name == "first" else record.last_text
            assert seen is not None
            off.append(abs(seen - record.sent - sent) / sent)
        p95 = percentile(off, 0.95)
        assert p95 is not None
        checks.append(Check(f"error of the time to the {name} text, p95", f"{p95:.2%}", p95 <= MOST_ERROR))
    return checks


async def _sessions(url: str, n: int, seconds: float) -> list[Check]:
    clips = [Clip(f"noise {i}", _noise(seconds, seed=i), None) for i in range(8)]
    watch = Watch()
    async with LiveClient(url, {"model": "scripted"}) as client:
        load = Load("live", client.send, Deck([Clip(f"{i}", clips[i % 8].samples, None) for i in range(n)]))
        async with watch:
            await load.closed(n, n, stagger_seconds=min(0.01, 2.0 / n))
    ok = sum(record.ok for record in load.records)
    health = watch.health(load.records)
    late = health.send_late_ms_p99
    return [
        Check(f"live sessions of {seconds:g} s that succeeded", f"{ok} of {n}", ok == n),
        Check("packets late, p99", "-" if late is None else f"{late:.1f} ms", late is not None and late <= LATE_AIM_MS),
        Check("the client's share of a core", f"{health.cpu_share:.0%}", health.valid),
    ]


def _noise(seconds: float, *, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    return np.random.default_rng(seed).integers(-1000, 1000, round(seconds * RATE), dtype=np.int16)


# --- the scripted server --------------------------------------------------------------------------------------------


def _serve(pipe: Connection) -> None:
    asyncio.run(_serve_until_told(pipe))


async def _serve_until_told(pipe: Connection) -> None:
    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/v1/audio/transcriptions", _transcribe)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
    await asyncio.to_thread(pipe.recv)
    await runner.cleanup()


async def _transcribe(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    live = request.content_type == "audio/pcm"
    if live:
        await response.prepare(request)
        taken = told = 0
        async for piece in request.content.iter_any():
            taken += len(piece)
            if taken - told >= 2 * RATE:
                told = taken
                await _say(response, type="transcript.text.partial", text="so far", seconds=taken / 2 / RATE)
        await _say(response, type="transcript.text.done", text="all of it")
    else:
        await request.read()
        began = time.monotonic()
        await response.prepare(request)
        stamps = []
        for i in range(TOKENS):
            await asyncio.sleep(began + FIRST_SECONDS + i * TOKEN_SECONDS - time.monotonic())
            stamps.append(time.monotonic() * 1000)
            await _say(response, type="transcript.text.delta", delta=f" word{i}")
        profile = {"first_sent": stamps[0], "last_sent": stamps[-1]}
        text = " ".join(f"word{i}" for i in range(TOKENS))
        await _say(response, type="transcript.text.done", text=text, usage={"output_tokens": TOKENS}, profile=profile)
    await response.write(b"data: [DONE]\n\n")
    return response


async def _say(response: web.StreamResponse, **event: object) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
