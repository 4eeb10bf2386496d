"""The page in a real browser: Debian's Chromium, with a microphone that is fed from a file."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, expect, sync_playwright

from app.keys import new_key
from app.settings import Settings
from engine.base import DecodeRequest
from engine.fake import FakeEngine, Reply
from tests import speech
from tests.gateway import Gateway, running_gateway, wait_until
from tests.test_real import real, word_error_rate

KEY = "sk-page-0123456789"
MAX_PAGE_BYTES = 150_000
TABS = ("Talk", "File", "Bench", "Status")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def script(request: DecodeRequest) -> Reply:
    """Say a word for each half second of sound."""
    loud = np.abs(request.samples[: len(request.samples) // 8000 * 8000]).reshape(-1, 8000).max(axis=1) > 0.05
    return Reply(tuple(f" word{i}" for i, there in enumerate(loud) if there) or (" nothing",))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    settings = Settings(_env_file=None, vad=False, bench_dir=tmp_path_factory.mktemp("bench"), agreeing_hypotheses=2)
    with running_gateway(lambda: FakeEngine(script), settings) as running:
        running.run(running.engine.wait_ready)
        yield running


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as running:
        yield running


@contextmanager
def chromium(playwright: Playwright, heard: np.ndarray, folder: Path) -> Iterator[Browser]:
    """Start a browser whose microphone hears some samples, again and again."""
    (folder / "heard.wav").write_bytes(speech.wav(heard))
    flags = [
        "--no-sandbox",
        "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={folder / 'heard.wav'}%noloop",
        "--autoplay-policy=no-user-gesture-required",
    ]
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
    try:
        yield browser
    finally:
        browser.close()


@pytest.fixture(scope="module")
def browser(playwright: Playwright, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(playwright, speech.tone(600.0), tmp_path_factory.mktemp("microphone")) as running:
        yield running


class Watched:
    """A page, and what went wrong in it or came from elsewhere."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url = url
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.bytes = 0
        self.page: Page = context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type in {"error", "warning"} else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, tab: str = "Talk") -> Page:
        self.page.goto(f"{self.url}/#/{tab.lower()}")
        return self.page


@contextmanager
def watched(browser: Browser, url: str, *, microphone: bool = True, **options) -> Iterator[Watched]:
    with browser.new_context(accept_downloads=True, **options) as context:
        context.set_default_timeout(60_000)
        if microphone:
            context.grant_permissions(["microphone"], origin=url)
        yield Watched(context, url)


@pytest.fixture
def opened(browser: Browser, gateway: Gateway) -> Iterator[Watched]:
    with watched(browser, gateway.url) as seen:
        yield seen
        assert seen.errors == []
        assert all(address.startswith((gateway.url, "blob:")) for address in seen.asked)


def utterances(page: Page) -> str:
    return " ".join(page.locator("#utterances p").all_inner_texts())


# --- talking ------------------------------------------------------------------------------------------------------------


def test_words_come_while_one_speaks_and_the_rest_after_a_stop(opened: Watched):
    page = opened.open()
    page.get_by_role("button", name="Start talking").click()
    expect(page.locator("#utterances .certain").first).to_contain_text("word0")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()  # still speaking
    assert float(page.locator("#level").get_attribute("aria-valuenow") or 0) > 10
    page.get_by_role("button", name="New line").click()
    expect(page.locator("#utterances li")).to_have_count(2)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#talk-hint")).to_have_text("Done.")
    expect(page.locator("#utterances .tail").last).to_be_empty()
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Download as json").click()
    whole = json.loads(downloading.value.path().read_text())
    assert whole["utterances"][0]["text"].startswith("word0 word1")
    assert whole["utterances"][1]["start"] == pytest.approx(whole["utterances"][0]["end"], abs=0.01)
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Download as srt").click()
    assert downloading.value.suggested_filename.endswith(".srt")
    assert downloading.value.path().read_text().startswith("1\n00:00:00,000 --> 00:00:")


def test_what_is_said_while_the_connection_is_lost_is_not(opened: Watched, gateway: Gateway):
    page = opened.open()
    page.get_by_role("button", name="Start talking").click()
    expect(page.locator("#utterances .certain").first).to_contain_text("word0")
    page.context.set_offline(True)
    expect(page.locator("#talk-hint")).to_contain_text("connection is lost")
    page.wait_for_timeout(1500)
    page.context.set_offline(False)
    page.wait_for_function("() => document.querySelector('#utterances .certain').textContent.includes('word6')")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#talk-hint")).to_have_text("Done.")
    (said,) = page.locator("#utterances p").all_inner_texts()
    spoken = said.split()
    assert spoken == [f"word{i}" for i in range(len(spoken))]  # each once, none missing
    opened.errors[:] = [error for error in opened.errors if "ERR_INTERNET_DISCONNECTED" not in error]
    wait_until(lambda: not gateway.services.live.open)


def test_a_refused_microphone_is_said_in_words(browser: Browser, gateway: Gateway):
    with watched(browser, gateway.url, microphone=False) as seen:
        page = seen.open()
        page.get_by_role("button", name="Start talking").click()
        expect(page.get_by_role("alert")).to_contain_text("The microphone was refused")
        expect(page.get_by_role("button", name="Start talking")).to_be_enabled()
        assert not gateway.services.live.open


# --- files ----------------------------------------------------------------------------------------------------------------


def test_a_file_is_sent_read_and_heard_word_by_word(opened: Watched, tmp_path: Path):
    (tmp_path / "My talk.wav").write_bytes(speech.wav(speech.tone(8.0)))
    page = opened.open("File")
    page.set_input_files("#file-input", tmp_path / "My talk.wav")
    expect(page.locator("#file-phase")).to_have_text("Done")
    expect(page.locator("#file-text")).to_contain_text("word15")
    words = page.locator("#file-text .word")
    words.last.click()
    page.wait_for_function(
        "() => document.querySelector('#player').currentTime > 0 || !document.querySelector('#player').paused"
    )
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Download as vtt").click()
    assert downloading.value.suggested_filename == "My talk.vtt"
    assert downloading.value.path().read_text().startswith("WEBVTT\n\n00:00:00.000 --> ")
    code = page.locator("#file-code")
    code.get_by_text("The same from code").click()
    expect(code.locator("pre")).to_contain_text("file=@My talk.wav")
    code.get_by_role("button", name="Python").click()
    expect(code.locator("pre")).to_contain_text(f'base_url="{opened.url}/v1"')


def test_what_is_no_audio_is_refused_in_words(opened: Watched, tmp_path: Path):
    (tmp_path / "a.txt").write_text("no audio at all")
    page = opened.open("File")
    page.set_input_files("#file-input", tmp_path / "a.txt")
    expect(page.get_by_role("alert")).to_contain_text("Invalid file format")
    opened.errors[:] = [error for error in opened.errors if "status of 400" not in error]


# --- the bench, the state, the key -----------------------------------------------------------------------------------------


def test_a_bench_is_run_and_shown(opened: Watched):
    page = opened.open("Bench")
    page.get_by_label("At once").fill("1, 2")
    page.get_by_label("Requests each").fill("3")
    page.get_by_role("button", name="Measure").click()
    expect(page.locator("#bench-phase")).to_contain_text("at once", timeout=120_000)
    expect(page.locator("#bench-answer strong")).to_contain_text("real time", timeout=120_000)
    expect(page.locator("#bench-charts svg")).to_have_count(2)
    expect(page.locator("#bench-charts svg").first.locator("circle")).to_have_count(4)  # p50 and p95 of two levels
    expect(page.locator("#bench-runs li")).to_have_count(1)
    page.get_by_role("button", name="Delete the run").click()
    expect(page.locator("#bench-empty")).to_be_visible()


def test_the_state_is_told_while_the_engine_starts(browser: Browser):
    settings = Settings(_env_file=None, vad=False)
    with (
        running_gateway(lambda: FakeEngine(script, start_seconds=3.0), settings) as gateway,
        watched(browser, gateway.url) as seen,
    ):
        page = seen.open("Status")
        expect(page.locator("#status-big")).to_contain_text("Starting since 0:0")
        expect(page.locator("#status-big")).to_contain_text("Ready for 0:0")
        expect(page.locator("#facts")).to_contain_text("0 of 64")
        page.get_by_role("tab", name="Talk").click()
        page.locator("#talk .options summary").click()
        expect(page.locator("#talk-language option")).not_to_have_count(1)


def test_a_gateway_with_keys_asks_for_one(browser: Browser):
    settings = Settings(_env_file=None, vad=False, api_keys=f"me:{KEY}")
    with running_gateway(lambda: FakeEngine(script), settings) as gateway, watched(browser, gateway.url) as seen:
        gateway.run(gateway.engine.wait_ready)
        page = seen.open()
        expect(page.get_by_role("dialog")).to_be_visible()
        page.get_by_label("Key", exact=True).fill("sk-wrong")
        page.get_by_role("button", name="Use it").click()
        page.get_by_role("button", name="Start talking").click()
        expect(page.get_by_role("alert")).to_contain_text("Incorrect API key")
        page.get_by_role("button", name="API key").click()
        page.get_by_label("Key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Start talking").click()
        expect(page.locator("#utterances .certain").first).to_contain_text("word0")
        assert KEY not in page.content()
        assert page.evaluate("() => localStorage.length + sessionStorage.length") == 0
        assert not any(KEY in address for address in seen.asked)


# --- for everybody ----------------------------------------------------------------------------------------------------------


def test_all_of_it_works_from_the_keyboard(opened: Watched):
    page = opened.open()
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Skip to the content"
    page.locator("#tab-talk").focus()
    for tab in (*TABS[1:], "Talk"):
        page.keyboard.press("ArrowRight")
        assert page.evaluate("() => document.activeElement.textContent") == tab
        expect(page.get_by_role("tabpanel", name=tab)).to_be_visible()
    page.evaluate("() => document.activeElement.blur()")
    page.keyboard.press("Space")
    expect(page.locator("#utterances .certain").first).to_contain_text("word0")
    page.get_by_role("button", name="Stop").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#talk-hint")).to_have_text("Done.")
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("() => document.activeElement.textContent.trim()"))
    assert {"Copy", ".txt", ".srt", ".vtt", ".json", "Options", "The same from code"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing_serious(browser: Browser, gateway: Gateway, scheme: str, width: int, tmp_path: Path):
    with watched(browser, gateway.url, color_scheme=scheme, viewport={"width": width, "height": 800}) as seen:
        page = seen.open()
        page.get_by_role("button", name="Start talking").click()
        expect(page.locator("#utterances .certain").first).to_contain_text("word0")
        for tab in TABS:
            page.get_by_role("tab", name=tab).click()
            page.evaluate("() => { for (const more of document.querySelectorAll('details')) more.open = true }")
            found = Axe().run(page).response["violations"]
            serious = [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in {"serious", "critical"}]
            assert serious == [], tab
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width


def test_the_page_is_light_and_lets_nothing_in(gateway: Gateway):
    from routers.page import FILES

    sizes = {}
    for path in ("/", *(f"/page/{name}" for name in FILES if name != "index.html")):
        answer = httpx.get(gateway.url + path)
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        sizes[path] = len(answer.content)
    assert sum(sizes.values()) < MAX_PAGE_BYTES
    html = httpx.get(gateway.url).text
    assert "onclick" not in html
    assert "style=" not in html
    assert httpx.get(f"{gateway.url}/page/../__init__.py").status_code == 404
    assert httpx.get(f"{gateway.url}/page/%2e%2e%2f__init__.py").status_code == 404


# --- the real engine ----------------------------------------------------------------------------------------------------------


@real(30)
def test_real_speech_into_the_microphone_comes_out_as_its_words(playwright: Playwright, real_gateway: Gateway, tmp_path: Path):
    clip = speech.two_cities()
    heard = clip.audio.samples[: 16 * 16_000]
    words = " ".join(speech.words(clip.words))
    with chromium(playwright, heard, tmp_path) as browser, watched(browser, real_gateway.url) as seen:
        page = seen.open()
        page.locator("#talk .options summary").click()
        page.get_by_label("Language").first.select_option("en")
        page.get_by_role("button", name="Start talking").click()
        expect(page.locator("#utterances .certain").first).to_contain_text("times", timeout=180_000)
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        page.wait_for_function(
            "() => document.querySelector('#utterances').textContent.includes('epoch of incredulity')", timeout=300_000
        )
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#talk-hint")).to_have_text("Done.", timeout=180_000)
        said = " ".join(speech.words(utterances(page)))
    expected = words[: words.index("it was the season of light")].strip()
    assert word_error_rate(expected, said[: len(expected) + 5]) <= 0.15
    assert seen.errors == []


@real(31)
def test_a_real_recording_is_read_with_its_words_times(playwright: Playwright, real_gateway: Gateway, tmp_path: Path):
    clip = speech.beckett()
    with chromium(playwright, speech.tone(1.0), tmp_path) as browser, watched(browser, real_gateway.url) as seen:
        page = seen.open("File")
        page.set_input_files("#file-input", clip.path)
        expect(page.locator("#file-phase")).to_have_text("Done", timeout=300_000)
        said = page.locator("#file-text .word").all_inner_texts()
        assert word_error_rate(clip.words, " ".join(said)) <= 0.1
        page.locator("#file-text .word", has_text="better").click()
        page.wait_for_function("() => document.querySelector('#player').currentTime > 7")
        expect(page.locator("#file-text .now")).to_contain_text("better")
    assert seen.errors == []


@pytest.mark.parametrize(
    ("given", "expected"), [("right", ["open", "realtime", "session.created"]), ("wrong", ["close", 1006])]
)
def test_a_browser_opens_a_realtime_session_with_a_key_among_its_subprotocols(browser: Browser, given: str, expected: list):
    """G12: a page has no other place for it, and Chromium hangs up on a server that answers with another one."""
    key, line = new_key("alice")
    settings = Settings(_env_file=None, vad=False, api_keys=line)
    with running_gateway(FakeEngine, settings) as own:
        own.run(own.engine.wait_ready)
        page = browser.new_page()
        page.goto(f"{own.url}/health/live")
        told = page.evaluate(
            """([url, key]) => new Promise((resolve) => {
                const socket = new WebSocket(url, ["realtime", "openai-insecure-api-key." + key]);
                socket.onmessage = (event) => resolve(["open", socket.protocol, JSON.parse(event.data).type]);
                socket.onclose = (event) => resolve(["close", event.code]);
            })""",
            [f"{own.url.replace('http', 'ws', 1)}/v1/realtime?intent=transcription", key if given == "right" else "x" * 20],
        )
        page.close()
    assert told == expected
