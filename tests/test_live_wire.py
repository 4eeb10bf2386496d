"""The first door to live sessions: one request, whose body is still being sent while its events come."""

import contextlib
import gc
import json
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator

import httpx
import numpy as np
import psutil
import pytest

from engine.base import DecodeRequest
from engine.fake import FakeEngine, Reply
from tests import speech
from tests.gateway import Gateway, wait_until, wait_until_idle
from tests.test_live import RATE, STEP, WORD, saying
from tests.test_probes import CONTAINERS, ffmpeg
from tests.test_wire import ready_gateway

PCM = "audio/pcm;rate=16000"


def script(request: DecodeRequest) -> Reply:
    """Read the words off their samples, which 16 bits and a resampler have blurred."""
    if request.previous_text == "hang" and not request.priority:
        return Reply((" one",), first_seconds=3600)
    steps = request.samples[: len(request.samples) // WORD * WORD].reshape(-1, WORD)
    return Reply(tuple(f" w{round(float(np.median(step)) / STEP)}" for step in steps))


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with ready_gateway(lambda: FakeEngine(script), vad=False, live_idle_seconds=5.0, agreeing_hypotheses=2) as gateway:
        yield gateway


pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def s16le(samples: np.ndarray) -> bytes:
    return np.round(np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()


class Duplex:
    """A client that reads while it sends."""

    def __init__(self, server: Gateway | str, content_type: str = PCM, **query: str) -> None:
        fields = {"model": "whisper-1", "stream": "true"} | query
        path = str(httpx.URL("/v1/audio/transcriptions", params=fields))
        url = httpx.URL(server if isinstance(server, str) else server.url)
        self._raw = socket.create_connection((url.host, url.port))
        self._raw.settimeout(60)
        self._received = b""
        self._raw.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n"
            f"Content-Type: {content_type}\r\n\r\n".encode()
        )

    def send(self, data: bytes) -> None:
        if data:
            self._raw.sendall(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def end(self) -> None:
        self._raw.sendall(b"0\r\n\r\n")

    def read_until(self, wanted: bytes) -> None:
        while wanted not in self._received:
            piece = self._raw.recv(65536)
            assert piece, f"the answer ended without {wanted!r}: {self._received!r}"
            self._received += piece

    def answer(self) -> bytes:
        with contextlib.suppress(ConnectionResetError):  # it is what a client sees that still sends
            while piece := self._raw.recv(65536):
                self._received += piece
        return self._received

    def status(self) -> int:
        return int(self.answer().split()[1])

    def error(self) -> dict:
        return json.loads(re.search(rb"\{.*\}", self.answer(), re.DOTALL).group())["error"]

    def events(self) -> list:
        lines = re.findall(rb"data: (.*)", self.answer())
        return [json.loads(line) if line.strip() != b"[DONE]" else "[DONE]" for line in lines]

    def vanish(self) -> None:
        self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._raw.close()


def words(first: int, last: int) -> str:
    return " ".join(f"w{i}" for i in range(first, last + 1))


def test_text_comes_while_the_audio_is_still_being_sent(gateway: Gateway):
    client = Duplex(gateway)
    client.send(s16le(saying(1, 10)))
    client.read_until(b'"transcript.text.delta"')
    client.send(s16le(saying(11, 20)))
    client.end()
    events = client.events()
    assert {event["type"] for event in events[:-2]} == {"transcript.text.delta"}
    assert events[-2]["type"] == "transcript.text.done"
    assert events[-2]["text"] == "".join(event["delta"] for event in events[:-2]) == words(1, 20)
    assert events[-1] == "[DONE]"
    assert events[-2]["languages"] == [{"code": "en"}]


def test_what_is_not_certain_comes_to_those_who_ask_for_it_and_so_does_the_profile(gateway: Gateway):
    client = Duplex(gateway, **{"include[]": "partials", "response_format": "json"})
    for i in range(1, 11):
        client.send(s16le(saying(i, i)))
    client.end()
    events = client.events()
    partials = [event for event in events[:-1] if event["type"] == "transcript.text.partial"]
    assert partials
    assert all(set(event) == {"type", "utterance", "revision", "text", "seconds"} for event in partials)
    assert "profile" not in events[-2]
    asked = Duplex(gateway, **{"include[]": "profile"})
    asked.send(s16le(saying(1, 5)))
    asked.end()
    assert asked.events()[-2]["profile"]["finals"] == 1


def test_segments_and_log_probabilities_come_as_of_a_file(gateway: Gateway):
    client = Duplex(gateway, response_format="verbose_json")
    client.send(s16le(saying(1, 5)))
    client.end()
    done = client.events()[-2]
    assert [(s["start"], s["end"], s["text"]) for s in done["segments"]] == [(0.0, 1.0, " " + words(1, 5))]
    client = Duplex(gateway, **{"include[]": "logprobs"})
    client.send(s16le(saying(1, 5)))
    client.end()
    *deltas, done, _ = client.events()
    assert [entry["token"] for event in deltas for entry in event["logprobs"]] == [f" w{i}" for i in range(1, 6)]
    assert [entry["token"] for entry in done["logprobs"]] == [f" w{i}" for i in range(1, 6)]


LAYOUTS = {
    "audio/pcm;rate=48000;channels=2": "-ar 48000 -af pan=stereo|c0=c0|c1=c0 -f s16le",
    "audio/pcm; rate=8000": "-ar 8000 -f s16le",
    "audio/pcm;rate=16000;encoding=f32le": "-ar 16000 -f f32le",
    "audio/L16;rate=16000": "-ar 16000 -f s16be",
    "audio/basic": "-ar 8000 -f mulaw",
    "audio/PCMA;rate=8000": "-ar 8000 -f alaw",
}


@pytest.mark.parametrize("content_type", LAYOUTS)
def test_samples_are_taken_as_their_type_says(gateway: Gateway, content_type: str):
    """A tone is as loud and as long as it was; only what its encoding loses may differ."""
    tone = speech.tone(2.0)
    client = Duplex(gateway, content_type)
    client.send(ffmpeg(speech.wav(tone), LAYOUTS[content_type]))
    client.end()
    client.answer()
    heard = gateway.engine.submitted[-1].samples
    assert abs(len(heard) - 2 * RATE) <= 40
    middle = slice(RATE // 2, RATE)
    peaks = np.abs(np.fft.rfft(heard[middle] * np.hanning(RATE // 2)))
    assert abs(np.argmax(peaks) * 2 - 440) <= 2
    assert np.sqrt(np.mean(heard[middle] ** 2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.03)


LIVE = {
    name: CONTAINERS[name][0]
    for name in ("webm as a browser records it", "mp3", "ogg", "wav without a length", "mp4 in fragments")
} | {"flac": "-c:a flac -f flac", "aac": "-c:a aac -f adts"}


@pytest.mark.parametrize("name", LIVE)
def test_containers_that_can_be_read_as_they_come_are(gateway: Gateway, name: str):
    """The first text comes when three of twelve seconds have been sent."""
    data = ffmpeg(speech.wav(speech.two_cities().audio.samples[: 12 * RATE]), LIVE[name])
    client = Duplex(gateway, "audio/x-whatever")
    client.send(data[: len(data) // 4])
    client.read_until(b'"transcript.text.delta"')
    client.send(data[len(data) // 4 :])
    client.end()
    assert client.events()[-1] == "[DONE]"
    assert len(gateway.engine.submitted[-1].samples) == pytest.approx(12 * RATE, abs=0.15 * RATE)


def test_a_whole_file_may_be_the_body_too(gateway: Gateway):
    url = f"{gateway.url}/v1/audio/transcriptions?model=whisper-1&language=en&foo=1"
    answer = httpx.post(url, content=speech.wav(saying(1, 5)), headers={"content-type": "audio/wav"})
    assert answer.json()["text"] == words(1, 5)
    assert answer.headers["x-steno-ignored-fields"] == "foo"
    raw = httpx.post(url, content=s16le(saying(1, 5)), headers={"content-type": PCM})
    assert raw.json()["text"] == words(1, 5)


@pytest.mark.parametrize(
    ("content_type", "query", "param"),
    [
        ("audio/pcm", {}, "content-type"),
        ("audio/pcm;rate=fast", {}, "content-type"),
        ("audio/pcm;rate=200000", {}, "content-type"),
        ("audio/pcm;rate=16000;encoding=s24le", {}, "content-type"),
        ("audio/pcm;rate=16000;channels=99", {}, "content-type"),
        (PCM, {"language": "qq"}, "language"),
        (PCM, {"model": "whisper-9"}, "model"),
        (PCM, {"response_format": "verbose_json", "timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ("audio/wav", {}, "file"),
    ],
)
def test_what_cannot_be_served_is_refused_before_any_event(gateway: Gateway, content_type: str, query: dict, param: str):
    client = Duplex(gateway, content_type, **query)
    client.send(b"not audio, but long enough to be looked at " * 2000)
    client.end()
    assert client.status() in (400, 404)
    assert client.error()["param"] == param


def test_a_sender_that_falls_silent_is_told_and_left(gateway: Gateway):
    client = Duplex(gateway)
    client.send(s16le(saying(1, 5)))
    last = client.events()[-1]  # no end was sent
    assert last["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("seed", range(30))
def test_a_client_that_vanishes_frees_everything(gateway: Gateway, seed: int):
    client = Duplex(gateway, prompt="hang" if seed % 2 else "", language="en")
    for _ in range(seed % 7):
        client.send(s16le(saying(1, 3)))
    if seed % 5 == 0:
        client.end()
    client.vanish()
    wait_until(lambda: gateway.engine.requests == 0 and not gateway.services.live.open, seconds=10)


def test_a_flood_is_slowed_and_the_gateways_memory_bounded(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    """The engine hangs, so nothing that is sent can be let go; a client that sends an hour at once is kept waiting."""
    monkeypatch.setattr("routers.live.PROBE_SECONDS", 2)
    monkeypatch.setattr("routers.sse.PING_SECONDS", 1)
    client = Duplex(gateway, prompt="hang", language="en")
    sent = 0

    def flood() -> None:
        nonlocal sent
        second = s16le(saying(1, 5))
        try:
            for _ in range(3600):
                client.send(second)
                sent += 1
        except OSError:
            pass

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    try:
        # By what it holds: one of a client that vanished may still come and go.
        wait_until(lambda: [s for s in gateway.services.live.open if not s._room.is_set()])
        (session,) = [s for s in gateway.services.live.open if not s._room.is_set()]
        seen = -1
        while sent != seen:  # until the sockets are full too
            seen = sent
            time.sleep(0.5)
        kept = len(session._audio) / RATE
        assert 85 <= kept <= 95
        assert sent < 900  # the rest of it lies in the sockets' buffers
        quick = Duplex(gateway)
        quick.send(s16le(saying(1, 5)))
        quick.end()
        assert quick.events()[-2]["text"] == words(1, 5)
    finally:
        client.vanish()
        thread.join(30)


def wait_for_session(gateway: Gateway) -> list:
    wait_until(lambda: gateway.services.live.open)
    return list(gateway.services.live.open)


def test_sessions_past_the_bound_are_refused_before_any_work():
    with ready_gateway(lambda: FakeEngine(script), vad=False, max_requests=1) as gateway:
        first = Duplex(gateway)
        first.send(s16le(saying(1, 5)))
        wait_for_session(gateway)
        refused = Duplex(gateway)
        assert refused.status() == 503
        assert refused.error()["code"] == "server_is_overloaded"
        first.end()
        assert first.events()[-1] == "[DONE]"


def test_clients_that_never_speak_again_are_all_let_go():
    """Probe G02."""
    with ready_gateway(lambda: FakeEngine(script), vad=False, live_idle_seconds=1.0) as gateway:
        silent = [Duplex(gateway) for _ in range(32)]
        for client in silent:
            client.send(s16le(saying(1, 25)))
        assert {client.events()[-1]["error"]["code"] for client in silent} == {"request_timeout"}
        wait_until(lambda: gateway.services.admission.in_progress == gateway.engine.requests == 0)
        assert not gateway.services.live.open


@pytest.mark.real(order=196)  # it takes its time, which the fast tests shall not
def test_whatever_the_moment_a_client_vanishes_at_nothing_is_left_and_memory_stays_flat():
    def one(gateway: Gateway, chance: random.Random) -> None:
        client = Duplex(gateway, language="en", prompt=chance.choice(["", "hang"]))
        for _ in range(chance.randrange(12)):
            client.send(s16le(saying(1, chance.randrange(1, 12))))
        if chance.random() < 0.3:
            client.end()
        if chance.random() < 0.3:
            threading.Event().wait(chance.random() * 0.05)
        client.vanish()
        wait_until(lambda: gateway.engine.requests == 0 and not gateway.services.live.open, seconds=10)
        gateway.engine.submitted.clear()  # the scripted engine remembers what it was given

    chance, process = random.Random(9), psutil.Process()
    with ready_gateway(lambda: FakeEngine(script), vad=False) as gateway:
        for _ in range(200):
            one(gateway, chance)
        gc.collect()
        before = process.memory_info().rss
        for _ in range(500):
            one(gateway, chance)
        gc.collect()
        grown = (process.memory_info().rss - before) / 1e6
        print(f"memory after 500 sessions more: {grown:+.1f} MB")
        assert grown < 30
        wait_until_idle(gateway)
        assert gateway.services.admission._issued > 350  # most of them had begun
