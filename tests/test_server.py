"""How the server stops, and how little a rude client's head costs it."""

import contextlib
import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from app import server
from app.settings import Settings
from engine.base import DecodeRequest
from engine.fake import FakeEngine, Reply
from engine.supervised import SupervisedEngine
from tests import speech
from tests.crowd import Client, all_answered, start
from tests.gateway import Gateway, running_gateway, wait_until
from tests.test_decode import encode
from tests.test_wire import raw_request

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def script(request: DecodeRequest) -> Reply:
    return Reply((" a",), first_seconds=3600.0) if request.previous_text == "hang at once" else Reply((" a", " b"))


@contextmanager
def gateway_on(**settings) -> Iterator[Gateway]:
    with running_gateway(
        lambda: SupervisedEngine(lambda: FakeEngine(script, remember=False)), Settings(_env_file=None, vad=False, **settings)
    ) as running:
        running.run(running.engine.wait_ready)
        yield running


def run_soon(gateway: Gateway, function: Callable[..., None], *arguments: object) -> None:
    async def call() -> None:
        function(*arguments)

    gateway.run(call)


# --- stopping -----------------------------------------------------------------------------------------------------------


def test_a_stop_lets_all_end_that_does_so_in_time_and_tells_the_rest():
    """Speakers get their text; what hangs gets an error; then all is over."""
    with gateway_on(shutdown_grace_seconds=1.0) as gateway:
        spoken = speech.tone(1.5)
        speakers = [Client(gateway.url, "base", spoken, packet_seconds=0.2) for _ in range(3)]
        hanging = [Client(gateway.url, "base", spoken, prompt="hang at once") for _ in range(3)]
        streaming = [Client(gateway.url, "base", spoken, prompt="hang at once", stream=True) for _ in range(3)]
        start(*speakers, *hanging, *streaming)
        wait_until(lambda: gateway.services.admission.in_progress == 9 and gateway.engine.requests >= 6)
        run_soon(gateway, gateway.server.handle_exit, signal.SIGTERM, None)
        assert all_answered([*speakers, *hanging, *streaming], within=20)
        for speaker in speakers:
            assert speaker.text.endswith("data: [DONE]\n\n")
        for client in hanging:
            assert client.status == 503
            assert "the gateway is stopping" in client.text
        for client in streaming:
            assert client.status == 200
            assert client.error
            assert "the gateway is stopping" in client.text
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{gateway.url}/health")


@contextmanager
def steno_serve(*flags: str, limit: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve on the scripted engine, as a process of its own; `limit` is what a shell does to it before."""
    command = [sys.executable, "-m", "app.cli", "serve", "--engine", "fake", "--port", "0", "--no-vad", *flags]
    if limit:
        command = ["bash", "-c", f"{limit}exec {shlex.join(command)}"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "NO_COLOR": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            url = process.stderr.readline().split()[-1]
            wait_until(lambda: httpx.get(f"{url}/health/ready").status_code == 200)
            yield process, url
        finally:
            process.kill()


def test_a_second_signal_ends_the_process_at_once():
    with steno_serve() as (process, url), socket.create_connection(url.removeprefix("http://").split(":")) as raw:
        raw.sendall(raw_request({"model": "whisper-1"}, speech.wav(speech.tone(20.0)))[:5000])  # and never ends
        wait_until(lambda: httpx.get(f"{url}/health/ready").json()["transcriptions"] == 1)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM  # the grace period is longer


# --- logs and traces ------------------------------------------------------------------------------------------------------


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """Receive traces as an OpenTelemetry collector does."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            import gzip

            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}", received
    http.shutdown()
    thread.join()


def test_a_request_is_followed_through_traces_and_logs_and_none_tells_what_was_said():
    flags = ("--log-format", "json", "--otlp-endpoint")
    with collector() as (endpoint, received), steno_serve(*flags, endpoint) as (process, url):
        parent = f"00-{TRACE}-00f067aa0ba902b7-01"
        headers = {"traceparent": parent, "x-request-id": "mine-1", "Authorization": "Bearer sk-secret-0123456789"}
        answer = httpx.post(
            f"{url}/v1/audio/transcriptions",
            data={"model": "base", "prompt": "A secret prompt."},
            files={"file": speech.wav(speech.tone(3.0))},
            headers=headers,
        )
        assert answer.json()["text"] == "3.00 seconds of audio."
        assert answer.headers["traceparent"].split("-")[1] == TRACE
        assert answer.headers["traceparent"] != parent
        live = Client(url, "base", speech.tone(2.0), packet_seconds=0.05)
        live.run()
        assert "seconds of audio" in live.text
        httpx.get(f"{url}/v1/models", params={"token": "a-secret-token"})
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()

    scopes = [scope for batch in received for resource in batch.resource_spans for scope in resource.scope_spans]
    spans = [span for scope in scopes for span in scope.spans]
    ours = [span for span in spans if span.trace_id.hex() == TRACE]
    names = {span.name for span in ours}
    assert {"POST /v1/audio/transcriptions", "steno.read", "steno.window", "steno.decode", "steno.generate"} <= names
    server_span = next(span for span in ours if span.name.startswith("POST"))
    assert server_span.parent_span_id.hex() == "00f067aa0ba902b7"
    by_id = {span.span_id: span for span in ours}
    for span in ours:
        if span is not server_span:
            assert span.parent_span_id in by_id
            assert span.end_time_unix_nano >= span.start_time_unix_nano
    assert {"steno.partial", "steno.final"} <= {span.name for span in spans}

    records = [json.loads(line) for line in lines if line.startswith("{")]
    access = [r for r in records if r["logger"] == "steno.access"]
    assert [(r["method"], r["path"], r["status"], r["client"]) for r in access] == [
        ("POST", "/v1/audio/transcriptions", 200, "anyone"),
        ("POST", "/v1/audio/transcriptions", 200, "anyone"),
        ("GET", "/v1/models", 200, "anyone"),
    ]
    assert access[0]["request_id"] == "mine-1"
    assert next(r for r in records if "s live" in r["message"])["request_id"] == access[1]["request_id"]
    everything = "\n".join(lines) + "".join(map(str, spans))
    for secret in ("seconds of audio", "secret prompt", "sk-secret", "a-secret-token"):
        assert secret not in everything


# --- heads --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with gateway_on(max_upload_mb=1) as running:
        yield running


def answered(raw: socket.socket) -> bytes:
    """Read until the server closes."""
    raw.settimeout(30)
    received = b""
    try:
        while piece := raw.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


def head(answer: bytes) -> tuple[int, dict[str, dict[str, str]]]:
    first, _, body = answer.partition(b"\r\n\r\n")
    return int(first.split()[1]), json.loads(body)


@pytest.mark.parametrize(
    "sent",
    [
        GET + b"X: " + b"a" * 200_000,
        b"GET /" + b"a" * 200_000,
        GET + b"".join(b"X%d: a\r\n" % i for i in range(3000)),
        GET + b"X" * 200_000,
        GET + b"X: a\r\n" * 500 + b"\r\n",
    ],
    ids=["value", "url", "many", "name", "complete"],
)
def test_a_head_without_end_is_refused_in_its_middle(gateway: Gateway, sent: bytes):
    with socket.create_connection(gateway.address) as raw:
        raw.sendall(sent[:150_000] if b"\r\n\r\n" not in sent else sent)
        status, body = head(answered(raw))
    assert status == 431
    assert body["error"]["type"] == "invalid_request_error"


def test_what_is_not_http_is_refused_in_openais_shape(gateway: Gateway):
    with socket.create_connection(gateway.address) as raw:
        raw.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello")
        status, body = head(answered(raw))
    assert status == 400
    assert set(body["error"]) == {"message", "type", "param", "code"}


def test_a_large_but_honest_head_is_read(gateway: Gateway):
    with socket.create_connection(gateway.address) as raw:
        raw.sendall(GET + b"X: " + b"a" * 30_000 + b"\r\nConnection: close\r\n\r\n")
        assert head(answered(raw))[0] == 200


@pytest.mark.parametrize("sent", [b"", GET, GET + b"X: "], ids=["nothing", "half", "less"])
def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, sent: bytes):
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.5)
    with gateway_on() as gateway, socket.create_connection(gateway.address) as raw:
        raw.sendall(sent)
        dripping = threading.Thread(target=lambda: sent and sends(raw, b"a"))
        dripping.start()
        assert answered(raw) == b""
        dripping.join()
        wait_until(lambda: not gateway.server.server_state.connections)


def sends(raw: socket.socket, piece: bytes) -> bool:
    """Send a little, again and again; say whether that goes on."""
    try:
        for _ in range(200):
            raw.sendall(piece)
            threading.Event().wait(0.05)
    except OSError:
        return False
    return True


def test_an_idle_connection_is_kept_for_longer_than_a_head_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.3)
    with gateway_on() as gateway, socket.create_connection(gateway.address) as raw:
        raw.settimeout(30)
        for _ in range(3):
            raw.sendall(GET + b"\r\n")
            received = b""
            while b"alive" not in received:
                received += raw.recv(65536)
            threading.Event().wait(0.5)


def test_a_client_that_sends_on_after_its_answer_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "LINGER_SECONDS", 0.5)
    with gateway_on() as gateway, socket.create_connection(gateway.address) as raw:
        raw.settimeout(30)
        raw.sendall(b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        assert b"405" in raw.recv(65536)
        assert not sends(raw, b"5\r\nhello\r\n")
        wait_until(lambda: not gateway.server.server_state.connections)


def test_trailers_without_an_end_are_not_kept(gateway: Gateway):
    with socket.create_connection(gateway.address) as raw:
        raw.sendall(b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ")
        with contextlib.suppress(OSError):
            for _ in range(50):
                raw.sendall(b"y" * 10_000)
                threading.Event().wait(0.02)
        wait_until(lambda: not gateway.server.server_state.connections)


@pytest.mark.parametrize("after", [b"\r\n", b"5\r\nhello\r\n0\r\n\r\n"], ids=["an empty line", "the rest of a body"])
def test_whatever_follows_an_answer_no_connection_is_kept_for_ever(monkeypatch: pytest.MonkeyPatch, after: bytes):
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.5)
    with gateway_on() as gateway, socket.create_connection(gateway.address) as raw:
        begun = b"Transfer-Encoding: chunked\r\n" if after != b"\r\n" else b""
        raw.sendall(b"POST /health HTTP/1.1\r\nHost: x\r\n" + begun + b"\r\n")
        raw.settimeout(30)
        assert b"405" in raw.recv(65536)
        raw.sendall(after)
        wait_until(lambda: not gateway.server.server_state.connections, seconds=20)


def test_thousands_of_idle_connections_keep_nobody_from_being_served(gateway: Gateway):
    server.raise_descriptor_limit()
    count = min(2000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)  # both ends are in this process
    before = psutil.Process().memory_info().rss
    idle = [socket.create_connection(gateway.address) for _ in range(count)]
    try:
        for raw in idle:
            raw.sendall(GET)  # the end of the head is missing
        answer = httpx.post(
            f"{gateway.url}/v1/audio/transcriptions",
            data={"model": "base"},
            files={"file": speech.wav(speech.tone(1.0))},
            timeout=30,
        )
        assert answer.json()["text"] == "a b"
        assert psutil.Process().memory_info().rss - before < 200 << 20
    finally:
        for raw in idle:
            raw.close()
    wait_until(lambda: not gateway.server.server_state.connections)


def test_bombs_are_refused_at_the_limit_and_cost_little():
    """Probe H02: ten hours of Opus in a few MB, three times at once. And H01: others are answered meanwhile."""
    minute = encode(np.zeros(60 * 48_000, np.float32), "libopus", "ogg", rate=48_000)
    bomb = minute * 600
    assert len(bomb) < 25 << 20
    with gateway_on(max_audio_minutes=20) as gateway:
        answers: list[httpx.Response] = []

        def post() -> None:
            data, files = {"model": "base"}, {"file": ("bomb.ogg", bomb)}
            answers.append(httpx.post(f"{gateway.url}/v1/audio/transcriptions", data=data, files=files, timeout=300))

        before = psutil.Process().memory_info().rss
        clients = [threading.Thread(target=post) for _ in range(3)]
        for client in clients:
            client.start()
        most, alive = 0, 0
        while any(client.is_alive() for client in clients):
            alive += httpx.get(f"{gateway.url}/health").status_code == 200
            most = max(most, psutil.Process().memory_info().rss - before)
            threading.Event().wait(0.05)
        assert [answer.status_code for answer in answers] == [400] * 3
        assert "1200 seconds" in answers[0].json()["error"]["message"]
        assert alive >= 10
        assert most < 300 << 20, most


def test_descriptors_are_enough_and_are_not_all_taken_by_connections():
    """The soft limit is raised; at the hard one newcomers are hung up on, and those who are served go on."""
    with steno_serve(limit="ulimit -Sn 80; ulimit -Hn 160; ") as (_, url):
        assert "process_max_fds 160.0" in httpx.get(f"{url}/metrics").text
        address = url.removeprefix("http://").split(":")
        served = socket.create_connection(address)
        served.sendall(GET + b"\r\n")
        served.settimeout(30)
        assert b"200 OK" in served.recv(65536)
        idle = [socket.create_connection(address) for _ in range(300)]
        try:
            wait_until(lambda: any(_is_closed(raw) for raw in idle))
            served.sendall(GET + b"\r\n")
            received = b""
            while b"200 OK" not in received:
                received += served.recv(65536)
        finally:
            for raw in (served, *idle):
                raw.close()
        wait_until(lambda: _health(url) == 200)


def _is_closed(raw: socket.socket) -> bool:
    raw.setblocking(False)
    try:
        return raw.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _health(url: str) -> int:
    try:
        return httpx.get(f"{url}/health").status_code
    except httpx.HTTPError:
        return 0
