"""Every example does what it says, against a gateway on the scripted engine."""

import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from engine.fake import FakeEngine
from tests import speech
from tests.gateway import Gateway, wait_until
from tests.test_live_wire import s16le
from tests.test_node_sdk import SDK
from tests.test_page import CHROMIUM, chromium, script
from tests.test_wire import ready_gateway

EXAMPLES = Path(__file__).parents[1] / "examples"
SAID = "2.00 seconds of audio."


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def pages() -> Iterator[str]:
    """Serve the examples, as somebody's own site."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(EXAMPLES)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def gateway(pages: str) -> Iterator[Gateway]:
    with ready_gateway(FakeEngine, vad=False, cors_origins=(pages,)) as gateway:
        yield gateway


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    (tmp_path / "a.wav").write_bytes(speech.wav(speech.tone(2.0)))
    return tmp_path / "a.wav"


def ran(command: list[str], gateway: Gateway, **options) -> str:
    environment = os.environ | {"STENO_URL": gateway.url}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=300, check=False, **options)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_the_shells_reads_what_is_spoken(gateway: Gateway):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    told = ran([str(EXAMPLES / "live.sh"), "-"], gateway, input=s16le(speech.tone(2.0)))
    assert '"transcript.text.done"' in told
    assert "seconds of audio." in told
    assert told.strip().endswith("data: [DONE]")


def test_pythons_prints_the_text(gateway: Gateway, clip: Path):
    assert ran([sys.executable, str(EXAMPLES / "stream.py"), str(clip)], gateway) == SAID + "\n"


def test_nodes_prints_the_text(gateway: Gateway, clip: Path):
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node is not installed")
    install = [npm, "install", "--no-fund", "--no-audit", "--ignore-scripts", SDK]
    if subprocess.run(install, cwd=clip.parent, capture_output=True, timeout=300, check=False).returncode:
        pytest.skip(f"npm cannot install {SDK} here")
    shutil.copy(EXAMPLES / "stream.mjs", clip.parent)
    assert ran([node, "stream.mjs", "a.wav"], gateway, cwd=clip.parent) == SAID + "\n"


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_browsers_shows_words_while_one_speaks(pages: str, tmp_path: Path):
    with (
        ready_gateway(lambda: FakeEngine(script), vad=False, cors_origins=(pages,), agreeing_hypotheses=2) as gateway,
        sync_playwright() as playwright,
        chromium(playwright, speech.tone(600.0), tmp_path) as browser,
    ):
        context = browser.new_context()
        context.grant_permissions(["microphone"], origin=pages)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.goto(f"{pages}/browser.html?url={gateway.url}")
        page.get_by_role("button", name="Talk").click()
        expect(page.locator("#certain")).to_contain_text("word0 word1", timeout=60_000)
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("button", name="Talk again")).to_be_visible(timeout=60_000)
        wait_until(lambda: not gateway.services.live.open)
