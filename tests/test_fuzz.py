"""Made-up requests and audio, for as long as one likes: `make fuzz` takes ten minutes, the tests a few seconds.

Whatever is sent, the gateway answers with a status that it documents, never with 5xx, and works for nobody afterwards.
"""

import itertools
import json
import os
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import psutil
import pytest
from hypothesis import strategies as st

from tests import speech
from tests.gateway import wait_until
from tests.test_probes import CONTAINERS, ffmpeg
from tests.test_server import steno_serve

MINUTES = float(os.environ.get("STENO_FUZZ_MINUTES", "0"))
EXAMPLES = 200 if MINUTES else 25
MAX_GROWTH_BYTES = 100 << 20
PCM = "audio/pcm;rate=16000"
PACKET = bytes(3200)


class Fuzzed:
    """A gateway in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.url = url
        self.process = psutil.Process(process.pid)
        host, port = url.removeprefix("http://").split(":")
        self.address = (host, int(port))

    def state(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/health/ready").json()

    def is_idle(self) -> bool:
        state = self.state()
        return not state["transcriptions"] and not state["engine_requests"] and not state["live_sessions"]


@pytest.fixture(scope="module")
def gateway() -> Iterator[Fuzzed]:
    limits = ("--max-upload-mb", "1", "--max-audio-minutes", "0.5", "--live-idle-seconds", "2", "--session-grace-seconds", "1")
    with steno_serve(*limits, "--log-level", "error") as (process, url):
        yield Fuzzed(process, url)


@cache
def clip(container: str) -> bytes:
    wav = speech.wav(speech.tone(1.0))
    if container == "wav":
        return wav
    arguments, through_pipe = CONTAINERS[container]
    with tempfile.TemporaryDirectory() as folder:
        return ffmpeg(wav, arguments, None if through_pipe else Path(folder) / "made")


# --- multipart ----------------------------------------------------------------------------------------------------------

FIELDS = ["file", "model", "stream", "response_format", "language", "prompt", "temperature", "include[]"]
NAMES = st.sampled_from([*FIELDS, "file", "file", "model"]) | st.text(max_size=20)
VALUES = ["base", "whisper-1", "true", "json", "srt", "verbose_json", "en", "0.5", "logprobs"]
TEXTS = (st.sampled_from(VALUES) | st.text(max_size=50)).map(lambda text: text.encode(errors="replace"))
FILENAMES = [b'; filename="a.wav"', b'; filename="../../etc/passwd"', b"; filename*=UTF-8''%00", b""]
HEADERS = [b"", b"Content-Type: audio/wav\r\n", b"Content-Type: x\r\nX: y\r\n"]
JUNK = [b"\r\n", b"\n", b"--", b"--b", b"--b--", b"\r\n--b\r\n", b"\0", b'"', b";", b":", b"=", b"\xff\xfe", b"a" * 5000, b""]
TYPES = [f"multipart/form-data{boundary}" for boundary in ("; boundary=b", '; boundary="b"', "", "; boundary=")]


@st.composite
def parts(draw: st.DrawFn) -> bytes:
    name = draw(NAMES).encode(errors="replace").replace(b'"', b"%22")
    files = st.sampled_from([clip("wav"), clip("mp3")[:3000], b"", b"RIFF"])
    content = draw(files if name == b"file" else TEXTS)
    described = name + b'"' + draw(st.sampled_from(FILENAMES)) + b"\r\n" + draw(st.sampled_from(HEADERS))
    return b'--b\r\nContent-Disposition: form-data; name="' + described + b"\r\n" + content + b"\r\n"


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Make a multipart body, which then may lose its form in places."""
    body = b"".join(draw(st.lists(parts(), max_size=6))) + b"--b--\r\n"
    for _ in range(draw(st.integers(0, 3))):
        at, length = draw(st.integers(0, len(body))), draw(st.sampled_from([0, 0, 1, 2, 50]))
        body = body[:at] + draw(st.sampled_from(JUNK)) + body[at + length :]
    return body


def multipart(gateway: Fuzzed, data: st.DataObject) -> None:
    """Send a form in pieces, with its length or chunked."""
    body = data.draw(bodies())
    places = [0, *sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=4))), len(body)]
    pieces = [body[a:b] for a, b in itertools.pairwise(places)]
    if data.draw(st.booleans()):
        length = f"Content-Length: {len(body)}"
    else:
        length = "Transfer-Encoding: chunked"
        pieces = [f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces if piece] + [b"0\r\n\r\n"]
    kind = data.draw(st.sampled_from(TYPES))
    head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: {kind}\r\n{length}\r\n\r\n"
    answer = _send(gateway, [head.encode(), *pieces])
    status, text = int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]
    assert status in {200, 400, 404, 413}, answer[:500]
    if status != 200:
        assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}


def _send(gateway: Fuzzed, pieces: list[bytes]) -> bytes:
    answer = b""
    with socket.create_connection(gateway.address) as raw:
        raw.settimeout(60)
        try:
            for piece in pieces:
                raw.sendall(piece)
            while received := raw.recv(65536):
                answer += received
        except ConnectionResetError:
            pass
    assert answer, "no answer at all"
    return answer


# --- audio --------------------------------------------------------------------------------------------------------------

NUMBERS_THAT_LIE = [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\x80", b"\0" * 4]
AUDIO_TYPES = ["audio/ogg", "audio/webm", "audio/wav", "audio/mpeg", "audio/flac"]


def damaged(file: bytearray, chance: random.Random) -> bytes:
    """Damage a file, mostly its head, where a container says what it is."""
    for _ in range(chance.randint(1, 20)):
        at = chance.randrange(max(1, min(len(file), 200) if chance.random() < 0.7 else len(file)))
        match chance.randrange(5):
            case 0:
                file[at : at + 1] = bytes(byte ^ (1 << chance.randrange(8)) for byte in file[at : at + 1])
            case 1:
                file[at : at + 1] = chance.choice([b"\0", b"\xff", b"\x7f", b"\x80"])
            case 2:
                del file[at : at + chance.choice([1, 4, 100, 100_000])]
            case 3:
                file[at:at] = file[at : at + chance.choice([1, 8, 64])]
            case _:
                file[at : at + 4] = chance.choice(NUMBERS_THAT_LIE)
    return bytes(file)


def audio(gateway: Fuzzed, data: st.DataObject) -> None:
    """Send damaged audio, as a file or as if it were spoken."""
    whole = clip(data.draw(st.sampled_from(["wav", *CONTAINERS])))
    file = damaged(bytearray(whole), random.Random(data.draw(st.integers(0, 1 << 32))))
    url = f"{gateway.url}/v1/audio/transcriptions"
    if data.draw(st.booleans()):
        answer = httpx.post(url, data={"model": "base"}, files={"file": ("a", file)}, timeout=60)
    else:
        headers = {"Content-Type": data.draw(st.sampled_from(AUDIO_TYPES))}
        answer = httpx.post(f"{url}?model=base&stream=true", content=file, headers=headers, timeout=60)
    assert answer.status_code in {200, 400, 413}, answer.text
    if answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        last = answer.text.strip().splitlines()[-1]
        assert last == "data: [DONE]" or '"invalid_request_error"' in last, answer.text


# --- sessions -----------------------------------------------------------------------------------------------------------

STEPS = ["next", "next", "audio", "commit", "stop", "get", "delete"]
SEQUENCES = ["0", "1", "2", "-1", "x", "", "1e3", "99999999999999999999"]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
)
WANTED = st.fixed_dictionaries(
    {"model": st.just("base"), "content_type": st.sampled_from([PCM, PCM, "audio/pcmu", "audio/pcm", "x"])},
    optional={
        "language": st.sampled_from(["en", "xx", "", None, 7]),
        "endpointing": st.sampled_from(["server", "client", "none", None]),
        "chunking_strategy": st.sampled_from(["auto", {"type": "server_vad", "threshold": 2}, 3, {}]),
        "partials": st.sampled_from([True, "x", None]),
    },
)


def session(gateway: Fuzzed, data: st.DataObject) -> None:
    """Use a live session's resource in any order, with any values."""
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        made = client.post("/v1/audio/sessions", json=data.draw(WANTED | ANYTHING))
        assert made.status_code in {201, 400, 404}, made.text
        name = made.json()["id"] if made.status_code == 201 else data.draw(st.sampled_from(["sess_x", "%00", ".."]))
        path, sequence = f"/v1/audio/sessions/{name}", 0
        for step in data.draw(st.lists(st.sampled_from(STEPS), max_size=8)):
            answer = _step(client, path, step, sequence, data)
            assert answer.status_code in {200, 202, 204, 400, 404, 405, 409, 413}, (step, answer.status_code, answer.text)
            sequence += step == "next" and answer.status_code == 200
        if made.status_code == 201:
            client.delete(path)


def _step(client: httpx.Client, path: str, step: str, sequence: int, data: st.DataObject) -> httpx.Response:
    match step:
        case "next":
            return client.post(f"{path}/audio", params={"sequence": sequence}, content=PACKET)
        case "audio":
            content: Any = data.draw(st.binary(max_size=200) | st.just(b"x" * (5 << 20)))
            return client.post(f"{path}/audio", params={"sequence": data.draw(st.sampled_from(SEQUENCES))}, content=content)
        case "commit" | "stop":
            return client.post(f"{path}/{step}", content=data.draw(st.sampled_from([b"", b"{}", b"{", b"\xff"])))
        case "get":
            return client.get(path)
        case _:
            return client.delete(path)


@pytest.mark.parametrize("target", [multipart, audio, session], ids=lambda target: target.__name__)
def test_whatever_is_sent_is_answered_and_leaves_nothing_behind(gateway: Fuzzed, target):
    options = {"max_examples": EXAMPLES, "database": None, "suppress_health_check": list(hypothesis.HealthCheck)}
    end, rounds, before = time.monotonic() + 60 * MINUTES / 3, 0, 0
    while not rounds or time.monotonic() < end:

        @hypothesis.seed(rounds)
        @hypothesis.settings(**options)
        @hypothesis.given(st.data())
        def attack(data: st.DataObject) -> None:
            target(gateway, data)

        attack()
        rounds += 1
        before = before or gateway.process.memory_info().rss  # what is loaded at first use is no growth
    wait_until(gateway.is_idle)
    assert gateway.state()["status"] == "ready"
    growth = gateway.process.memory_info().rss - before
    print(f"{target.__name__}: {rounds * EXAMPLES} of them, memory grew by {growth / 1e6:.1f} MB")
    assert growth < MAX_GROWTH_BYTES
