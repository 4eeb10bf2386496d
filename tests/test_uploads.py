"""Uploads that take their time: text before the file's end, fields in any order, clients that stall or leave, and addresses."""

import asyncio
import concurrent.futures
import contextlib
import http.server
import json
import re
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from app.audio.fetch import Fetcher
from engine.base import DecodeRequest
from engine.fake import FakeEngine, Reply
from routers import bodies
from tests import speech
from tests.gateway import Gateway, wait_until
from tests.test_wire import ready_gateway

SECONDS = 95  # four windows
LONG = speech.wav(speech.tone(float(SECONDS)))
BOUNDARY = "steno"


def script(request: DecodeRequest) -> Reply:
    """Tell which prompt was given, and how much was heard, in enough tokens to be believed."""
    return Reply(
        (f" {request.previous_text or 'nothing'}", " told,", " and", " so", " many", " samples:", f" {len(request.samples)}.")
    )


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with ready_gateway(lambda: FakeEngine(script), max_upload_mb=4, vad=False) as gateway:
        yield gateway


pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def field(name: str, value: str) -> bytes:
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


def file_part(data: bytes) -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    return head.encode() + data + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
STREAM = field("model", "whisper-1") + field("stream", "true")


class SlowClient:
    """Sends a request piece by piece."""

    def __init__(self, gateway: Gateway) -> None:
        self._raw = socket.create_connection(gateway.address)
        self._raw.settimeout(60)
        self._received = b""
        self._raw.sendall(
            "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n"
            f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n".encode()
        )

    def send(self, data: bytes) -> None:
        self._raw.sendall(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def end(self) -> None:
        self._raw.sendall(b"0\r\n\r\n")

    def read_until(self, wanted: bytes) -> bytes:
        while wanted not in self._received:
            piece = self._raw.recv(65536)
            assert piece, f"the answer ended without {wanted!r}: {self._received!r}"
            self._received += piece
        return self._received

    def read_all(self) -> bytes:
        while piece := self._raw.recv(65536):
            self._received += piece
        return self._received

    def events(self) -> list:
        data = re.findall(rb"data: (.*)", self.read_all())
        return [json.loads(line) if line.strip() != b"[DONE]" else "[DONE]" for line in data]

    def status(self) -> int:
        return int(self.read_all().split()[1])

    def error(self) -> dict:
        return json.loads(re.search(rb"\{.*\}", self.read_all(), re.DOTALL).group())["error"]

    def leave(self) -> None:
        self._raw.close()


@pytest.fixture
def client(gateway: Gateway) -> Iterator[SlowClient]:
    client = SlowClient(gateway)
    yield client
    client.leave()


def test_text_comes_while_the_file_still_arrives(client: SlowClient):
    client.send(STREAM + field("prompt", "early") + file_part(LONG)[: len(LONG) // 2])
    client.read_until(b'"transcript.text.delta"')  # half of the file is not sent yet
    client.send((file_part(LONG) + END)[len(LONG) // 2 :])
    client.end()
    received = client.events()
    done = received[-2]
    assert received[-1] == "[DONE]"
    assert "".join(event["delta"] for event in received[:-2]) == done["text"]
    assert sum(map(int, re.findall(r"samples: (\d+)", done["text"]))) == SECONDS * speech.RATE
    assert done["text"].count("early told") == 4


def test_without_a_stream_the_work_begins_early_too(gateway: Gateway, client: SlowClient):
    before = len(gateway.engine.submitted)
    client.send(field("model", "whisper-1") + file_part(LONG)[: len(LONG) // 2])
    wait_until(lambda: len(gateway.engine.submitted) > before)
    client.send((file_part(LONG) + END)[len(LONG) // 2 :])
    client.end()
    assert b"nothing told, and so many samples" in client.read_all()


def test_a_field_after_the_file_counts_when_nothing_was_shown_yet(client: SlowClient):
    client.send(field("model", "whisper-1") + file_part(LONG)[: len(LONG) // 2])
    client.send((file_part(LONG) + field("prompt", "late") + field("stream", "true") + END)[len(LONG) // 2 :])
    client.end()
    received = client.events()
    assert received[-2]["text"].count("late told") == 4
    assert "".join(event["delta"] for event in received[:-2]) == received[-2]["text"]


def test_all_fields_may_come_after_the_file(client: SlowClient):
    client.send(file_part(LONG))
    client.send(field("prompt", "last") + field("model", "whisper-1") + END)
    client.end()
    assert b"last told" in client.read_all()


def test_a_field_that_would_change_text_already_sent_ends_the_stream_with_an_error(client: SlowClient):
    client.send(STREAM + file_part(LONG)[: len(LONG) // 2])
    client.read_until(b'"transcript.text.delta"')
    client.send((file_part(LONG) + field("prompt", "too late") + END)[len(LONG) // 2 :])
    client.end()
    *_, last = client.events()
    assert "before the file" in last["error"]["message"]


def test_a_late_field_that_changes_no_text_is_honoured(client: SlowClient):
    client.send(STREAM + file_part(LONG)[: len(LONG) // 2])
    client.read_until(b'"transcript.text.delta"')
    client.send((file_part(LONG) + field("response_format", "verbose_json") + END)[len(LONG) // 2 :])
    client.end()
    done = client.events()[-2]
    assert len(done["segments"]) == 4


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [({"model": "whisper-9"}, 404, "model"), ({"model": "whisper-1", "temperature": "9"}, 400, "temperature")],
)
def test_an_error_is_told_when_the_client_has_sent_all(gateway: Gateway, client: SlowClient, fields, status, param):
    """A client that still writes when its server answers and closes sees a broken pipe, and no answer."""
    client.send(b"".join(field(*item) for item in fields.items()) + file_part(LONG)[: len(LONG) // 2])
    client.send((file_part(LONG) + END)[len(LONG) // 2 :])
    client.end()
    assert client.status() == status
    assert client.error()["param"] == param


def test_sound_that_is_none_is_a_400_though_the_work_began_early(client: SlowClient):
    client.send(STREAM + file_part(b"not audio at all " * 5000)[:50_000])
    client.send((file_part(b"not audio at all " * 5000) + END)[50_000:])
    client.end()
    assert (client.status(), client.error()["param"]) == (400, "file")


def test_slow_uploads_keep_nobody_waiting(gateway: Gateway):
    """Each blocks a thread that reads; the threads that compute are few, and none of them waits for bytes."""
    slow = [SlowClient(gateway) for _ in range(12)]
    for client in slow:
        client.send(STREAM + file_part(LONG)[:20_000])
    wait_until(lambda: gateway.services.admission.in_progress == 12)
    quick = post_file(gateway, speech.wav(speech.tone(1.0)))
    assert "16000" in quick.json()["text"]
    for client in slow:
        client.send((file_part(LONG) + END)[20_000:])
        client.end()
    assert [client.events()[-1] for client in slow] == ["[DONE]"] * 12


def test_a_client_that_leaves_in_the_middle_of_an_early_stream_frees_everything(gateway: Gateway, client: SlowClient):
    client.send(STREAM + file_part(LONG)[: len(LONG) // 2])
    client.read_until(b'"transcript.text.delta"')
    assert gateway.services.admission.in_progress == 1
    client.leave()
    wait_until(lambda: gateway.services.admission.in_progress == 0, seconds=10)


@pytest.mark.parametrize("streams", [False, True])
def test_a_file_that_turns_out_too_large_is_refused_though_its_work_began(gateway: Gateway, client: SlowClient, streams: bool):
    before = len(gateway.engine.submitted)
    client.send((STREAM if streams else field("model", "whisper-1")) + file_part(LONG)[: len(LONG) // 2])
    wait_until(lambda: len(gateway.engine.submitted) > before)
    if streams:
        client.read_until(b'"transcript.text.delta"')
    sent = len(LONG) // 2
    client.send(b"\0" * ((4 << 20) + 100_000 - sent) + b"\r\n" + END)  # so little too much that it is read to its end
    client.end()
    if streams:
        *_, last = client.events()
        assert last["error"]["code"] == "request_too_large"
    else:
        assert (client.status(), client.error()["code"]) == (413, "request_too_large")


def send_without_end(client: SlowClient) -> None:
    for _ in range(1000):
        client.send(b"\0" * (1 << 20))


def test_a_body_that_is_far_too_large_is_not_read_to_its_end(gateway: Gateway, client: SlowClient):
    """A client that still writes sees that it is cut off."""
    client.send(STREAM + file_part(LONG)[: len(LONG) // 2])
    client.read_until(b'"transcript.text.delta"')
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        send_without_end(client)
    wait_until(lambda: gateway.services.admission.in_progress == 0, seconds=10)


def test_an_upload_that_stands_still_is_a_408(client: SlowClient, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bodies, "STALL_SECONDS", 0.2)
    client.send(field("model", "whisper-1") + file_part(LONG)[:20_000])
    assert (client.status(), client.error()["code"]) == (408, "request_timeout")


def test_a_form_that_ends_in_its_middle_is_a_400(client: SlowClient):
    client.send(field("model", "whisper-1") + file_part(LONG))
    client.end()
    assert (client.status(), client.error()["type"]) == (400, "invalid_request_error")


def test_a_field_that_is_far_too_long_is_a_400_that_names_it(client: SlowClient):
    client.send(field("model", "whisper-1") + field("prompt", "x" * 300_000))
    client.send(file_part(b"") + END)
    client.end()
    assert (client.status(), client.error()["param"]) == (400, "prompt")


@pytest.mark.real(order=195)  # it computes for long, which the fast tests shall not
def test_the_event_loop_keeps_turning_while_large_files_are_decoded(monkeypatch: pytest.MonkeyPatch):
    longest = 0.0
    run = asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        nonlocal longest
        began = time.thread_time()
        run(handle)
        longest = max(longest, time.thread_time() - began)

    minutes = speech.wav(np.tile(speech.two_cities().audio.samples, 16))  # 12 of them, 23 MB
    with ready_gateway(lambda: FakeEngine(script)) as gateway:
        assert post_file(gateway, speech.wav(speech.tone(1.0))).status_code == 200  # what is loaded once is not counted
        monkeypatch.setattr(asyncio.Handle, "_run", measured)
        with concurrent.futures.ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(lambda stream: post_file(gateway, minutes, stream=stream), ["true", "false"] * 4))
        monkeypatch.undo()
    assert {answer.status_code for answer in answers} == {200}
    print(f"longest step of the event loop: {longest * 1000:.1f} ms of CPU time")
    assert 0 < longest < 0.1


def post_file(gateway: Gateway, file: bytes, **fields: str) -> httpx.Response:
    form = {"model": "whisper-1"} | fields
    return httpx.post(f"{gateway.url}/v1/audio/transcriptions", data=form, files={"file": file}, timeout=600)


def test_a_form_of_endless_fields_is_a_400(client: SlowClient):
    client.send(b"".join(field(f"f{i}", "x") for i in range(1100)) + field("model", "whisper-1") + file_part(LONG) + END)
    client.end()
    assert (client.status(), client.error()["type"]) == (400, "invalid_request_error")


# --- addresses ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def files() -> Iterator[str]:
    """A server of audio, with its faults, at the address that is given."""
    clip = speech.wav(speech.tone(3.0))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers = {"/clip": (200, clip), "/page": (200, b"<html>"), "/large": (200, b"\0" * (5 << 20))}
            status, body = answers.get(self.path, (404, b""))
            if self.path == "/round":
                status = 302
            self.send_response(status)
            self.send_header("Location", "/round")
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@contextlib.contextmanager
def fetching_gateway(**options) -> Iterator[Gateway]:
    with ready_gateway(lambda: FakeEngine(script), vad=False) as gateway:
        object.__setattr__(gateway.services, "fetcher", Fetcher(**({"max_bytes": 4 << 20, "seconds": 20} | options)))
        yield gateway


def ask(gateway: Gateway, url: str, **fields: str) -> httpx.Response:
    form = {"model": (None, "whisper-1"), "url": (None, url)} | {name: (None, value) for name, value in fields.items()}
    return httpx.post(f"{gateway.url}/v1/audio/transcriptions", files=form, timeout=60)


def test_audio_is_fetched_from_an_address(files: str):
    with fetching_gateway(private=True) as gateway:
        assert "samples: 48000." in ask(gateway, f"{files}/clip").json()["text"]
        assert '"transcript.text.done"' in ask(gateway, f"{files}/clip", stream="true").text
        for path, reason in {"/nothing": "status 404", "/round": "too many", "/large": "Maximum content size"}.items():
            refused = ask(gateway, files + path)
            assert refused.status_code == (413 if path == "/large" else 400)
            assert (refused.json()["error"]["param"], reason in refused.json()["error"]["message"]) == ("url", True)
        assert ask(gateway, f"{files}/page").json()["error"]["param"] == "file"


def test_addresses_that_are_not_public_are_refused(files: str):
    port = files.rsplit(":", 1)[1]
    with fetching_gateway() as gateway:
        for host in (
            "127.0.0.1",
            "localhost",
            "[::1]",
            "0.0.0.0",
            "2130706433",
            "169.254.169.254",
            "10.0.0.1",
            "[::ffff:127.0.0.1]",
        ):
            refused = ask(gateway, f"http://{host}:{port}/clip")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "url"), host
        for url in ("file:///etc/passwd", "ftp://example.org/a", "not an address", "http://", "http://[", "//x"):
            refused = ask(gateway, url)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "url"), url
        assert not gateway.engine.submitted


def test_addresses_are_refused_where_they_are_not_wanted(gateway: Gateway):
    refused = ask(gateway, "http://example.org/a.wav")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_value")
