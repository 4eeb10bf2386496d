"""Fixtures, and the budget of the tests on the real engine.

The `real` tests run last, in the order of their marker, on one gateway. It starts after the fast tests: to import vLLM beside
them, in another thread, disturbs them. `STENO_CI_DEADLINE` (seconds since the epoch) bounds them: past it, those that are not
marked `always` are not run, and the summary names them. Where it is not set they all run.
"""

import asyncio
import gc
import os
import time
from collections.abc import Iterator

import hypothesis
import pytest

# openai-whisper, the oracle of some tests, compiles with numba what a test runs once.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", NUMBA_DISABLE_JIT="1")

from app.settings import Settings
from tests.gateway import Gateway, running_gateway, wait_until_idle

START_SECONDS = 40 * 60  # an engine has been seen to take 15 minutes on a busy machine
# The host takes the CPU away at will: how long an example took says nothing.
hypothesis.settings.register_profile("steno", deadline=None)
hypothesis.settings.load_profile("steno")
OUT_OF_BUDGET = "not run: the budget of the real tests is used up"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> tuple[bool, int]:
        marker = item.get_closest_marker("real")
        return (marker is not None, marker.kwargs.get("order", 50) if marker else 0)

    items.sort(key=place)


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("real")
    deadline = float(os.environ.get("STENO_CI_DEADLINE", "inf"))
    if marker and not marker.kwargs.get("always") and time.time() > deadline:
        pytest.skip(OUT_OF_BUDGET)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    left_out = [r.nodeid for r in terminalreporter.getreports("skipped") if OUT_OF_BUDGET in str(r.longrepr)]
    if left_out:
        terminalreporter.section(f"{len(left_out)} real tests NOT RUN, the budget is used up", yellow=True)
        for name in left_out:
            terminalreporter.line(name)


# --- the event loop -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_blocking_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test in which something blocks an event loop: half a second of CPU time in one step, or a sleep."""
    if "real_gateway" in request.fixturenames:
        request.getfixturevalue("real_gateway")  # vLLM's start is not watched: it takes its time, and nobody is served yet
    limit = 1.0 if request.node.get_closest_marker("real") else 0.5
    offences: list[str] = []
    run = asyncio.Handle._run

    # Collecting the garbage of a thousand tests takes a while, and is not what the step did.
    collecting = {"began": 0.0, "seconds": 0.0}

    def watch_collection(phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            collecting["began"] = time.thread_time()
        else:
            collecting["seconds"] += time.thread_time() - collecting["began"]

    def watched(handle: asyncio.Handle) -> None:
        began, collected = time.thread_time(), collecting["seconds"]
        run(handle)
        took = time.thread_time() - began - (collecting["seconds"] - collected)
        if took > limit and not _is_playwrights(handle):
            offences.append(f"{handle!r} took {took:.2f} s of CPU time")

    def refuse_sleep(seconds: float) -> None:
        if asyncio._get_running_loop() is not None:
            offences.append(f"time.sleep({seconds}) in an event loop")
        sleep(seconds)

    sleep = time.sleep
    monkeypatch.setattr(asyncio.Handle, "_run", watched)
    monkeypatch.setattr(time, "sleep", refuse_sleep)
    gc.callbacks.append(watch_collection)
    yield
    gc.callbacks.remove(watch_collection)
    assert not offences


def _is_playwrights(handle: asyncio.Handle) -> bool:
    """Whether this is Playwright's, in whose loop the test itself runs."""
    return (getattr(handle._callback, "__module__", None) or "").startswith("playwright")


@pytest.fixture
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which its module's gateway still works for somebody."""
    yield
    if "gateway" in request.fixturenames:
        wait_until_idle(request.getfixturevalue("gateway"))


# --- the gateway ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def real_gateway() -> Iterator[Gateway]:
    """The one gateway on the real engine with `base`, for all tests that need it."""
    from app.services import build_engine

    settings = Settings(_env_file=None, model="base")
    with running_gateway(lambda: build_engine(settings), settings) as gateway:
        gateway.run(asyncio.wait_for, gateway.engine.wait_ready(), START_SECONDS)
        yield gateway
