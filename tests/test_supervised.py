"""An engine that dies or hangs is built anew; who it served is told, and who comes back is served."""

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace

import httpx
import numpy as np
import pytest

from app.settings import Settings
from engine.base import DecodeRequest, EngineFailedError, EngineUnavailableError, InvalidRequestError
from engine.fake import FakeEngine, Reply
from engine.supervised import SupervisedEngine
from tests import speech
from tests.crowd import Client, all_answered, start
from tests.gateway import running_gateway, wait_until

SOUND = np.full(16_000, 0.1, dtype=np.float32)
POISON = np.full(16_000, 0.25, dtype=np.float32)


class Made(list[FakeEngine]):
    """Makes engines, and remembers them."""

    def __init__(self, script=lambda _: Reply((" a", " b")), **options) -> None:
        super().__init__()
        self.script, self.options = script, options
        self.fail_next = 0

    def __call__(self) -> FakeEngine:
        failing = {"fail_start": "no memory"} if self and self.fail_next > 0 else {}
        self.fail_next -= bool(failing)
        self.append(FakeEngine(self.script, **(self.options | failing)))
        return self[-1]


async def heard(engine: SupervisedEngine, samples: np.ndarray = SOUND, **fields) -> str:
    request = DecodeRequest("r", samples, language="en", **fields)
    async with aclosing(engine.transcribe(request)) as deltas:
        return "".join([delta.text async for delta in deltas])


async def ready_again(engine: SupervisedEngine, deaths: int) -> None:
    async with asyncio.timeout(20):
        while engine.deaths < deaths or engine.state.phase != "ready":  # noqa: ASYNC110 - it has no event for this
            await asyncio.sleep(0.01)


async def test_it_is_built_anew_as_often_as_it_dies_and_each_request_is_answered():
    made = Made(lambda _: Reply((" a", " b"), first_seconds=0.2))
    async with SupervisedEngine(made, first_pause=0.01) as engine:
        await engine.wait_ready()
        for death in range(1, 6):
            asking = [asyncio.create_task(heard(engine, SOUND + i / 1000 + death / 10)) for i in range(8)]
            await asyncio.sleep(0.05)
            made[-1].die()
            answers = await asyncio.gather(*asking, return_exceptions=True)
            assert [type(answer) for answer in answers] == [EngineFailedError] * 8
            assert engine.state.phase == "starting"
            assert "the engine process died" in engine.state.reason
            with pytest.raises(EngineUnavailableError):
                await heard(engine)
            await ready_again(engine, death)
            assert await heard(engine) == " a b"
        assert len(made) == 6
        assert engine.requests == 0


async def test_while_it_is_built_anew_its_limits_are_what_they_were():
    made = Made(start_seconds=0.2, concurrency=7)
    async with SupervisedEngine(made) as engine:
        await engine.wait_ready()
        made[-1].die()
        await asyncio.sleep(0.15)
        assert engine.limits.concurrency == 7
        await engine.wait_ready()
        assert await heard(engine) == " a b"


async def test_a_build_that_fails_is_tried_again():
    made = Made()
    async with SupervisedEngine(made, first_pause=0.01) as engine:
        await engine.wait_ready()
        made.fail_next = 3
        made[-1].die()
        await ready_again(engine, 1)
        assert len(made) == 5
        assert await heard(engine) == " a b"


async def test_an_engine_that_never_was_ready_is_not_tried_again():
    made = Made(fail_start="no such model")
    async with SupervisedEngine(made, first_pause=0.01) as engine:
        with pytest.raises(EngineUnavailableError, match="no such model"):
            await engine.wait_ready()
        await asyncio.sleep(0.3)
        assert engine.state.phase == "failed"
        assert len(made) == 1


async def test_an_engine_that_hangs_is_killed_and_one_that_is_slow_or_idle_is_not():
    def script(request: DecodeRequest) -> Reply:
        if request.previous_text == "hang":
            return Reply((" a",), stall_after=0)
        return Reply((" a",) * 8, piece_seconds=0.2)

    made = Made(script)
    async with SupervisedEngine(made, stall_seconds=0.8, first_pause=0.01) as engine:
        await engine.wait_ready()
        await asyncio.sleep(1.2)
        assert await heard(engine, deltas=True) == " a" * 8
        assert engine.deaths == 0
        hanging = asyncio.create_task(heard(engine, previous_text="hang"))
        assert await heard(engine, deltas=True) == " a" * 8  # something is told: it does not hang
        assert engine.deaths == 0
        with pytest.raises(EngineFailedError):
            await hanging
        await ready_again(engine, 1)
        assert await heard(engine, deltas=True) == " a" * 8


async def test_audio_that_the_engine_died_of_twice_is_refused_and_other_audio_is_not():
    def script(request: DecodeRequest) -> Reply:
        if request.samples[0] == POISON[0] and request.previous_text != "cured":
            asyncio.get_running_loop().call_later(0.02, made[-1].die)
        return Reply((" a", " b"), first_seconds=0.1)

    made = Made(script)
    async with SupervisedEngine(made, first_pause=0.01) as engine:
        await engine.wait_ready()

        async def die(beside: np.ndarray, deaths: int) -> None:
            answers = await asyncio.gather(heard(engine, POISON), heard(engine, beside), return_exceptions=True)
            assert [type(answer) for answer in answers] == [EngineFailedError] * 2
            await ready_again(engine, deaths)

        await die(SOUND, 1)
        assert await heard(engine, SOUND) == " a b"  # which clears it
        await die(SOUND, 2)
        with pytest.raises(InvalidRequestError, match="died") as refused:
            await heard(engine, POISON.copy())
        assert refused.value.field == "samples"
        assert await heard(engine, SOUND) == " a b"
        assert engine.deaths == 2


async def test_what_was_decoded_to_its_end_is_no_poison():
    made = Made(lambda request: Reply((" a",), first_seconds=0.0 if request.previous_text else 5.0))
    async with SupervisedEngine(made, first_pause=0.01) as engine:
        await engine.wait_ready()
        for death in (1, 2, 3):
            asking = asyncio.create_task(heard(engine))
            await asyncio.sleep(0.05)
            made[-1].die()
            with pytest.raises(EngineFailedError):
                await asking
            await ready_again(engine, death)
            assert await heard(engine, previous_text="quick") == " a"


async def test_a_gateway_that_stops_while_its_engine_is_built_anew_stops():
    made = Made(start_seconds=30.0)
    made.options["start_seconds"] = 0.0
    async with asyncio.timeout(10):
        async with SupervisedEngine(made) as engine:
            await engine.wait_ready()
            made.options["start_seconds"] = 30.0
            waiting = asyncio.create_task(engine.wait_ready())
            await waiting
            made[-1].die()
            await asyncio.sleep(0.3)
            waiting = asyncio.create_task(engine.wait_ready())
            await asyncio.sleep(0)
    with pytest.raises(EngineUnavailableError):
        await waiting
    assert engine.state.phase == "draining"


def test_every_client_of_a_dying_engine_gets_an_answer_and_the_gateway_goes_on():
    """Eight live sessions and eight files, five deaths in a row."""
    made = Made(lambda _: Reply((" a", " b"), first_seconds=0.3), concurrency=64)
    settings = Settings(_env_file=None, vad=False)
    with running_gateway(lambda: SupervisedEngine(made, first_pause=0.01), settings) as gateway:
        gateway.run(gateway.engine.wait_ready)
        made.options["start_seconds"] = 1.0
        for death in range(1, 6):
            sounds = [speech.tone(4.0, frequency=200 + 10 * i + death) for i in range(16)]
            clients = [Client(gateway.url, "base", sound, (None, 0.02)[i % 2]) for i, sound in enumerate(sounds)]
            start(*clients)
            wait_until(lambda: gateway.engine.requests >= 12)
            gateway.run(_die, made[-1])
            assert all_answered(clients, within=10)
            for client in clients:
                assert client.error
                assert '"server_error"' in client.text or '"service_unavailable_error"' in client.text
                assert "[DONE]" not in client.text
            wait_until(lambda death=death: gateway.engine.deaths == death and gateway.engine.state.phase == "ready")
            assert httpx.get(f"{gateway.url}/health/ready").status_code == 200
            after = Client(gateway.url, "base", speech.tone(1.0, frequency=999 - death))
            after.run()
            assert json.loads(after.text)["text"] == "a b"


async def _die(engine: FakeEngine) -> None:
    engine.kill()


def test_a_request_that_differs_in_its_audio_has_another_fingerprint():
    from engine.supervised import _fingerprint

    request = DecodeRequest("r", SOUND)
    assert _fingerprint(request) == _fingerprint(replace(request, id="s", samples=SOUND.copy()))
    assert _fingerprint(request) != _fingerprint(replace(request, samples=POISON))
