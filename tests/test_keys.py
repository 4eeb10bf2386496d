"""Keys: who is let in, what each key may have, and that no key is ever told."""

import hashlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.keys import Keys, KeysError, new_key
from app.settings import Settings
from engine.base import DecodeRequest
from engine.fake import FakeEngine, Reply
from tests import speech
from tests.gateway import Gateway, running_gateway, wait_until

ORIGIN = "https://page.example"
ALICE, BOB, ADMIN = "sk-alice-0123456789", "sk-bob-0123456789abc", "sk-admin-0123456789"

# --- the keys themselves ------------------------------------------------------------------------------------------------


def test_a_key_is_known_by_its_name_however_it_was_entered(tmp_path: Path):
    file = tmp_path / "keys"
    digest = hashlib.sha256(BOB.encode()).hexdigest()
    file.write_text(f"# ours\n\nbob:sha256:{digest}  # from January on\ncarol@home:{'c' * 16}\n")
    keys = Keys([f"alice:{ALICE}", "", "d" * 20], file)
    assert [keys.name_of(key) for key in (ALICE, BOB, "c" * 16, "d" * 20)] == ["alice", "bob", "carol@home", "key-3"]
    assert [keys.name_of(key) for key in ("", "alice", digest, f"sha256:{digest}", ALICE + "x", ALICE[:-1], "ü")] == [None] * 7


@given(key=st.text())
def test_nothing_else_is_a_key(key: str):
    assert Keys([f"alice:{ALICE}"]).name_of(key) == ("alice" if key == ALICE else None)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("alice:short", "16 characters"),
        ("sha256:" + "0" * 64, None),  # a key named sha256
        ("alice:sha256:123", "16 characters"),
        ("a b:" + "x" * 20, "a name is"),
        (":" + "x" * 20, "a name is"),
        ("tiny", "16 characters"),
        ("alice:" + "ü" * 20, "ASCII"),
    ],
)
def test_what_is_no_key_is_refused_by_its_place_and_never_shown(entry: str, why: str | None):
    if why is None:
        assert len(Keys([entry])) == 1
        return
    with pytest.raises(KeysError, match=why) as refused:
        Keys(["x" * 20, entry])
    assert "entry 2" in str(refused.value)
    assert entry.rpartition(":")[2] not in str(refused.value)


def test_keys_come_and_go_with_the_file_and_a_broken_file_changes_nothing(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text(f"alice:{ALICE}\n")
    keys = Keys([f"bob:{BOB}"], file)
    file.write_text(f"carol:{'c' * 20}\n")
    keys.reload()
    assert [keys.name_of(key) for key in (ALICE, BOB, "c" * 20)] == [None, "bob", "carol"]
    for broken in ("carol:short\n", "", "\n# nobody\n"):
        file.write_text(broken)
        with pytest.raises(KeysError):
            keys.reload()
        assert keys.name_of("c" * 20) == "carol"
    file.unlink()
    with pytest.raises(KeysError, match="No such file"):
        keys.reload()
    assert keys.name_of(BOB) == "bob"


def test_a_new_key_is_valid_by_a_line_that_does_not_tell_it():
    key, line = new_key("alice")
    assert Keys([line]).name_of(key) == "alice"
    assert key not in line
    assert new_key("alice")[0] != key
    with pytest.raises(KeysError):
        new_key("no name: this")


# --- what each may have -------------------------------------------------------------------------------------------------


# --- on the wire --------------------------------------------------------------------------------------------------------


def clip(seconds: float) -> tuple[str, bytes]:
    return "a.wav", speech.wav(speech.tone(seconds))


def slowly(request: DecodeRequest) -> Reply:
    return Reply((" a", " b"), first_seconds=3.0 if request.previous_text == "slow" else 0.0)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory):
    settings = Settings(
        _env_file=None,
        api_keys=f"alice:{ALICE},bob:{BOB}",
        admin_key=ADMIN,
        key_requests=3,
        key_live_sessions=1,
        key_audio_seconds=40,
        vad=False,
        max_upload_mb=2,
        cors_origins=(ORIGIN,),
        bench_dir=tmp_path_factory.mktemp("bench"),
    )
    with running_gateway(lambda: FakeEngine(slowly), settings) as running:
        running.run(running.engine.wait_ready)
        yield running


def test_openais_client_is_let_in_with_a_key_and_nobody_without(gateway: Gateway):
    with gateway.client(api_key=ALICE) as client:
        heard = client.audio.transcriptions.with_raw_response.create(model="whisper-1", file=clip(2.0))
        assert heard.parse().text == "a b"
        assert heard.headers["x-ratelimit-limit-requests"] == "3"
        assert heard.headers["x-ratelimit-limit-audio-seconds"] == "40"
        assert client.models.list().data[0].id == "base"
    with gateway.client(api_key="sk-wrong-0123456789") as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            client.audio.transcriptions.create(model="whisper-1", file=clip(2.0))
        assert refused.value.code == "invalid_api_key"
        assert "sk-wrong" not in refused.value.message


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v1/audio/transcriptions?model=base&stream=true"),
        ("POST", "/v1/audio/translations"),
        ("POST", "/v1/audio/sessions"),
        ("GET", "/v1/audio/sessions/x"),
        ("POST", "/v1/audio/sessions/x/audio?sequence=0"),
        ("POST", "/v1/audio/sessions/x/commit"),
        ("POST", "/v1/audio/sessions/x/stop"),
        ("DELETE", "/v1/audio/sessions/x"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/base"),
        ("GET", "/bench"),
    ],
)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer"}, {"Authorization": f"Basic {ALICE}"}, {"api-key": "x"}])
def test_every_door_asks_for_a_key_in_openais_words(gateway: Gateway, method: str, path: str, headers: dict[str, str]):
    content = {"Content-Type": "audio/pcm;rate=16000"} if "stream" in path else {}
    response = httpx.request(method, gateway.url + path, headers=headers | content)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (401, "invalid_request_error", "invalid_api_key")
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "headers", [{"authorization": f"bearer {ALICE}"}, {"Authorization": f"BEARER  {BOB}"}, {"api-key": ALICE}]
)
def test_a_key_comes_as_any_client_writes_it(gateway: Gateway, headers: dict[str, str]):
    assert httpx.get(f"{gateway.url}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("key", ["", "Authorization: Bearer wrong\r\n"])
def test_a_bad_key_is_refused_before_the_body_is_asked_for(gateway: Gateway, key: str):
    """Probe B08: curl waits to be told to continue, and must not be told so first."""
    with socket.create_connection(gateway.address, timeout=20) as raw:
        raw.sendall(
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"
            + f"{key}Content-Length: 999\r\nExpect: 100-continue\r\n\r\n".encode()
        )
        assert raw.makefile("rb").readline().startswith(b"HTTP/1.1 401")


def test_a_page_without_a_good_key_may_ask_and_may_read_why_it_is_refused(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    """Probe B11: a browser's preflight carries no key, and an error without CORS headers is only "Failed to fetch"."""
    url = f"{gateway.url}/v1/audio/transcriptions"
    origin = {"Origin": ORIGIN}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = httpx.options(url, headers=origin | asked)
    assert preflight.status_code in {200, 204}
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    key = {"Authorization": f"Bearer {ALICE}"}

    def broken(*_: object) -> None:
        raise RuntimeError("nobody foresaw it")

    too_large = {"data": {"model": "base"}, "files": {"file": bytes(3 << 20)}, "headers": origin | key}
    answers = [
        httpx.post(url, data={"model": "base"}, files={"file": clip(1.0)}, headers=origin | {"Authorization": "bearer wrong"}),
        httpx.post(url, **too_large),
        httpx.post(url, data={"model": "none"}, files={"file": clip(1.0)}, headers=origin | key),
    ]
    monkeypatch.setattr("app.transcribe.Transcriber.check", broken)
    answers.append(httpx.post(url, data={"model": "base"}, files={"file": clip(1.0)}, headers=origin | key))
    assert [answer.status_code for answer in answers] == [401, 413, 404, 500]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]


def test_health_is_open_and_the_bench_is_the_admins(gateway: Gateway):
    assert httpx.get(f"{gateway.url}/health/live").status_code == 200
    assert httpx.get(f"{gateway.url}/bench", headers={"api-key": ALICE}).status_code == 401
    assert httpx.get(f"{gateway.url}/bench", headers={"api-key": ADMIN}).status_code == 200


def test_the_bench_measures_a_gateway_that_asks_for_keys(gateway: Gateway):
    admin = {"api-key": ADMIN}
    order = {"workload": "file", "levels": [2], "n": 4}
    begun = httpx.post(f"{gateway.url}/bench", json=order, headers=admin).json()

    def run() -> dict[str, str]:
        return httpx.get(f"{gateway.url}/bench/{begun['id']}", headers=admin).json()

    wait_until(lambda: run()["status"] != "running", seconds=120)
    assert run()["status"] == "done", run()
    assert [level["ok"] for level in run()["result"]["levels"]] == [4]


def test_a_session_is_followed_without_a_key_by_who_has_its_address(gateway: Gateway):
    key = {"api-key": BOB}
    made = httpx.post(f"{gateway.url}/v1/audio/sessions", json={"model": "base"}, headers=key)
    session = made.json()
    assert made.headers["x-ratelimit-remaining-live-sessions"] == "0"
    second = httpx.post(f"{gateway.url}/v1/audio/sessions", json={"model": "base"}, headers=key)
    assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(second.headers["Retry-After"]) <= 120
    with httpx.stream("GET", gateway.url + session["events_url"]) as events:
        assert events.status_code == 200
    assert httpx.delete(f"{gateway.url}/v1/audio/sessions/{session['id']}", headers=key).status_code == 204
    assert httpx.post(f"{gateway.url}/v1/audio/sessions", json={"model": "base"}, headers=key).status_code == 201


def test_a_key_past_its_requests_is_refused_before_its_body_is_sent_and_another_is_served(gateway: Gateway):
    def ask(key: str, prompt: str = "") -> httpx.Response:
        data = {"model": "whisper-1", "prompt": prompt, "language": "en"}
        files = {"file": clip(1.0)}
        return httpx.post(
            f"{gateway.url}/v1/audio/transcriptions", data=data, files=files, headers={"api-key": key}, timeout=60
        )

    before = len(gateway.engine.submitted)
    slow = [threading.Thread(target=ask, args=(ALICE, "slow"), daemon=True) for _ in range(3)]
    for thread in slow:
        thread.start()
    wait_until(lambda: len(gateway.engine.submitted) == before + 3)
    refused = ask(ALICE)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert ask(BOB).status_code == 200
    assert len(gateway.engine.submitted) == before + 4


def test_audio_past_the_minutes_share_is_refused_until_it_has_come_back(gateway: Gateway):
    with gateway.client(api_key=BOB) as client:
        client.audio.transcriptions.create(model="whisper-1", file=clip(60.0))
        with pytest.raises(openai.RateLimitError) as refused:
            client.audio.transcriptions.create(model="whisper-1", file=clip(1.0))
        assert "40 seconds of audio a minute" in refused.value.message
        assert client.models.list().data


def test_no_key_is_ever_logged(gateway: Gateway, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG):
        for key in (ALICE, "sk-wrong-0123456789", ADMIN):
            for path in ("/v1/models", "/bench", "/v1/audio/sessions/x"):
                httpx.get(gateway.url + path, headers={"Authorization": f"Bearer {key}", "api-key": key})
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpcore", "httpx"))]
    assert not [message for message in ours if "sk-" in message]


# --- the command --------------------------------------------------------------------------------------------------------


def steno(*flags: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "app.cli", "serve", "--engine", "fake", "--port", "0", *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment)


@pytest.mark.parametrize(
    ("flags", "environment", "said"),
    [
        (["--host", "0.0.0.0"], {}, "--without-keys"),
        (["--api-keys", "alice:short"], {}, "16 characters"),
        ([], {"STENO_API_KEYS": "a b:xxxxxxxxxxxxxxxxxxxxx"}, "a name is"),
        (["--api-keys-file", "/nowhere/keys"], {}, "/nowhere/keys: No such file"),
    ],
)
def test_a_gateway_that_would_stand_open_or_has_no_sound_keys_does_not_start(flags, environment, said):
    with steno(*flags, **environment) as process:
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said in stderr
    assert "xxxx" not in stderr


def test_keys_are_read_again_on_sighup(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text(f"alice:{ALICE}\n")
    with steno("--api-keys-file", str(file)) as process:
        try:
            assert process.stderr is not None
            url = process.stderr.readline().split()[-1]
            assert "1" in process.stderr.readline()

            def status(key: str) -> int:
                return httpx.get(f"{url}/v1/models", headers={"api-key": key}).status_code

            assert (status(ALICE), status(BOB)) == (200, 401)
            file.write_text(f"bob:{BOB}\n")
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: status(BOB) == 200)
            assert status(ALICE) == 401
        finally:
            process.terminate()
            assert process.wait(60) == 0
