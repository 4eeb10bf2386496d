"""Take pictures of the page of a running gateway, while real speech is fed into Chromium's microphone.

`python scripts/screenshots.py http://127.0.0.1:8000 docs` takes each tab on a phone and on a desktop, light and dark.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from bench.corpus import load_corpus

SIZES = {"phone": (390, 800), "desktop": (1200, 820)}


def main() -> None:
    """Take them all."""
    url, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    clips = sorted(load_corpus(None), key=lambda clip: -clip.seconds)
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        heard = Path(temporary) / "heard.wav"
        heard.write_bytes(clips[0].wav)
        flags = ["--no-sandbox", "--use-fake-device-for-media-stream", f"--use-file-for-fake-audio-capture={heard}"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        for size, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                look = {"width": width, "height": height}
                context = browser.new_context(viewport=look, color_scheme=scheme, device_scale_factor=2)  # type: ignore[arg-type]
                context.grant_permissions(["microphone"], origin=url)
                _tour(
                    context.new_page(),
                    url,
                    heard,
                    lambda tab, page, name=f"{size}-{scheme}": _shoot(page, folder / f"{tab}-{name}.png"),
                )
                context.close()
        browser.close()


def _shoot(page: Page, path: Path) -> None:
    page.wait_for_timeout(300)
    page.screenshot(path=path)


def _tour(page: Page, url: str, recording: Path, shoot) -> None:
    page.set_default_timeout(120_000)
    page.goto(f"{url}/#/talk")
    page.get_by_role("button", name="Start talking").click()
    page.wait_for_function(
        "() => document.querySelectorAll('#utterances li').length > 2 && document.querySelector('.tail:not(:empty)')"
    )
    shoot("talk", page)
    page.get_by_role("button", name="Stop").click()
    page.locator("#talk-actions button").first.wait_for()
    page.get_by_role("tab", name="File").click()
    page.set_input_files("#file-input", recording)
    page.wait_for_function("() => document.querySelector('#file-phase').textContent === 'Done'")
    page.locator("#file-text .word").nth(3).click()
    shoot("file", page)
    page.get_by_role("tab", name="Bench").click()
    page.get_by_label("At once").fill("1, 2, 4")
    page.get_by_label("Requests each").fill("8")
    page.get_by_role("button", name="Measure").click()
    page.locator("#bench-answer strong").wait_for(timeout=300_000)
    shoot("bench", page)
    page.get_by_role("tab", name="Status").click()
    page.wait_for_timeout(1500)
    shoot("status", page)


if __name__ == "__main__":
    main()
