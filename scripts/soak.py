"""Run a gateway for a long time under all kinds of clients, kill its engine once, and see whether anything is lost or grows.

`make soak` serves `tiny.en` for 30 minutes to clients who post files, follow streams, speak, use the sessions' resource, talk
over a WebSocket, and to rude ones who send nonsense, vanish in the middle of whatever they do, or read slowly. After
a quarter of the time the engine's process is killed. At the end it must hold that

- nothing that was accepted was lost: each polite request has its whole text, but for those that the kill met, which were told;
- no text is wrong: its word error rate is not much worse than the first time that this recording was heard;
- memory, descriptors, threads and temporary files of each process are what they were after a third of the time. Of each minute
  the least counts: between two moments at which the allocator gives back what is free, what it holds goes up and down;
- nothing is in progress any more, and `/health/live` answered throughout.

The findings are printed, and written to `bench/out/soak-TIME.json`. The exit status is 0 if all of it held.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Any

import httpx
import jiwer
import psutil
from rich.console import Console
from rich.table import Table

from bench.corpus import RATE, Clip, load_corpus
from bench.realtime import RealtimeClient
from bench.record import Record

ROOT = Path(__file__).parents[1]
SAMPLE_SECONDS = 2.0
PACKET_SECONDS = 0.1
KILL_AT = 0.25  # of the time
MAX_GROWTH_MB = 5.0  # of a process, in the last two thirds of the time
MAX_HEALTH_SECONDS = 1.0
WORSE = 0.34  # how much a text's word error rate may be worse than the first one of its recording
SETTLE_SECONDS = 60.0  # after a start: what is loaded at first use

out = Console(highlight=False)


def main() -> None:
    """Parse the command line, run, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", default="tiny.en")
    parser.add_argument("--files", type=int, default=2, help="clients who post files, one after the other")
    parser.add_argument("--speakers", type=int, default=2, help="clients who speak, in real time")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    soak = Soak(given.model, 60 * given.minutes, files=given.files, speakers=given.speakers, seed=given.seed)
    try:
        held = asyncio.run(soak.run())
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0 if held else 1)


@dataclass
class Sample:
    """What a process holds at a moment (seconds since the start)."""

    at: float
    memory_mb: float
    descriptors: int
    threads: int


@dataclass
class Findings:
    """What happened."""

    done: Counter[str] = field(default_factory=Counter)  # polite requests with their whole text, by kind
    met_by_kill: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # 429 and 503, before any work
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    rude: Counter[str] = field(default_factory=Counter)
    health: list[float] = field(default_factory=list)  # seconds
    health_failed: int = 0
    samples: dict[str, list[Sample]] = field(default_factory=dict)  # by process
    killed_at: float | None = None
    ready_again_at: float | None = None
    temporary_files: list[int] = field(default_factory=list)


class Soak:
    """One run."""

    def __init__(self, model: str, seconds: float, *, files: int, speakers: int, seed: int) -> None:
        self._model, self._seconds, self._files, self._speakers = model, seconds, files, speakers
        self._random = random.Random(seed)
        self._clips = [clip for clip in load_corpus(None) if clip.text]
        self._first_rate: dict[str, float] = {}
        self._found = Findings()
        self._began = 0.0
        self._url = ""

    async def run(self) -> bool:
        """Serve, load, kill, and judge."""
        with tempfile.TemporaryDirectory() as temporary, _gateway(self._model, Path(temporary)) as (process, url):
            self._url = url
            async with httpx.AsyncClient(base_url=url, timeout=300) as client:
                while not await self._is_ready(client):
                    if process.poll() is not None:
                        out.print("[red]the gateway did not start")
                        return False
                    await asyncio.sleep(0.5)
                self._began = time.monotonic()
                out.print(f"{url}, pid {process.pid}: {self._seconds / 60:g} minutes of {self._model}, from {time.ctime()}")
                await self._load(client, psutil.Process(process.pid), Path(temporary))
                idle = await self._until_idle(client)
            process.terminate()
            exit_status = process.wait(60)
        return self._report(idle=idle, exit_status=exit_status)

    # --- the run ----------------------------------------------------------------------------------------------------

    async def _load(self, client: httpx.AsyncClient, process: psutil.Process, temporary: Path) -> None:
        clients: list[Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]] = [
            *[self._post_files] * self._files,
            self._follow_streams,
            *[self._speak] * self._speakers,
            self._use_the_resource,
            self._talk,
            self._be_rude,
        ]
        tasks = [asyncio.create_task(work(client)) for work in clients]
        watching = [
            asyncio.create_task(self._sample(process, temporary)),
            asyncio.create_task(self._ask_health()),
            asyncio.create_task(self._kill(client, process)),
        ]
        told = self._began
        while self._left > 0:
            await asyncio.wait([*tasks, *watching], timeout=min(self._left, 5.0), return_when=asyncio.FIRST_EXCEPTION)
            for task in [*tasks, *watching]:
                if task.done() and (error := task.exception()) is not None:
                    raise error
            if time.monotonic() - told >= 60:
                told = time.monotonic()
                out.print(self._line())
        await asyncio.gather(*tasks)  # they end what they do
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    @property
    def _left(self) -> float:
        return self._began + self._seconds - time.monotonic()

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    def _line(self) -> str:
        found = self._found
        memory = ", ".join(f"{name} {samples[-1].memory_mb:.0f} MB" for name, samples in found.samples.items())
        counts = " ".join(f"{kind} {count}" for kind, count in sorted(found.done.items()))
        lost = f"lost {len(found.lost)}, wrong {len(found.wrong)}, rude {found.rude.total()}"
        return f"{self._now / 60:5.1f} min  {counts}  {lost}  {memory}"

    async def _sample(self, process: psutil.Process, temporary: Path) -> None:
        while True:
            for name, one in _processes(process).items():
                with contextlib.suppress(psutil.Error):
                    memory = one.memory_full_info().uss / 1e6
                    sample = Sample(self._now, memory, one.num_fds(), one.num_threads())
                    self._found.samples.setdefault(name, []).append(sample)
            self._found.temporary_files.append(sum(len(files) for _, _, files in os.walk(temporary)))
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _ask_health(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=30) as client:
            while True:
                began = time.monotonic()
                try:
                    (await client.get("/health/live")).raise_for_status()
                except httpx.HTTPError:
                    self._found.health_failed += 1
                self._found.health.append(time.monotonic() - began)
                await asyncio.sleep(0.5)

    async def _kill(self, client: httpx.AsyncClient, process: psutil.Process) -> None:
        await asyncio.sleep(KILL_AT * self._seconds)
        engine = _processes(process).get("engine")
        if engine is None:
            return
        self._found.killed_at = self._now
        engine.kill()
        out.print(f"{self._now / 60:5.1f} min  the engine's process is killed")
        await asyncio.sleep(1)
        while not await self._is_ready(client):  # noqa: ASYNC110 - another process becomes ready
            await asyncio.sleep(0.2)
        self._found.ready_again_at = self._now
        out.print(f"{self._now / 60:5.1f} min  ready again, {self._now - self._found.killed_at:.1f} s after the kill")

    async def _is_ready(self, client: httpx.AsyncClient) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await client.get("/health/ready")).status_code == 200
        return False

    async def _until_idle(self, client: httpx.AsyncClient) -> bool:
        for _ in range(100):
            state = (await client.get("/health/ready")).json()
            if state["transcriptions"] == state["engine_requests"] == 0:
                return True
            await asyncio.sleep(0.2)
        return False

    # --- polite clients -----------------------------------------------------------------------------------------------

    async def _post_files(self, client: httpx.AsyncClient) -> None:
        while self._left > 0:
            clip, began = self._random.choice(self._clips), self._now
            answer = await self._send(client, "file", began, data={"model": self._model}, files={"file": ("a.wav", clip.wav)})
            if answer is not None:
                self._judge("file", began, clip, answer, lambda text: json.loads(text)["text"])

    async def _follow_streams(self, client: httpx.AsyncClient) -> None:
        while self._left > 0:
            clip, began = self._random.choice(self._clips), self._now
            data = {"model": self._model, "stream": "true"}
            answer = await self._send(client, "stream", began, data=data, files={"file": ("a.wav", clip.wav)})
            if answer is not None:
                self._judge("stream", began, clip, answer, _text_of_stream)

    async def _speak(self, client: httpx.AsyncClient) -> None:
        while self._left > 0:
            clip, began = self._random.choice(self._clips), self._now
            headers = {"Content-Type": f"audio/pcm;rate={RATE}"}
            params = {"model": self._model, "stream": "true"}
            answer = await self._send(client, "live", began, params=params, headers=headers, content=_spoken(clip))
            if answer is not None:
                self._judge("live", began, clip, answer, _text_of_stream)

    async def _talk(self, _: httpx.AsyncClient) -> None:
        async with RealtimeClient(self._url, {"model": self._model}) as client:
            while self._left > 0:
                clip, began = self._random.choice(self._clips), self._now
                record = Record("live", 0, clip.name, clip.seconds, clip.text)
                await client.send(clip, record)
                if record.error in ("http_429", "http_503"):
                    self._found.refused["realtime"] += 1
                elif record.error:
                    self._lose("realtime", began, f"error: {record.error} {record.detail}")
                else:
                    self._judge_text("realtime", began, clip, record.text)

    async def _send(self, client: httpx.AsyncClient, kind: str, began: float, **request: Any) -> httpx.Response | None:
        try:
            answer = await client.post("/v1/audio/transcriptions", **request)
            if answer.status_code not in {429, 503}:
                return answer
            self._found.refused[kind] += 1
            await asyncio.sleep(1)
            return None
        except httpx.HTTPError as error:
            self._lose(kind, began, f"{type(error).__name__} {error}")
            return None

    async def _use_the_resource(self, client: httpx.AsyncClient) -> None:
        while self._left > 0:
            clip, began = self._random.choice(self._clips), self._now
            made = await client.post(
                "/v1/audio/sessions", json={"model": self._model, "content_type": f"audio/pcm;rate={RATE}"}
            )
            if made.status_code != 201:
                await self._note_refusal("resource", began, made.status_code, made.text)
                continue
            session = f"/v1/audio/sessions/{made.json()['id']}"
            following = asyncio.create_task(client.get(made.json()["events_url"]))
            sequence = 0
            async for packet in _spoken(clip, seconds=0.5):
                sent = await client.post(f"{session}/audio", params={"sequence": sequence}, content=packet)
                if sent.status_code != 200:
                    break  # its events tell why
                sequence += 1
            await client.post(f"{session}/stop")
            try:
                answer = await following
            except httpx.HTTPError as error:
                self._lose("resource", began, f"{type(error).__name__} {error}")
                continue
            self._judge("resource", began, clip, answer, _text_of_session)

    def _judge(self, kind: str, began: float, clip: Clip, answer: httpx.Response, text_of: Callable[[str], str | None]) -> None:
        """Say what became of a polite request."""
        status, body = answer.status_code, answer.text
        text = text_of(body) if status == 200 else None
        if text is None:
            self._lose(kind, began, f"{status} {body[-300:]}")
            return
        self._judge_text(kind, began, clip, text)

    def _judge_text(self, kind: str, began: float, clip: Clip, text: str) -> None:
        self._found.done[kind] += 1
        assert clip.text is not None
        rate = jiwer.wer(_words(clip.text), _words(text) or "-")
        if rate > self._first_rate.setdefault(clip.name, rate) + WORSE:
            self._found.wrong.append(f"{kind} {clip.name} at {began:.0f} s: {text!r} for {clip.text!r}")

    async def _note_refusal(self, kind: str, began: float, status: int, body: str) -> None:
        if status in {429, 503}:
            self._found.refused[kind] += 1
            await asyncio.sleep(1)
        else:
            self._lose(kind, began, f"{status} {body[-300:]}")

    def _lose(self, kind: str, began: float, why: str) -> None:
        killed, again = self._found.killed_at, self._found.ready_again_at
        told = "error" in why
        if killed is not None and told and began < (again or self._now) + 1 and self._now > killed:
            self._found.met_by_kill[kind] += 1
        else:
            self._found.lost.append(f"{kind} from {began:.1f} to {self._now:.1f} s: {why}")

    # --- rude ones --------------------------------------------------------------------------------------------------

    async def _be_rude(self, client: httpx.AsyncClient) -> None:
        manners: list[Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]] = [
            self._send_nonsense,
            self._ask_for_what_is_not,
            self._break_off_an_upload,
            self._leave_a_stream,
            self._leave_a_speech,
            self._forget_a_session,
            self._read_slowly,
            self._send_half_a_head,
            self._break_off_a_socket,
        ]
        while self._left > 0:
            manner = self._random.choice(manners)
            with contextlib.suppress(OSError, httpx.HTTPError, TimeoutError):
                await manner(client)
            self._found.rude[manner.__name__.strip("_")] += 1
            await asyncio.sleep(0.2)

    async def _send_nonsense(self, client: httpx.AsyncClient) -> None:
        data = self._random.randbytes(self._random.choice([0, 10, 1000, 200_000]))
        clip = self._random.choice(self._clips)
        for name, body in (("a.mp3", data), ("a.wav", clip.wav[: len(clip.wav) // 3] + data)):
            answer = await client.post("/v1/audio/transcriptions", data={"model": self._model}, files={"file": (name, body)})
            if answer.status_code >= 500 and answer.status_code != 503:
                self._lose("nonsense", self._now, f"{answer.status_code} {answer.text}")

    async def _ask_for_what_is_not(self, client: httpx.AsyncClient) -> None:
        await client.post("/v1/audio/transcriptions", data={"model": "none" * 100, "x" * 900: "y" * 9000})
        await client.post("/v1/audio/sessions/sess_none/audio", params={"sequence": -1}, content=b"x" * 1000)
        await client.get("/../../etc/passwd")

    async def _break_off_an_upload(self, _: httpx.AsyncClient) -> None:
        clip = self._random.choice(self._clips)
        request = self._request(clip, {"model": self._model})
        await self._vanish(request[: self._random.randrange(len(request))], read=False)

    async def _leave_a_stream(self, _: httpx.AsyncClient) -> None:
        clip = self._random.choice(self._clips)
        await self._vanish(self._request(clip, {"model": self._model, "stream": "true"}), read=True)

    async def _leave_a_speech(self, _: httpx.AsyncClient) -> None:
        clip = self._random.choice(self._clips)
        head = f"POST /v1/audio/transcriptions?model={self._model}&stream=true HTTP/1.1\r\nHost: x\r\n"
        samples = clip.samples.astype("<i2").tobytes()
        head += f"Content-Type: audio/pcm;rate={RATE}\r\nContent-Length: {len(samples) * 2}\r\n\r\n"
        await self._vanish(head.encode() + samples, read=True)

    async def _forget_a_session(self, client: httpx.AsyncClient) -> None:
        made = await client.post("/v1/audio/sessions", json={"model": self._model, "content_type": f"audio/pcm;rate={RATE}"})
        if made.status_code == 201:
            session = f"/v1/audio/sessions/{made.json()['id']}"
            samples = self._random.choice(self._clips).samples.astype("<i2").tobytes()
            await client.post(f"{session}/audio", params={"sequence": 0}, content=samples[: 2 * RATE])
            await client.post(f"{session}/audio", params={"sequence": 7}, content=samples[: 2 * RATE])  # the first of a gap
            if self._random.random() < 0.7:
                await client.delete(session)

    async def _read_slowly(self, client: httpx.AsyncClient) -> None:
        clip = self._random.choice(self._clips)
        data, files = {"model": self._model, "stream": "true"}, {"file": ("a.wav", clip.wav)}
        async with client.stream("POST", "/v1/audio/transcriptions", data=data, files=files) as answer:
            await asyncio.sleep(self._random.random() * 3)
            async for _ in answer.aiter_bytes(10):
                await asyncio.sleep(0.01)

    async def _send_half_a_head(self, _: httpx.AsyncClient) -> None:
        await self._vanish(b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 30_000, read=False)

    async def _break_off_a_socket(self, _: httpx.AsyncClient) -> None:
        audio = base64.b64encode(self._random.choice(self._clips).samples.astype("<i2").tobytes()).decode()
        said = [
            {"type": "input_audio_buffer.append", "audio": audio},
            {"type": "nonsense"},
            {"type": "input_audio_buffer.commit"},
        ]
        head = (
            "GET /v1/realtime HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        )
        head += "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        data = head.encode() + b"".join(_frame(json.dumps(event).encode()) for event in said)
        await self._vanish(data[: self._random.randrange(len(head), len(data))], read=self._random.random() < 0.7)

    def _request(self, clip: Clip, fields: dict[str, str]) -> bytes:
        request = httpx.Request(
            "POST", f"{self._url}/v1/audio/transcriptions", data=fields, files={"file": ("a.wav", clip.wav)}
        )
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        return f"POST /v1/audio/transcriptions HTTP/1.1\r\n{head}\r\n".encode() + request.read()

    async def _vanish(self, data: bytes, *, read: bool) -> None:
        """Send, wait a little, maybe until something comes, and reset the connection."""
        url = httpx.URL(self._url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            async with asyncio.timeout(self._random.random() * 2):
                writer.write(data)
                await writer.drain()
                await reader.read(1 if read else -1)
        finally:
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    # --- the verdict ----------------------------------------------------------------------------------------------------

    def _report(self, *, idle: bool, exit_status: int) -> bool:
        found = self._found
        table = Table("what", "found", "must be", "", box=None)
        verdicts: list[bool] = []

        def row(what: str, value: object, must: str, *, holds: bool) -> None:
            verdicts.append(holds)
            table.add_row(what, str(value), must, "[green]holds" if holds else "[red]does not hold")

        row("lost", len(found.lost), "0", holds=not found.lost)
        row("wrong texts", len(found.wrong), "0", holds=not found.wrong)
        row("in progress at the end", "nothing" if idle else "something", "nothing", holds=idle)
        row("exit status", exit_status, "0", holds=exit_status == 0)
        slowest = max(found.health, default=0.0)
        row("/health/live, slowest", f"{slowest:.2f} s", f"{MAX_HEALTH_SECONDS:g} s", holds=slowest < MAX_HEALTH_SECONDS)
        row("/health/live, failed", found.health_failed, "0", holds=not found.health_failed)
        if found.killed_at is not None:
            again = found.ready_again_at
            row("ready again after", f"{again - found.killed_at:.1f} s" if again else "never", "ever", holds=again is not None)
        since = max(self._seconds / 3, (found.ready_again_at or 0.0) + SETTLE_SECONDS)
        growths = {name: _growths([s for s in samples if s.at >= since]) for name, samples in found.samples.items()}
        for name, (memory, descriptors, threads) in growths.items():
            row(f"{name}: memory grew by", f"{memory:.1f} MB", f"under {MAX_GROWTH_MB:g} MB", holds=memory < MAX_GROWTH_MB)
            row(f"{name}: descriptors grew by", f"{descriptors:.1f}", "under 3", holds=descriptors < 3)
            row(f"{name}: threads grew by", f"{threads:.1f}", "under 3", holds=threads < 3)
        settled = found.temporary_files[int(since / SAMPLE_SECONDS) :] or [0]
        files = settled[-1] - settled[0]
        row("temporary files grew by", files, "0", holds=files <= 0)
        out.print(table)
        for line in [*found.lost[:20], *found.wrong[:20]]:
            out.print(f"  {line}", markup=False)
        done, met, refused = (dict(c) for c in (found.done, found.met_by_kill, found.refused))
        out.print(f"done {done}, met by the kill {met}, refused {refused}, rude {dict(found.rude)}")
        kept = {
            "command": sys.argv,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "held": all(verdicts),
            "done": done,
            "met_by_kill": met,
            "refused": refused,
            "rude": dict(found.rude),
            "lost": found.lost,
            "wrong": found.wrong,
            "growth": growths,
            "health_slowest": slowest,
            "samples": {name: [vars(sample) for sample in samples] for name, samples in found.samples.items()},
        }
        path = ROOT / "bench" / "out" / f"soak-{time.strftime('%Y%m%d-%H%M%S')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(kept, indent=1))
        out.print(f"kept as {path}")
        return all(verdicts)


@contextlib.contextmanager
def _gateway(model: str, temporary: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve, with the log in a file beside the findings."""
    log = ROOT / "bench" / "out" / "soak.log"
    log.parent.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "app.cli", "serve", "--model", model, "--port", str(port), "--session-grace-seconds", "5"]
    with log.open("w") as err:
        process = subprocess.Popen(command, stderr=err, text=True, cwd=ROOT, env=os.environ | {"TMPDIR": str(temporary)})
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _processes(gateway: psutil.Process) -> dict[str, psutil.Process]:
    """Return the gateway's processes by what they are."""
    found = {"gateway": gateway}
    with contextlib.suppress(psutil.Error):
        for child in gateway.children(recursive=True):
            if "EngineCore" in child.name():
                found["engine"] = child
    return found


async def _spoken(clip: Clip, *, seconds: float = PACKET_SECONDS) -> AsyncIterator[bytes]:
    """Say a clip in real time."""
    began, step = time.monotonic(), int(seconds * RATE)
    for start in range(0, len(clip.samples), step):
        await asyncio.sleep(max(0.0, began + start / RATE - time.monotonic()))
        yield clip.samples[start : start + step].astype("<i2").tobytes()


def _frame(payload: bytes) -> bytes:
    """Write a WebSocket's text frame, masked with zeros (RFC 6455)."""
    size = len(payload)
    length = struct.pack("!BH", 0x80 | 126, size) if size < 1 << 16 else struct.pack("!BQ", 0x80 | 127, size)
    return b"\x81" + length + bytes(4) + payload


def _text_of_stream(body: str) -> str | None:
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return None
    text: str = json.loads(events[-2])["text"]
    return text


def _text_of_session(body: str) -> str | None:
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    return next((event["text"] for event in events if event["type"] == "transcript.text.done"), None)


def _words(text: str) -> str:
    return " ".join("".join(c if c.isalnum() or c == "'" else " " for c in text.lower()).split())


def _growths(samples: list[Sample]) -> tuple[float, float, float]:
    """Return how much memory (MB), descriptors and threads grew, by regressions over the least of each minute."""
    minutes: dict[int, list[Sample]] = {}
    for sample in samples:
        minutes.setdefault(int(sample.at // 60), []).append(sample)
    whole = max((len(those) for those in minutes.values()), default=0)
    minutes = {minute: those for minute, those in minutes.items() if len(those) > whole / 2}  # else its least means nothing
    if len(minutes) < 3:
        return 0.0, 0.0, 0.0

    def growth(of: Callable[[Sample], float]) -> float:
        least = [min(map(of, those)) for those in minutes.values()]
        return linear_regression(list(minutes), least).slope * (len(minutes) - 1)

    return growth(lambda s: s.memory_mb), growth(lambda s: s.descriptors), growth(lambda s: s.threads)


if __name__ == "__main__":
    main()
