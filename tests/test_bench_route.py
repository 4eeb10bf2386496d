"""/bench on a real socket: a run is a process of its own that comes back to the gateway as a client."""

import json
import shutil
import subprocess
import sys

import httpx
import psutil
import pytest

from app.settings import Settings
from bench.results import Result
from engine.fake import FakeEngine, Reply
from tests.gateway import Gateway, running_gateway, wait_until

SMALL = {"workload": "stream", "levels": [1, 2], "n": 4}
ENDLESS = {"levels": [1], "n": 2000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def gateway(folder):
    slow = FakeEngine(lambda request: Reply((" so", " it", " is"), first_seconds=0.02))
    with running_gateway(lambda: slow, Settings(_env_file=None, bench_dir=folder, max_requests=8)) as gateway:
        yield gateway


@pytest.fixture
def http(gateway):
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        yield client
        for run in client.get("/bench").json()["data"]:
            if run["status"] == "running":
                client.delete(f"/bench/{run['id']}")


def follow(http, run_id, **headers):
    with http.stream("GET", f"/bench/{run_id}/events", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        number = None
        for line in response.iter_lines():
            if line.startswith("id: "):
                number = int(line[4:])
            if line.startswith("data: "):
                yield number, json.loads(line[6:])


def start(http, **order):
    response = http.post("/bench", json=order)
    assert response.status_code == 201, response.text
    return response.json()["id"]


def test_a_run_is_started_followed_and_read(http, folder):
    response = http.post("/bench", json=SMALL)
    run = response.json()
    assert (response.status_code, run["status"]) == (201, "running")
    assert response.headers["location"] == f"/bench/{run['id']}"
    told = [event for _, event in follow(http, run["id"])]
    assert [event["type"] for event in (told[0], told[-1])] == ["bench.started", "bench.done"]
    progress = [event for event in told if event["type"] == "bench.progress" and event["phase"] == "measuring"]
    assert [(event["load"], event["done"]) for event in progress] == [(load, i) for load in (1.0, 2.0) for i in range(5)]
    read = http.get(f"/bench/{run['id']}", headers={"Accept": "application/json"}).json()
    assert read["result"] == told[-1]["result"]
    result = Result.model_validate(read["result"])
    assert [(level.load, level.ok) for level in result.levels] == [(1, 4), (2, 4)]
    assert result.target == http.base_url or result.target == str(http.base_url).rstrip("/")
    page = http.get(f"/bench/{run['id']}", headers={"Accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")
    assert "Stream load" in page.text
    assert run["id"] in http.get("/bench", headers={"Accept": "text/html"}).text
    assert (folder / run["id"] / "result.json").is_file()


def test_the_command_and_the_route_give_the_same_result(http, gateway, tmp_path):
    run_id = start(http, **SMALL)
    by_route = [event for _, event in follow(http, run_id)][-1]["result"]
    command = [sys.executable, "-m", "bench", "--url", gateway.url, "--n", "4", "--concurrency", "1,2", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    by_command = json.loads((tmp_path / "loadtest-concurrency.json").read_text())
    same = ("workload", "load_kind", "settings", "machine", "versions", "server")
    assert {name: by_route[name] for name in same} == {name: by_command[name] for name in same}
    for a, b in zip(by_route["levels"], by_command["levels"], strict=True):
        assert {name: a[name] for name in ("load", "sent", "ok", "audio_seconds", "unique_audio_seconds")} == {
            name: b[name] for name in ("load", "sent", "ok", "audio_seconds", "unique_audio_seconds")
        }


def test_a_second_run_is_refused_while_one_is_in_progress(http):
    run_id = start(http, **ENDLESS)
    response = http.post("/bench", json=SMALL)
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "bench_running"
    assert run_id in response.json()["error"]["message"]
    assert http.delete(f"/bench/{run_id}").json()["deleted"]
    start(http, **SMALL)


def test_a_run_goes_on_when_its_client_leaves_and_is_taken_up_where_it_was(http):
    run_id = start(http, **ENDLESS)
    seen = []
    for number, _ in follow(http, run_id):
        seen.append(number)
        if len(seen) == 5:
            break
    assert http.get(f"/bench/{run_id}").json()["status"] == "running"
    for number, _ in follow(http, run_id, **{"Last-Event-ID": str(seen[-1])}):
        seen.append(number)
        if len(seen) == 10:
            break
    assert seen == list(range(10))


@pytest.mark.parametrize("last", ["9" * 5000, "x", "-1", "٣", "²"])
def test_a_reader_that_names_no_event_of_ours_is_told_all(http, last):
    run_id = start(http, levels=[1], n=1)
    list(follow(http, run_id))
    told = [event["type"] for _, event in follow(http, run_id, **{"Last-Event-ID": last.encode()})]
    assert told[-1] == "bench.done"


def children():
    return [p for p in psutil.Process().children(recursive=True) if "bench" in p.cmdline()]


def test_a_run_that_is_deleted_leaves_no_process_no_request_and_no_file(http, gateway, folder):
    run_id = start(http, **ENDLESS)
    for _, event in follow(http, run_id):
        if event["type"] == "bench.progress" and event["done"] > 2:
            break
    assert len(children()) == 1
    assert http.delete(f"/bench/{run_id}").status_code == 200
    assert children() == []
    assert not (folder / run_id).exists()
    assert http.get(f"/bench/{run_id}").status_code == 404
    wait_until(lambda: gateway.engine.requests == gateway.services.admission.in_progress == 0)


@pytest.mark.parametrize(
    ("order", "param"),
    [
        ({"levels": [0]}, "levels"),
        ({"levels": [9]}, "levels"),  # 8 are admitted
        ({"levels": ["x"]}, "levels"),
        ({"n": 0}, "n"),
        ({"workload": "flood"}, "workload"),
        ({"slo": "--url=http://10.0.0.1"}, "slo"),
        ({"url": "http://10.0.0.1"}, "url"),
        ({"clip_seconds": -1}, "clip_seconds"),
    ],
)
def test_a_wrong_order_is_refused_and_names_the_field(http, order, param):
    response = http.post("/bench", json=order)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_the_address_is_where_the_request_came_in_and_not_what_its_host_says(http, gateway):
    response = http.post("/bench", json=SMALL, headers={"Host": "attacker.example:1"})
    run_id = response.json()["id"]
    assert [event for _, event in follow(http, run_id)][-1]["result"]["target"] == gateway.url


def test_a_limit_that_the_workload_does_not_have_fails_the_run_with_its_reason(http):
    run_id = start(http, workload="stream", slo="final_p95=100", n=2)
    last = [event for _, event in follow(http, run_id)][-1]
    assert last["type"] == "bench.failed"
    assert "'final' is no metric of the workload stream" in last["detail"]


def test_elsewhere_than_on_the_loopback_it_is_closed():
    with running_gateway(FakeEngine, Settings(_env_file=None, host="0.0.0.0")) as gateway:
        response = httpx.post(f"{gateway.url}/bench", json=SMALL)
        assert response.status_code == 403
        assert response.json()["error"]["type"] == "permission_error"
        assert httpx.get(f"{gateway.url}/bench").status_code == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_with_an_admin_key_only_who_has_it_may_measure_wherever(host, tmp_path):
    settings = Settings(_env_file=None, host=host, admin_key="sesame", bench_dir=tmp_path)
    with running_gateway(FakeEngine, settings) as gateway:
        for wrong in ({}, {"Authorization": "Bearer simsim"}, {"Authorization": "Basic sesame"}, {"api-key": "ключ".encode()}):
            response = httpx.post(f"{gateway.url}/bench", json=SMALL, headers=wrong)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        for right in ({"Authorization": "bearer sesame"}, {"api-key": "sesame"}):
            assert httpx.get(f"{gateway.url}/bench", headers=right).status_code == 200
    assert "sesame" not in repr(settings)


def test_a_run_that_takes_too_long_is_ended(tmp_path):
    settings = Settings(_env_file=None, bench_dir=tmp_path, bench_seconds=3)
    with running_gateway(FakeEngine, settings) as gateway, httpx.Client(base_url=gateway.url, timeout=60) as http:
        last = [event for _, event in follow(http, start(http, workload="live", levels=[1], n=2000))][-1]
    assert (last["type"], last["detail"]) == ("bench.failed", "It took longer than 3 seconds.")


def test_runs_outlive_the_gateway_and_a_run_in_progress_ends_with_it(tmp_path):
    settings = Settings(_env_file=None, bench_dir=tmp_path)
    with running_gateway(FakeEngine, settings) as gateway, httpx.Client(base_url=gateway.url, timeout=60) as http:
        done = start(http, levels=[1], n=1)
        list(follow(http, done))
        begun = start(http, **ENDLESS)
        wait_until(children)
    assert children() == []
    (tmp_path / "bench_broken").mkdir()
    (tmp_path / "bench_broken" / "run.json").write_text("{}")
    with running_gateway(FakeEngine, settings) as gateway, httpx.Client(base_url=gateway.url, timeout=60) as http:
        runs = {run["id"]: run["status"] for run in http.get("/bench").json()["data"]}
        assert runs == {done: "done", begun: "cancelled"}
        assert [event["type"] for _, event in follow(http, done)] == ["bench.done"]
        assert "Stream load" in http.get(f"/bench/{done}", headers={"Accept": "text/html"}).text


# --- vLLM's own bench -----------------------------------------------------------------------------------------------


def test_clients_of_vllm_get_its_chunks_with_the_usage_in_the_last(gateway: Gateway):
    from tests.speech import tone, wav

    fields = {"model": "base", "stream": "true", "stream_include_usage": "true", "max_completion_tokens": "64"}
    files = {"file": ("a.wav", wav(tone(1.0)), "audio/wav")}
    with httpx.Client(base_url=gateway.url, timeout=60) as http:
        body = http.post("/v1/audio/transcriptions", data=fields, files=files).text
    lines = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"transcription.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    usage = chunks[-1]["usage"]
    assert chunks[-1]["choices"] == []
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


def test_the_report_is_readable_in_a_browser(http, folder, tmp_path):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium")
    run_id = start(http, **SMALL)
    list(follow(http, run_id))
    picture = tmp_path / "page.png"
    arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,1600"]
    page = (folder / run_id / "result.html").resolve().as_uri()
    subprocess.run([chromium, *arguments, f"--screenshot={picture}", page], check=True, capture_output=True, timeout=120)
    assert picture.stat().st_size > 20_000
    dom = subprocess.run([chromium, *arguments, "--dump-dom", page], check=True, capture_output=True, timeout=120, text=True)
    assert dom.stdout.count("<figure>") == 3
