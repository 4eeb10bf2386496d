"""What every engine promises, run over all of them.

The scripted engine runs everywhere; the real one, marked `real`, with both audio contexts; and the one that it is compared
with, except where its design cannot keep a promise. Each test is a scenario that runs in the engine's own event loop.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import anyio.from_thread
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.services import build_engine
from app.settings import Settings
from engine.base import (
    AudioContext,
    DecodeRequest,
    Delta,
    Engine,
    EngineUnavailableError,
    InvalidRequestError,
)
from engine.fake import FakeEngine, Reply
from engine.vllm_engine import VllmEngine, VllmOptions
from tests import speech
from tests.conftest import START_SECONDS
from tests.gateway import Gateway, running_gateway

_numbers = count()
SYNC_BATCH_CANNOT = {
    "test_deltas_join_to_the_final_text_and_only_the_last_is_final": "its text comes in one piece, when its batch has ended",
    "test_closing_at_any_moment_frees_the_engine": "a batch cannot be left: what nobody wants is decoded all the same",
}
SPOKEN = "tried ever failed no matter try again fail again fail better"


@dataclass(frozen=True)
class Bench:
    """An engine at work, the loop it lives in, and requests that suit it."""

    engine: Engine
    run: Callable[..., object]
    audio_context: AudioContext | None = None

    def request(self, **fields) -> DecodeRequest:
        fields = {"samples": speech.beckett().audio.samples, "audio_context": self.audio_context} | fields
        return DecodeRequest(id=f"contract-{next(_numbers)}", **fields)


@pytest.fixture(
    params=[
        "fake",
        pytest.param("full", marks=pytest.mark.real(order=20)),
        pytest.param("true", marks=pytest.mark.real(order=21)),
        pytest.param("sync-batch", marks=pytest.mark.real(order=66)),
    ]
)
def bench(request: pytest.FixtureRequest):
    if request.param == "sync-batch":
        if reason := SYNC_BATCH_CANNOT.get(request.node.originalname):
            pytest.skip(f"sync-batch cannot: {reason}")
        gateway = request.getfixturevalue("sync_batch_gateway")
        yield Bench(gateway.engine, gateway.run)
    elif request.param == "fake":
        with anyio.from_thread.start_blocking_portal() as portal:
            engine = portal.call(partial(FakeEngine, _say_beckett))
            with portal.wrap_async_context_manager(engine):
                portal.call(engine.wait_ready)
                yield Bench(engine, portal.call)
    else:
        gateway = request.getfixturevalue("real_gateway")
        yield Bench(gateway.engine, gateway.run, request.param)


@pytest.fixture(scope="module")
def sync_batch_gateway() -> Iterator[Gateway]:
    settings = Settings(_env_file=None, engine="sync-batch", model="base")
    with running_gateway(lambda: build_engine(settings), settings) as gateway:
        gateway.run(asyncio.wait_for, gateway.engine.wait_ready(), START_SECONDS)
        yield gateway


def _say_beckett(request: DecodeRequest) -> Reply:
    pieces = tuple(f" {word}" for word in f"Ever {SPOKEN}".split()) if len(request.samples) > 100_000 else (" Ever",)
    return Reply(pieces, first_seconds=0.02, piece_seconds=0.001)


async def _collect(engine: Engine, request: DecodeRequest) -> list[Delta]:
    return [delta async for delta in engine.transcribe(request)]


def _text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def _idle(engine: Engine) -> None:
    async with asyncio.timeout(60):
        while engine.requests:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.01)


def test_final_only_is_one_delta_with_the_words_spoken(bench: Bench):
    (final,) = bench.run(_collect, bench.engine, bench.request())
    assert speech.words(final.text)[1:] == SPOKEN.split()
    assert final.outcome.finish_reason == "stop"
    assert len(final.tokens) == final.outcome.usage.output_tokens > 0
    assert final.outcome.usage.audio_tokens >= 498  # of 20 ms each: the clip has 9.97 s
    assert final.outcome.usage.prompt_tokens >= 1


def test_deltas_join_to_the_final_text_and_only_the_last_is_final(bench: Bench):
    deltas = bench.run(_collect, bench.engine, bench.request(deltas=True))
    (final,) = bench.run(_collect, bench.engine, bench.request())
    assert _text(deltas) == final.text
    assert len(deltas) > 3
    assert [delta.outcome for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].outcome.finish_reason == "stop"
    assert deltas[-1].outcome == final.outcome
    assert tuple(token for delta in deltas for token in delta.tokens) == final.tokens


def test_the_language_is_told_from_the_first_delta_on(bench: Bench):
    detected = bench.run(_collect, bench.engine, bench.request(deltas=True))
    assert {delta.language for delta in detected} == {"en"}
    named = bench.run(_collect, bench.engine, bench.request(language="en"))
    assert named[-1].language == "en"
    assert speech.words(_text(named))[1:] == SPOKEN.split()


def test_requests_of_mixed_lengths_decode_side_by_side_and_leave_nothing_behind(bench: Bench):
    whole = speech.beckett().audio.samples

    async def scenario() -> list[list[Delta]]:
        lengths = [16_000, len(whole), 40_000, len(whole), 90_000, len(whole), 1]
        requests = [bench.request(samples=whole[:n], deltas=bool(i % 2)) for i, n in enumerate(lengths)]
        results = await asyncio.gather(*(_collect(bench.engine, request) for request in requests))
        await _idle(bench.engine)
        return results

    results = bench.run(scenario)
    for i in (1, 3, 5):
        assert speech.words(_text(results[i]))[1:] == SPOKEN.split()
    assert all(result[-1].outcome for result in results)


def test_one_request_may_name_another_audio_context_than_the_next(bench: Bench):
    async def scenario() -> list[list[Delta]]:
        contexts: list[AudioContext] = ["full", "true", "full", "true"]
        requests = [bench.request(audio_context=context) for context in contexts]
        return await asyncio.gather(*(_collect(bench.engine, request) for request in requests))

    for result in bench.run(scenario):
        assert speech.words(_text(result))[1:] == SPOKEN.split()


@pytest.mark.parametrize("seen", [0, 1, 2, 4])
def test_closing_at_any_moment_frees_the_engine(bench: Bench, seen: int):
    async def scenario() -> None:
        async with aclosing(bench.engine.transcribe(bench.request(deltas=True))) as deltas:
            for _ in range(seen):
                await anext(deltas)
            if seen:
                assert bench.engine.requests == 1
        assert bench.engine.requests == 0

    bench.run(scenario)


def test_cancelling_at_any_moment_frees_the_engine_and_harms_nobody(bench: Bench):
    async def scenario() -> list[Delta]:
        beside = asyncio.create_task(_collect(bench.engine, bench.request()))
        for moment in range(24):
            task = asyncio.create_task(_collect(bench.engine, bench.request(deltas=moment % 3 == 0)))
            for _ in range(moment):
                await asyncio.sleep(0)
            if moment % 4 == 3:  # after the submission, too
                await asyncio.sleep(0.01 * moment)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        result = await beside
        await _idle(bench.engine)
        return result

    assert speech.words(_text(bench.run(scenario)))[1:] == SPOKEN.split()


GOOD = np.zeros(16_000, dtype=np.float32)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("samples", {"samples": GOOD[:0]}),
        ("samples", {"samples": np.zeros(480_001, dtype=np.float32)}),
        ("samples", {"samples": GOOD.astype(np.float64)}),
        ("samples", {"samples": GOOD.reshape(2, -1)}),
        ("samples", {"samples": np.where(np.arange(16_000) == 9, np.nan, GOOD).astype(np.float32)}),
        ("samples", {"samples": np.where(np.arange(16_000) == 9, np.inf, GOOD).astype(np.float32)}),
        ("samples", {"samples": np.full(16_000, 3e38, dtype=np.float32)}),
        ("samples", {"samples": [0.0] * 16_000}),
        ("language", {"language": "xx"}),
        ("language", {"language": "<|en|>"}),
        ("languages", {"languages": ("en", "xx")}),
        ("prefix", {"prefix": (5, 6)}),
        ("prefix", {"prefix": (5,) * 200, "language": "en"}),
        ("prefix", {"prefix": (5,), "language": "en", "timestamps": True}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": 1.1}),
        ("temperature", {"temperature": float("nan")}),
    ],
)
def test_a_bad_request_is_refused_by_field_and_the_engine_lives_on(bench: Bench, field: str, changes: dict):
    with pytest.raises(InvalidRequestError) as refusal:
        bench.run(_collect, bench.engine, replace(bench.request(), **changes))
    assert refusal.value.field == field
    assert bench.engine.requests == 0
    assert bench.engine.state.phase == "ready"


@pytest.mark.parametrize("samples", [GOOD[:1], np.zeros(480_000, dtype=np.float32), np.ones(16_000, np.float32)])
def test_the_edges_of_what_is_allowed_do_not_harm_the_engine(bench: Bench, samples: np.ndarray):
    deltas = bench.run(_collect, bench.engine, bench.request(samples=samples))
    assert deltas[-1].outcome
    assert bench.engine.state.phase == "ready"


@pytest.mark.parametrize(
    "text", ["Ever tried.", "<|startoftranscript|><|endoftext|> odd", "word " * 2000, "\0 \ud83d", "天气" * 900]
)
def test_any_previous_text_is_taken(bench: Bench, text: str):
    deltas = bench.run(_collect, bench.engine, bench.request(previous_text=text))
    assert deltas[-1].outcome
    assert bench.engine.state.phase == "ready"


def test_a_prefix_is_not_told_again_and_the_rest_is_as_without_it(bench: Bench):
    (whole,) = bench.run(_collect, bench.engine, bench.request(language="en"))
    for known in (1, 4):
        (rest,) = bench.run(_collect, bench.engine, bench.request(language="en", prefix=whole.tokens[:known]))
        assert whole.tokens[:known] + rest.tokens == whole.tokens
        assert whole.text.endswith(rest.text)
        assert rest.outcome.usage.output_tokens == len(whole.tokens) - known
    (nothing,) = bench.run(_collect, bench.engine, bench.request(language="en", prefix=whole.tokens))
    assert nothing.text == ""


def test_a_bound_on_tokens_is_kept(bench: Bench):
    (whole,) = bench.run(_collect, bench.engine, bench.request(language="en"))
    (short,) = bench.run(_collect, bench.engine, bench.request(language="en", max_tokens=3))
    assert short.tokens == whole.tokens[:3]
    assert short.outcome.finish_reason == "length"


def test_temperature_and_priority_are_taken(bench: Bench):
    deltas = bench.run(_collect, bench.engine, bench.request(temperature=0.2, priority=7))
    assert "fail" in speech.words(_text(deltas))


@given(asked=st.lists(st.tuples(st.sampled_from([0, 10]), st.floats(0, 100)), min_size=2, max_size=8))
def test_the_waiting_go_by_priority_and_then_by_when_they_came_with_their_patience(asked: list[tuple[int, float]]):
    """As if those of one priority had come later by their patience; milliseconds pass between them."""
    turns = [DecodeRequest("r", GOOD, priority=priority, patience_seconds=patience).turn for priority, patience in asked]
    order = sorted(range(len(asked)), key=lambda i: turns[i])
    for first, second in itertools.pairwise(order):
        (priority, patience), (next_priority, next_patience) = asked[first], asked[second]
        assert priority < next_priority or (priority == next_priority and patience <= next_patience + 0.1)


@pytest.mark.real(order=22)
@pytest.mark.parametrize(
    ("decoded", "positions", "admitted"),
    [
        ([], 1500, 1),  # a window begins when nobody waits for his first tokens, and alone
        ([11], 1500, 0),
        ([12, 40], 1500, 1),
        ([12, 3], 614, 0),
        ([0], 300, 15),  # short audio begins at once
        ([40] * 16, 1500, 0),
        ([0], None, 15),
    ],
)
def test_a_window_waits_for_the_first_tokens_of_others(decoded: list[int], positions: int | None, admitted: int, monkeypatch):
    """How many requests vLLM's own scheduler may begin in a step, of 16 places."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from engine.vllm_plugin import SpacedScheduler

    def schedule(scheduler: SpacedScheduler, _throttle: bool) -> int:
        return scheduler.max_num_active_reqs - len(scheduler.running)

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    scheduler = SpacedScheduler.__new__(SpacedScheduler)
    scheduler.max_num_active_reqs = 16
    scheduler.running = [SimpleNamespace(num_output_tokens=count) for count in decoded]
    waiting = SimpleNamespace(has_encoder_inputs=True, get_num_encoder_embeds=lambda _: positions)
    scheduler.waiting = FakeQueue([waiting] if positions else [])
    assert scheduler.schedule() == admitted
    assert scheduler.max_num_active_reqs == 16


class FakeQueue(list):
    """vLLM's queue, as far as it is looked at."""

    def peek_request(self) -> object:
        return self[0]


def test_a_multilingual_engine_says_what_it_can(bench: Bench):
    limits = bench.engine.limits
    assert {"en", "de", "zh"} < set(limits.languages)
    assert {"detection", "translation", "prompt", "words"} == limits.abilities
    assert (limits.window_samples, limits.sample_rate) == (480_000, 16_000)
    assert limits.concurrency >= 1
    assert bench.engine.device


def _never_started(tmp_path) -> Engine:
    return VllmEngine(VllmOptions(model="base", cache_dir=tmp_path))


@pytest.mark.parametrize("make", [lambda _: FakeEngine(), _never_started], ids=["fake", "vllm"])
async def test_an_engine_that_is_not_ready_takes_nothing(make: Callable[..., Engine], tmp_path):
    engine = make(tmp_path)
    assert engine.state.phase == "starting"
    with pytest.raises(EngineUnavailableError):
        await _collect(engine, DecodeRequest(id="early", samples=GOOD))
    assert engine.requests == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda _: FakeEngine(fail_start="no such model"),
        lambda tmp_path: VllmEngine(VllmOptions(model="no such model", cache_dir=tmp_path)),
    ],
    ids=["fake", "vllm"],
)
async def test_an_engine_that_cannot_start_says_why(make: Callable[..., Engine], tmp_path):
    async with make(tmp_path) as engine:
        with pytest.raises(EngineUnavailableError, match="no such model"):
            await engine.wait_ready()
        assert engine.state.phase == "failed"
        with pytest.raises(EngineUnavailableError):
            await _collect(engine, DecodeRequest(id="late", samples=GOOD))
    assert engine.state.phase == "draining"


async def test_waiting_for_an_engine_ends_when_it_stops():
    async def wait(engine: Engine) -> None:
        with pytest.raises(EngineUnavailableError, match="stopping"):
            await engine.wait_ready()

    async with FakeEngine(start_seconds=3600) as engine:
        waiting: Awaitable[None] = asyncio.create_task(wait(engine))
        await asyncio.sleep(0)
    await waiting
