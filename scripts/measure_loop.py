"""What the gateway's own process costs: many live sessions on the scripted engine, and where its threads' time goes.

`python scripts/measure_loop.py 100 1000` starts a gateway, lets so many senders talk to it in real time, 100 ms of speech at a
time, and prints for each number: CPU seconds of the loop's thread and of the others (voice activity) for a second of one
session's audio, how long a request to `/health/live` waits (wall time, and what the loop's thread computed meanwhile), late
packets, and memory. The senders are raw sockets in one thread on another core, for they shall cost next to nothing.
"""

import argparse
import contextlib
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

PORT = 8721
PACKET_SECONDS = 0.1
RATE = 16_000
SLOTS = 10  # senders are spread over a packet's time in so many groups
TICK_SECONDS = PACKET_SECONDS / SLOTS
PROBE_TICKS = 20
SETTLE_SECONDS = 2.0


def main() -> None:
    """Measure each number of sessions in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sessions", type=int, nargs="*", default=[100, 300])
    parser.add_argument("--seconds", type=float, default=30.0, help="how long they talk")
    parser.add_argument("--serve", action="store_true", help="be the gateway that is measured")
    given = parser.parse_args()
    if given.serve:
        _serve(PORT)
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    speech = _speech()
    costs = "loop, ms of CPU a session-second | other threads | lag p50 / p99, ms | of it CPU of the loop"
    print(f"| sessions | {costs} | events a session-second | MB each | latest packet, ms |")
    print("|---|---|---|---|---|---|---|---|")
    for count in given.sessions:
        with _gateway() as process:
            _Load(process.pid, 10, speech).run(10.0)  # what is loaded when first used
            print(_Load(process.pid, count, speech).run(given.seconds), flush=True)


def _speech() -> bytes:
    """Return a minute of speech with pauses, 16-bit."""
    from bench.corpus import load_corpus

    pause = np.zeros(int(0.9 * RATE), dtype=np.int16)
    return np.concatenate([part for clip in load_corpus(None) for part in (clip.samples, pause)])[: 60 * RATE].tobytes()


def _serve(port: int) -> None:
    """Be the gateway: its engine hears a word every third of a second, after a tenth of one."""
    import uvicorn

    from app.main import create_app
    from app.services import build_services
    from app.settings import Settings
    from engine.base import DecodeRequest
    from engine.fake import FakeEngine, Reply
    from engine.memory import collect_seldom

    def count_words(request: DecodeRequest) -> Reply:
        return Reply(tuple(f" {i}" for i in range(len(request.samples) * 3 // RATE)), first_seconds=0.1)

    collect_seldom()
    services = build_services(Settings(max_requests=100_000), FakeEngine(count_words, concurrency=4096, remember=False))
    uvicorn.run(create_app(services), port=port, log_level="error")


@contextlib.contextmanager
def _gateway() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, __file__, "--serve"]) as process:
        try:
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", PORT), timeout=5) as probe:
                    probe.sendall(b"GET /health/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    if b" 200 " in probe.recv(100):
                        break
                time.sleep(0.2)
            yield process
        finally:
            process.terminate()


def _threads(pid: int) -> dict[int, float]:
    """Return the CPU seconds of each thread of a process."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def _memory_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


class _Load:
    """Senders that talk in real time, and what the gateway does meanwhile."""

    def __init__(self, pid: int, count: int, speech: bytes) -> None:
        size = int(PACKET_SECONDS * RATE) * 2
        packets = [speech[at : at + size] for at in range(0, len(speech) - size + 1, size)]
        self._wire = [b"%x\r\n" % size + packet + b"\r\n" for packet in packets]
        self._pid, self._count = pid, count
        self._senders: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._probe = socket.create_connection(("127.0.0.1", PORT))
        self._selector.register(self._probe, selectors.EVENT_READ)
        self._asked: tuple[float, float] | None = None
        self._lags: list[tuple[float, float]] = []
        self._events = self._packets = 0
        self._memory = _memory_mb(pid)

    def run(self, seconds: float) -> str:
        """Let all come, one after the other, and talk for so long from then on; return a line of the table."""
        arriving = self._count // SLOTS + int(SETTLE_SECONDS / TICK_SECONDS)
        begin, tick = time.monotonic(), 0
        while tick < arriving:
            self._tick(begin, tick)
            tick += 1
        before, self._events, self._packets, self._lags = _threads(self._pid), 0, 0, []
        last, late = tick + int(seconds / TICK_SECONDS), 0.0
        while tick < last:
            late = max(late, self._tick(begin, tick))
            if self._asked is None and tick % PROBE_TICKS == 0:
                self._asked = time.monotonic(), _threads(self._pid)[self._pid]
                self._probe.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            tick += 1
        after, peak = _threads(self._pid), _memory_mb(self._pid)
        for sender in self._senders:
            sender.close()
        return self._line(before, after, late, peak)

    def _tick(self, begin: float, tick: int) -> float:
        """Wait for a tick's time and do its part; return how many seconds late it was."""
        due = begin + tick * TICK_SECONDS
        while (left := due - time.monotonic()) > 0:
            self._read(left)
        for _ in range(SLOTS if len(self._senders) < self._count else 0):
            self._senders.append(_connect())
            self._selector.register(self._senders[-1], selectors.EVENT_READ)
        for i in range(tick % SLOTS, len(self._senders), SLOTS):
            packet = self._wire[(tick // SLOTS + i * 7) % len(self._wire)]
            self._packets += 1
            with contextlib.suppress(BlockingIOError):
                if self._senders[i].send(packet) == len(packet):
                    continue
            raise SystemExit(f"{len(self._senders)} sessions: a socket is full, the gateway does not keep up")
        return max(0.0, -left)

    def _read(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            assert isinstance(key.fileobj, socket.socket)
            received = key.fileobj.recv(1 << 16)
            if key.fileobj is self._probe:
                if self._asked is not None:  # else the rest of an answer
                    self._lags.append((time.monotonic() - self._asked[0], _threads(self._pid)[self._pid] - self._asked[1]))
                    self._asked = None
                continue
            self._events += received.count(b"data: ")
            if not received or received.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")):
                raise SystemExit(f"the gateway has ended a session: {received.decode()}")

    def _line(self, before: dict[int, float], after: dict[int, float], late: float, peak: float) -> str:
        audio = self._packets * PACKET_SECONDS
        spent = {thread: (value - before.get(thread, 0.0)) / audio * 1000 for thread, value in after.items()}
        loop = spent.pop(self._pid)
        lags = np.array(self._lags).T * 1000
        wall, cpu = (f"{np.percentile(values, 50):.1f} / {np.percentile(values, 99):.1f}" for values in lags)
        memory = (peak - self._memory) / self._count
        return (
            f"| {self._count} | {loop:.2f} | {sum(spent.values()):.2f} | {wall} | {cpu} | {self._events / audio:.1f} "
            f"| {memory:.1f} | {late * 1000:.0f} |"
        )


def _connect() -> socket.socket:
    sender = socket.create_connection(("127.0.0.1", PORT))
    sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
    sender.sendall(
        b"POST /v1/audio/transcriptions?model=whisper-1&stream=true&include[]=partials HTTP/1.1\r\nHost: x\r\n"
        b"Content-Type: audio/pcm;rate=16000\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    sender.setblocking(False)
    return sender


if __name__ == "__main__":
    main()
