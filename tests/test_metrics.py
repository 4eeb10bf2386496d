"""What is told to Prometheus, and that it is true."""

import asyncio
import time

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.settings import Settings
from engine.base import DecodeRequest
from engine.fake import FakeEngine, Reply
from tests import speech
from tests.gateway import Gateway, running_gateway, wait_until
from tests.test_live_wire import Duplex, s16le
from tests.test_wire import hanging

ADMIN = "sk-admin-0123456789abcdef"


def script(request: DecodeRequest) -> Reply:
    if request.previous_text == "hang at once":
        return Reply((" a",), stall_after=0)
    if request.previous_text == "die":
        return Reply((" a",), fail_after=0)
    return Reply((" a", " b"), first_seconds=0.05)


@pytest.fixture
def gateway():
    with running_gateway(lambda: FakeEngine(script), Settings(_env_file=None, vad=False, kept_share=0.0)) as running:
        running.run(running.engine.wait_ready)
        yield running


def told(gateway: Gateway) -> dict[tuple[str, ...], float]:
    """Ask for the metrics: by name and the labels' values, in the labels' order by name."""
    answer = httpx.get(f"{gateway.url}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def post(gateway: Gateway, seconds: float = 1.0, **fields: str) -> httpx.Response:
    files = {"file": speech.wav(speech.tone(seconds))}
    url = f"{gateway.url}/v1/audio/transcriptions"
    return httpx.post(url, data={"model": "base"} | fields, files=files, timeout=60)


def test_files_are_counted_by_what_became_of_them(gateway: Gateway):
    for seconds, fields in ((2.0, {}), (3.0, {"stream": "true"})):
        assert post(gateway, seconds, **fields).status_code == 200
    assert post(gateway, 4.0, prompt="die").status_code == 500
    assert post(gateway, model="gpt-9").status_code == 404
    with hanging(gateway):
        assert told(gateway)["steno_permits", "file"] == 1
        assert told(gateway)["steno_engine_requests",] == 1
    wait_until(lambda: told(gateway)["steno_permits", "file"] == 0)
    values = told(gateway)
    assert values["steno_transcriptions_total", "anyone", "file", "completed"] == 2
    assert values["steno_transcriptions_total", "anyone", "file", "failed"] == 1
    assert values["steno_transcriptions_total", "anyone", "file", "left"] == 1
    assert values["steno_audio_seconds_total", "anyone", "file"] == pytest.approx(2 + 3 + 4 + 1)
    assert values["steno_first_text_seconds_count", "file"] == 1  # of the stream
    assert values["steno_first_text_seconds_sum", "file"] >= 0.05
    assert values["steno_stage_seconds_count", "file", "engine"] == 2
    assert values["steno_refusals_total", "model_not_found"] == 1
    assert values["steno_refusals_total", "transcription_failed"] == 1
    route = "/v1/audio/transcriptions"
    assert values["steno_http_requests_total", "POST", route, "200"] == 2
    assert values["steno_http_requests_total", "POST", route, "404"] == 1
    assert values["steno_engine_ready",] == 1
    assert values["process_open_fds",] > 0


def test_live_sessions_are_counted_with_their_partials(gateway: Gateway):
    speaking = Duplex(gateway.url, **{"include[]": "partials"})
    speaking.send(s16le(speech.tone(2.0)))
    speaking.read_until(b"transcript.text.partial")
    wait_until(lambda: told(gateway)["steno_live_audio_kept_seconds",] > 1)
    assert told(gateway)["steno_live_sessions",] == 1
    speaking.end()
    *_, end = speaking.events()
    assert end == "[DONE]"
    wait_until(lambda: told(gateway)["steno_live_sessions",] == 0)
    values = told(gateway)
    assert values["steno_transcriptions_total", "anyone", "live", "completed"] == 1
    assert values["steno_audio_seconds_total", "anyone", "live"] == pytest.approx(2.0)
    assert values["steno_partials_total", "heard"] >= 1
    assert values["steno_final_after_stop_seconds_count",] == 1
    assert values["steno_first_text_seconds_count", "live"] == 1


def test_labels_do_not_grow_with_what_clients_make_up(gateway: Gateway):
    def ask(number: int) -> set[tuple[str, ...]]:
        httpx.request("PROPFIND", f"{gateway.url}/nowhere/{number}")
        httpx.get(f"{gateway.url}/v1/models/none{number}", headers={"User-Agent": f"agent {number}"})
        post(gateway, language=f"x{number}", x_request_id=str(number))
        return {key for key in told(gateway) if key[0].startswith("steno_")}

    ask(0)
    before = ask(1)
    for number in range(2, 20):
        ask(number)
    assert ask(20) == before
    assert ("steno_http_requests_total", "OTHER", "unknown", "404") in before


def test_the_bench_is_told_apart_from_users(gateway: Gateway):
    agent = {"User-Agent": "steno-bench/1"}
    url = f"{gateway.url}/v1/audio/transcriptions"
    files = {"file": speech.wav(speech.tone(1.0))}
    assert httpx.post(url, data={"model": "base"}, files=files, headers=agent).status_code == 200
    assert told(gateway)["steno_transcriptions_total", "steno-bench", "file", "completed"] == 1


def test_a_loop_that_is_held_up_shows(gateway: Gateway):
    async def hold_up() -> None:
        end = time.thread_time() + 0.3
        while time.thread_time() < end:
            np.ones(1000).sum()

    before = told(gateway)
    gateway.run(asyncio.sleep, 0.3)
    gateway.run(hold_up)
    gateway.run(asyncio.sleep, 0.3)
    after = told(gateway)
    assert after["steno_loop_lag_seconds_count",] >= before["steno_loop_lag_seconds_count",] + 3
    assert after["steno_loop_lag_seconds_sum",] >= before["steno_loop_lag_seconds_sum",] + 0.15


def test_with_an_admin_key_metrics_are_the_admins():
    settings = Settings(_env_file=None, admin_key=ADMIN)
    with running_gateway(lambda: FakeEngine(script), settings) as gateway:
        assert httpx.get(f"{gateway.url}/metrics").status_code == 401
        wrong = httpx.get(f"{gateway.url}/metrics", headers={"Authorization": "Bearer x"})
        assert wrong.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{gateway.url}/metrics", headers={"Authorization": f"Bearer {ADMIN}"}).status_code == 200
