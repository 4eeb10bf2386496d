"""What is in `deploy/`, as far as it can be tried here: a real nginx in front, and files that name what exists."""

import getpass
import itertools
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

import app.server
from app.settings import Settings
from engine.base import DecodeRequest
from engine.fake import FakeEngine, Reply
from tests import speech
from tests.gateway import Gateway, running_gateway, wait_until
from tests.talking import Talk
from tests.test_live_wire import Duplex, s16le

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PLAIN = """
server {
    listen 80;
    client_max_body_size 0;
    location / {
        proxy_pass http://127.0.0.1:8000;
    }
}
"""


def script(_: DecodeRequest) -> Reply:
    return Reply(tuple(f" {i}" for i in range(12)), piece_seconds=0.1)


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with running_gateway(lambda: FakeEngine(script), Settings(_env_file=None, vad=False)) as running:
        running.run(running.engine.wait_ready)
        yield running


@contextmanager
def nginx(site: str, gateway: Gateway, folder: Path) -> Iterator[str]:
    """Run nginx with a site's configuration, whose addresses are made those of the test."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    site = site.replace("listen 80;", f"listen 127.0.0.1:{port};").replace("127.0.0.1:8000", "{}:{}".format(*gateway.address))
    (folder / "site.conf").write_text(site)
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(
        f"user {getpass.getuser()}; daemon off; pid {folder}/pid; error_log {folder}/errors;\nevents {{}}\n"
        f"http {{ access_log off; gzip on;\n{temporary}include {folder}/site.conf; }}\n"
    )
    command = [program, "-e", str(folder / "errors"), "-c", str(folder / "nginx.conf")]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            wait_until(lambda: process.poll() is not None or _answers(port))
            assert process.poll() is None, process.stderr.read()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("site", [(DEPLOY / "nginx.conf").read_text(), PLAIN], ids=["ours", "plain"])
def test_events_come_through_nginx_one_by_one(gateway: Gateway, site: str, tmp_path: Path):
    """F04: also through an nginx that buffers, and a client that would take gzip."""
    with nginx(site, gateway, tmp_path) as url:
        came: list[float] = []
        request = {
            "data": {"model": "base", "stream": "true"},
            "files": {"file": speech.wav(speech.tone(1.0))},
            "headers": {"Accept-Encoding": "gzip"},
        }
        with httpx.stream("POST", f"{url}/v1/audio/transcriptions", timeout=60, **request) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert "no-cache" in answer.headers["cache-control"] or "no-store" in answer.headers["cache-control"]
            assert "content-encoding" not in answer.headers
            for line in answer.iter_lines():
                if "transcript.text.delta" in line:
                    came.append(time.monotonic())
    assert len(came) > 5
    gaps = [later - sooner for sooner, later in itertools.pairwise(came)]
    assert sum(gap > 0.03 for gap in gaps) >= len(gaps) // 2  # they were made 0.1 s apart


def test_an_idle_websocket_outlives_our_nginxs_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """G10, at a thirtieth of its times: a proxy cuts what is idle for 2 s, and the gateway asks more often."""
    monkeypatch.setattr(app.server, "PING_SECONDS", 0.6)
    site = re.sub(r"(proxy_(?:read|send)_timeout) \S+;", r"\1 2s;", (DEPLOY / "nginx.conf").read_text())
    with running_gateway(lambda: FakeEngine(script), Settings(_env_file=None, vad=False)) as own:
        own.run(own.engine.wait_ready)
        with nginx(site, own, tmp_path) as url, Talk(url) as talk:
            talk.until("session.created")
            with pytest.raises(TimeoutError):
                talk.next(timeout=5)
            talk.say("input_audio_buffer.clear")
            talk.until("cleared")


def test_text_comes_through_our_nginx_while_the_speaker_speaks(gateway: Gateway, tmp_path: Path):
    with nginx((DEPLOY / "nginx.conf").read_text(), gateway, tmp_path) as url:
        speaking = Duplex(url, **{"include[]": "partials"})
        stop = threading.Event()

        def speak() -> None:
            while not stop.wait(0.05):
                speaking.send(s16le(speech.tone(0.5)))
            speaking.end()

        speaker = threading.Thread(target=speak)
        speaker.start()
        speaking.read_until(b"transcript.text.partial")  # its end has not been sent
        stop.set()
        speaker.join()
        assert speaking.events()[-1] == "[DONE]"


def test_the_dashboard_asks_for_metrics_that_exist(gateway: Gateway):
    panels = json.loads((DEPLOY / "grafana" / "steno.json").read_text())["panels"]
    asked = {
        name
        for panel in panels
        for target in panel.get("targets", [])
        for name in re.findall(r"\b(?:steno|process)_[a-z_]+", target["expr"])
    }
    assert len(asked) > 15
    known = set(re.findall(r"^# TYPE (\S+)", httpx.get(f"{gateway.url}/metrics").text, flags=re.MULTILINE))
    names = known | {f"{name}_bucket" for name in known} | {"steno_engine_deaths_total"}  # of an engine that is built anew
    assert asked <= names


def test_compose_and_kubernetes_set_what_exists():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    pods = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    (container,) = pods[0]["spec"]["template"]["spec"]["containers"]
    variables = {*compose["services"]["gateway"]["environment"], *(entry["name"] for entry in container["env"])}
    for name in variables:
        assert name.removeprefix("STENO_").lower() in Settings.model_fields
    grace = Settings.model_fields["shutdown_grace_seconds"].default
    assert pods[0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > grace + 10 + 5
    assert int(compose["services"]["gateway"]["stop_grace_period"].removesuffix("s")) > grace + 10
    for source in (volume.split(":")[0] for service in compose["services"].values() for volume in service.get("volumes", [])):
        assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"]


def test_the_image_has_every_package():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    let_in = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{package}" for package in packages} <= set(let_in)
    dockerfile = (ROOT / "Dockerfile").read_text()
    for target in re.findall(r"target: (\w+)", (DEPLOY / "compose.yaml").read_text()):
        assert f"AS {target}\n" in dockerfile
