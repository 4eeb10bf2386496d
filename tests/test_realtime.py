"""The third door: OpenAI's Realtime protocol over real sockets, on the scripted engine."""

import base64
import itertools
import json
import logging
import os
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import av
import httpx
import numpy as np
import openai
import psutil
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

import app.server
import routers.realtime
from app.keys import new_key
from app.settings import Settings
from engine.base import DecodeRequest
from engine.fake import FakeEngine, Reply
from tests.certificates import certificates
from tests.gateway import Gateway, running_gateway, wait_until, wait_until_idle
from tests.talking import KEY_PROTOCOL, PCM16, Talk, s16le
from tests.test_live import RATE, WORD, LoudIsSpeech, saying, silence, words_in
from tests.test_wire import ready_gateway

FIRST = ["input_audio_buffer.committed", "conversation.item.added", "conversation.item.done"]
COMPLETED = "input_audio_transcription.completed"
LOUD = 10  # times the scripted words, so that a telephone's eight bits tell them apart


def script(request: DecodeRequest) -> Reply:
    """Read the words off their samples, which 16 bits and a resampler have blurred."""
    if request.previous_text == "hang" and not request.priority:
        return Reply((" one",), first_seconds=3600)
    if request.previous_text == "fail" and not request.priority:
        return Reply((" one",), fail_after=0)
    return Reply(tuple(words_in(request.samples / (LOUD if request.previous_text == "loud" else 1))))


@contextmanager
def talking_gateway(**settings) -> Iterator[Gateway]:
    defaults = {"agreeing_hypotheses": 2}
    with ready_gateway(lambda: FakeEngine(script, remember=False), **defaults | settings) as gateway:
        gateway.services.live._voice_activity = LoudIsSpeech
        yield gateway


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with talking_gateway() as gateway:
        yield gateway


pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def words(first: int, last: int) -> str:
    return " ".join(f"w{i}" for i in range(first, last + 1))


def kinds(events: list[dict]) -> list[str]:
    return [event["type"] for event in events]


# --- turns ----------------------------------------------------------------------------------------------------------------


def test_turns_that_the_server_finds(gateway: Gateway):
    with Talk(gateway) as talk:
        assert talk.until("session.created")[0]["session"]["audio"]["input"]["transcription"]["model"] == "base"
        assert talk.set(format=PCM16)["audio"]["input"]["format"] == PCM16
        for first in (1, 11):
            talk.speak(np.concatenate([silence(0.5), saying(first, first + 7), silence(1.0)]))
        talk.until(COMPLETED, count=2)
    assert talk.texts == [words(1, 8), words(11, 18)]
    assert talk.deltas_join()
    (started, _), (stopped, _) = talk.of("speech_started"), talk.of("speech_stopped")
    assert 0 <= started["audio_start_ms"] <= 500
    assert 2100 <= stopped["audio_end_ms"] <= 2600
    first, second = (event["item_id"] for event in talk.of("committed"))
    assert [event["previous_item_id"] for event in talk.of("committed")] == [None, first]
    of_first = [e["type"] for e in talk.told if first in (e.get("item_id"), e.get("item", {}).get("id"))]
    known = [kind for kind in of_first if not kind.endswith(".delta")]
    assert known == [
        "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped", *FIRST,
        "conversation.item.input_audio_transcription.completed",
    ]  # fmt: skip
    assert 1.6 <= talk.of("completed")[0]["usage"]["seconds"] <= 2.6
    assert second != first


def test_while_nobody_speaks_nothing_is_told(gateway: Gateway):
    """G13."""
    with Talk(gateway) as talk:
        talk.set(format=PCM16)
        talk.speak(np.concatenate([silence(5.0), saying(1, 5), silence(5.0)]))
        talk.until(COMPLETED)
        talk.speak(silence(30.0))
        talk.say("input_audio_buffer.clear")
        assert kinds(talk.until("cleared")) == ["input_audio_buffer.cleared"]
    assert talk.texts == [words(1, 5)]
    assert len(talk.of("speech_started")) == 1


def test_text_comes_while_somebody_speaks(gateway: Gateway):
    with Talk(gateway) as talk:
        talk.set(format=PCM16, turn_detection=None)
        number = 1
        while not talk.of(".delta"):
            talk.speak(saying(number, number + 4))
            number += 5
            with suppress(TimeoutError):
                talk.next(timeout=0.2)
        assert not talk.of("committed")
        talk.commit()
        talk.until(COMPLETED)
    assert talk.texts == [words(1, number - 1)]
    assert talk.deltas_join()
    assert talk.of(".delta")[0]["item_id"] == talk.of("committed")[0]["item_id"]


def test_turns_that_the_client_commits(gateway: Gateway):
    with Talk(gateway) as talk:
        talk.set(format=PCM16, turn_detection=None)
        for first, last in ((1, 3), (4, 9), (10, 10)):
            talk.speak(np.concatenate([silence(0.2), saying(first, last), silence(0.2)]))
            talk.commit()
        talk.until(COMPLETED, count=3)
        assert talk.texts == [words(1, 3), words(4, 9), words(10, 10)]
        assert not talk.of("speech_started")
        # Too little is OpenAI's error, and is kept for the next commit.
        for milliseconds in (0, 50, 49):
            talk.append(bytes(round(32 * milliseconds)))
            talk.commit(event_id=f"after {milliseconds}")
            error = talk.until("error")[-1]["error"]
            assert (error["code"], error["event_id"]) == ("input_audio_buffer_commit_empty", f"after {milliseconds}")
        assert "buffer only has 99.00ms of audio" in error["message"]
        talk.append(bytes(32))
        talk.commit()
        assert talk.until(COMPLETED)[-1]["transcript"] == ""


def test_what_is_cleared_is_never_told(gateway: Gateway):
    with Talk(gateway) as talk:
        talk.set(format=PCM16, turn_detection=None)
        talk.speak(saying(1, 20))
        talk.say("input_audio_buffer.clear")
        talk.until("input_audio_buffer.cleared")
        talk.commit()
        assert talk.until("error")[-1]["error"]["code"] == "input_audio_buffer_commit_empty"
        talk.speak(saying(30, 34))
        talk.commit()
        talk.until(COMPLETED)
        assert talk.texts == [words(30, 34)]
        talk.set(turn_detection={"type": "server_vad"})
        talk.speak(saying(40, 60))
        talk.until("speech_started")
        talk.say("input_audio_buffer.clear")
        talk.until("input_audio_buffer.cleared")
        told = len(talk.told)
        talk.speak(np.concatenate([silence(1.0), saying(70, 74), silence(1.0)]))
        talk.until(COMPLETED)
        taken_back = talk.of("speech_started")[0]["item_id"]
        assert taken_back not in {event.get("item_id") for event in talk.told[told:]}
    assert talk.texts == [words(30, 34), words(70, 74)]


def test_a_commit_after_the_servers_own_is_an_error_that_costs_nothing(gateway: Gateway):
    """G05."""
    with Talk(gateway) as talk:
        talk.set(format=PCM16)
        talk.speak(np.concatenate([saying(1, 5), silence(1.0)]))
        talk.until("committed")
        talk.commit()
        while not (talk.of("error") and talk.of(COMPLETED)):
            talk.next()
        assert talk.of("error")[0]["error"]["code"] == "input_audio_buffer_commit_empty"
        talk.speak(np.concatenate([saying(6, 10), silence(0.05)]))
        talk.until("speech_started")
        talk.commit()  # in the middle of the turn
        talk.until(COMPLETED)
    assert talk.texts == [words(1, 5), words(6, 10)]


def test_a_turn_longer_than_the_window_is_one_item(gateway: Gateway):
    with Talk(gateway) as talk:
        talk.set(format=PCM16, turn_detection=None)
        talk.append(saying(1, 400))  # 80 s in one event of 3.4 MB (G09)
        talk.commit()
        talk.until(COMPLETED)
    (text,) = talk.texts
    assert text == words(1, 400)
    assert talk.deltas_join()
    assert len(talk.of("committed")) == len({event["item_id"] for event in talk.of(".delta")}) == 1
    assert talk.of(COMPLETED)[0]["usage"]["seconds"] == 80


def test_settings_may_change_between_two_words(gateway: Gateway):
    with Talk(gateway) as talk:
        talk.set(format=PCM16, turn_detection=None)
        talk.speak(saying(1, 5))
        changed = talk.set(transcription={"prompt": "loud", "language": "en"}, turn_detection={"type": "server_vad"})
        assert changed["audio"]["input"]["transcription"]["prompt"] == "loud"
        talk.until(COMPLETED)  # finding turns passed to the server: what was open is over
        assert talk.texts == [words(1, 5)]  # and was transcribed as it began
        talk.set(format={"type": "audio/pcm", "rate": 48000})
        talk.append(np.repeat(np.concatenate([LOUD * saying(6, 10), silence(1.0)]), 3))
        talk.until(COMPLETED)
        assert talk.texts[1:] == [words(6, 10)]


def g711(samples: np.ndarray, encoding: str) -> bytes:
    """Encode samples at 8 kHz, with FFmpeg's own encoder."""
    encoder = av.CodecContext.create(f"pcm_{encoding}", "w")
    encoder.sample_rate, encoder.layout, encoder.format = 8000, "mono", "s16"
    frame = av.AudioFrame.from_ndarray(np.frombuffer(s16le(samples), "<i2")[None], format="s16", layout="mono")
    frame.sample_rate = 8000
    return b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])


@pytest.mark.parametrize("kind", ["pcm8", "pcm24", "pcm44", "pcmu", "pcma", "g711_ulaw", "pcm16"])
def test_formats_and_rates(gateway: Gateway, kind: str):
    """G07, G08."""
    rates = {"pcm8": 8000, "pcm24": 24000, "pcm44": 44100, "pcm16": 24000}
    rate = rates.get(kind, 8000)
    at = np.arange(int(16 * WORD * rate / RATE)) * RATE // rate
    spoken = (LOUD * saying(1, 16))[at]
    with Talk(gateway) as talk:
        talk.set(transcription={"prompt": "loud", "language": "en"}, turn_detection=None)
        if kind in ("g711_ulaw", "pcm16"):
            talk.say("transcription_session.update", session={"input_audio_format": kind})
            assert talk.until("updated")[-1]["session"]["input_audio_format"] == kind
        else:
            form = {"type": f"audio/{kind}"} if kind in ("pcmu", "pcma") else {"type": "audio/pcm", "rate": rate}
            assert talk.set(format=form)["audio"]["input"]["format"] == form
        audio = s16le(spoken) if kind.startswith("pcm") and kind[3:].isdigit() else g711(spoken, _law(kind))
        for first in range(0, len(audio), 999):  # an odd number of bytes: samples are torn apart
            talk.append(audio[first : first + 999])
        talk.commit()
        talk.until(COMPLETED)
    assert talk.texts == [words(1, 16)]


def _law(kind: str) -> str:
    return "alaw" if kind == "pcma" else "mulaw"


# --- clients that get it wrong ----------------------------------------------------------------------------------------------


def test_a_session_survives_whatever_its_client_gets_wrong(gateway: Gateway):
    """G01."""
    wrong = [
        b"\x00\xff" * 10, "", "{", "null", "[1]", '{"type": "x"}', '{"type": {}}', '{"type": "response.create"}',
        '{"type": "input_audio_buffer.append", "audio": 7}', '{"type": "input_audio_buffer.append", "audio": "*"}',
        '{"type": "session.update", "session": {"audio": {"input": {"format": {"type": "mp3"}}}}}',
        '{"type": "conversation.item.delete", "item_id": "item_1"}', "\U0001f600",
    ]  # fmt: skip
    with Talk(gateway) as talk:
        talk.set(format=PCM16, turn_detection=None)
        for number, message in enumerate(wrong, 1):
            talk.append(saying(number, number))
            talk.socket.send(message)
        talk.until("error", count=len(wrong))
        assert {event["error"]["type"] for event in talk.of("error")} == {"invalid_request_error"}
        talk.commit()
        talk.until(COMPLETED)
        assert talk.texts == [words(1, len(wrong))]


@pytest.mark.parametrize("query", ["", "intent=transcription", "model=base", "model=gpt-4o-transcribe&intent=transcription",
                                   "model=gpt-realtime", "intent=conversation&model=gpt-realtime-2"])  # fmt: skip
def test_ways_to_name_the_model(gateway: Gateway, query: str):
    """G11."""
    with Talk(gateway, query) as talk:
        named = talk.until("created")[0]["session"]["audio"]["input"]["transcription"]["model"]
        assert named == ("gpt-4o-transcribe" if "4o" in query else "base")
        assert talk.set(transcription={"model": "whisper-1"})["audio"]["input"]["transcription"]["model"] == "whisper-1"


@pytest.mark.parametrize(
    "options",
    [{"additional_headers": {"OpenAI-Beta": "realtime=v1"}}, {"subprotocols": ["realtime", "openai-beta.realtime-v1"]}],
)
def test_the_betas_clients_are_answered_in_their_shapes(gateway: Gateway, options: dict):
    with Talk(gateway, **options) as talk:
        assert talk.next()["type"] == "transcription_session.created"
        talk.say(
            "transcription_session.update",
            session={
                "input_audio_format": "pcm16",
                "input_audio_transcription": {"prompt": "loud", "language": "en"},
                "turn_detection": None,
            },
        )
        assert talk.next()["type"] == "transcription_session.updated"
        talk.append(np.repeat(LOUD * saying(1, 4), 3)[::2])
        talk.commit()
        talk.until(COMPLETED)
        assert "conversation.item.created" in kinds(talk.told)
    assert talk.texts == [words(1, 4)]


def refused(server: Gateway | str, query: str = "intent=transcription", **options) -> httpx.Response:
    """Try to connect, and return the handshake's answer."""
    with pytest.raises(InvalidStatus) as caught:
        Talk(server, query, **options)
    answer = caught.value.response
    return httpx.Response(answer.status_code, headers=list(answer.headers.raw_items()), content=bytes(answer.body))


def test_a_refusal_is_the_handshakes_answer(gateway: Gateway):
    answer = refused(gateway, "model=gpt-9")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert answer.headers["x-request-id"].startswith("req_")
    answer = refused(gateway, origin="https://elsewhere.example")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    with Talk(gateway, origin=gateway.url):
        pass
    plain = httpx.get(f"{gateway.url}/v1/realtime", verify=False)
    assert (plain.status_code, plain.json()["error"]["code"]) == (426, "upgrade_required")


def test_who_finds_no_place_is_refused_before_any_work():
    with talking_gateway(max_requests=1, admission_wait_seconds=0.0) as gateway:
        with Talk(gateway):
            answer = refused(gateway)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
        wait_until_idle(gateway)
        with Talk(gateway) as talk:
            talk.until("created")


def test_while_the_engine_starts_nobody_is_let_in():
    with running_gateway(lambda: FakeEngine(script, start_seconds=3600), Settings(_env_file=None)) as gateway:
        answer = refused(gateway)
        assert answer.status_code == 503
        assert "retry-after" in answer.headers


# --- keys -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked() -> Iterator[tuple[Gateway, str]]:
    key, line = new_key("alice")
    with talking_gateway(api_keys=line, key_live_sessions=2) as gateway:
        yield gateway, key


def test_keys_in_each_of_their_places(locked: tuple[Gateway, str], caplog: pytest.LogCaptureFixture):
    """G12."""
    gateway, key = locked
    caplog.set_level(logging.DEBUG)
    for options in (
        {"additional_headers": {"Authorization": f"Bearer {key}"}},
        {"additional_headers": {"api-key": key}},
        {"subprotocols": ["realtime", KEY_PROTOCOL + key]},
        {"subprotocols": ["realtime", KEY_PROTOCOL + key], "origin": "https://elsewhere.example"},
    ):
        with Talk(gateway, **options) as talk:
            talk.until("created")
            assert talk.socket.subprotocol == ("realtime" if "subprotocols" in options else None)
            wait_until(lambda: gateway.services.admission.in_progress)
        wait_until_idle(gateway)
    for options in (
        {},
        {"additional_headers": {"Authorization": "Bearer wrong"}},
        {"subprotocols": ["realtime", KEY_PROTOCOL + "wrong"]},
        {"subprotocols": ["realtime"]},
    ):
        answer = refused(gateway, **options)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert refused(gateway, f"token={key}").status_code == 401  # an address lands in logs
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith("websockets")]
    assert not [line for line in ours if key in line]
    assert "'/v1/realtime' 101 in" in caplog.text
    assert "for alice" in caplog.text


def test_a_keys_bounds_hold_for_its_sockets(locked: tuple[Gateway, str]):
    gateway, key = locked
    headers = {"additional_headers": {"Authorization": f"Bearer {key}"}}
    with Talk(gateway, **headers), Talk(gateway, **headers):
        answer = refused(gateway, **headers)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
    wait_until_idle(gateway)


def test_a_client_secret_opens_sessions_until_it_expires(locked: tuple[Gateway, str]):
    gateway, key = locked
    client = gateway.client(api_key=key)
    made = client.realtime.client_secrets.create(
        expires_after={"anchor": "created_at", "seconds": 60},
        session={"type": "transcription", "audio": {"input": {"turn_detection": None, "format": {"type": "audio/pcmu"}}}},
    )
    assert made.value.startswith("ek_")
    assert 50 < made.expires_at - time.time() <= 60
    assert made.session.type == "transcription"
    for _ in range(2):
        with Talk(gateway, subprotocols=["realtime", KEY_PROTOCOL + made.value]) as talk:
            begun = talk.until("created")[0]["session"]["audio"]["input"]
            assert (begun["format"], begun["turn_detection"]) == ({"type": "audio/pcmu"}, None)
    wait_until_idle(gateway)
    secrets = gateway.services.client_secrets
    secrets._now = lambda: time.time() + 61
    try:
        assert refused(gateway, subprotocols=["realtime", KEY_PROTOCOL + made.value]).status_code == 401
    finally:
        secrets._now = time.time
    assert refused(gateway, subprotocols=["realtime", KEY_PROTOCOL + "ek_guessed"]).status_code == 401
    with pytest.raises(openai.AuthenticationError):  # it opens nothing else
        gateway.client(api_key=made.value).models.list()
    for body, param in (
        ({"expires_after": {"anchor": "created_at", "seconds": 9}}, "expires_after"),
        ({"session": {"type": "realtime", "model": "gpt-realtime"}}, "session.type"),
        ({"session": {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 1}}}}}, "session.audio.input.format.rate"),
    ):
        answer = httpx.post(
            f"{gateway.url}/v1/realtime/client_secrets", json=body, headers={"Authorization": f"Bearer {key}"}, verify=False
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    unknown = httpx.post(f"{gateway.url}/v1/realtime/client_secrets", json={}, verify=False)
    assert unknown.status_code == 401


# --- bounds ---------------------------------------------------------------------------------------------------------------


def closed_with(talk: Talk, *, timeout: float = 60) -> tuple[int, str]:
    """Read to the end, and return how it was closed."""
    try:
        while True:
            talk.next(timeout=timeout)
    except ConnectionClosed as error:
        return (error.rcvd.code, error.rcvd.reason) if error.rcvd else (1006, "")


def test_who_says_nothing_is_left_with_a_word():
    """G02."""
    with talking_gateway(realtime_idle_seconds=0.5) as gateway:
        talks = [Talk(gateway) for _ in range(8)]
        for talk in talks:
            talk.append(bytes(48_000))
        for talk in talks:
            assert closed_with(talk) == (1008, "idle")
            assert talk.told[-1]["error"]["code"] == "session_idle"
        wait_until_idle(gateway)


def test_a_flood_waits_for_room_and_the_pings_go_on(monkeypatch: pytest.MonkeyPatch):
    """While the engine hangs nobody reads the socket, nor the answers to pings in it; the client is not taken for dead."""
    monkeypatch.setattr(app.server, "PING_SECONDS", 0.2)
    with talking_gateway(live_buffer_seconds=60, shutdown_grace_seconds=0) as gateway:
        talk = Talk(gateway)
        talk.set(format=PCM16, turn_detection=None, transcription={"prompt": "hang"})

        def flood() -> None:
            with suppress(ConnectionClosed):
                for _ in range(40):
                    talk.append(saying(1, 50))

        flooding = threading.Thread(target=flood)
        flooding.start()
        (session,) = gateway.services.live.open
        wait_until(lambda: not session.has_room)
        before = time.monotonic()
        wait_until(lambda: time.monotonic() > before + 2)  # ten times as long as a ping may take
        assert 60 <= session.kept_seconds <= 62
        assert session in gateway.services.live.open
        talk.socket.socket.shutdown(socket.SHUT_RDWR)
        flooding.join(60)
        gateway.run(_close, session)
        wait_until_idle(gateway)


async def _close(session) -> None:
    session.close()


def test_who_answers_no_ping_is_left(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    """G10: a client that is gone without a word, behind a proxy that keeps its connection."""
    monkeypatch.setattr(app.server, "PING_SECONDS", 0.3)
    with talking_gateway() as own:
        silent = raw_handshake(own)
        wait_until(lambda: own.services.live.open)
        wait_until_idle(own)
        silent.close()
        with Talk(own) as talk:  # its library answers pings
            talk.until("created")
            with pytest.raises(TimeoutError):
                talk.next(timeout=1.5)
            assert len(own.services.live.open) == 1


def test_who_does_not_read_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routers.realtime, "SEND_SECONDS", 0.5)
    with talking_gateway() as gateway:
        deaf = raw_handshake(gateway, receive_buffer=4096)
        wait_until(lambda: gateway.services.live.open)
        mistake = frame(json.dumps({"type": "y" * 60, "event_id": "x" * 100_000}).encode())
        deaf.settimeout(3)
        with suppress(OSError):
            for _ in range(300):
                deaf.sendall(mistake)
        wait_until_idle(gateway)
        deaf.close()


def test_a_stop_lets_speakers_have_their_text_and_says_that_it_goes():
    with talking_gateway(shutdown_grace_seconds=20) as gateway:
        speaking, idle = Talk(gateway), Talk(gateway)
        speaking.set(format=PCM16, turn_detection=None)
        speaking.speak(saying(1, 12))
        wait_until(lambda: any(session.seconds > 2.3 for session in gateway.services.live.open))
        gateway.run(_stop, gateway)
        assert closed_with(speaking)[0] == closed_with(idle)[0] == 1001
        assert speaking.texts == [words(1, 12)]


async def _stop(gateway: Gateway) -> None:
    gateway.server.handle_exit(15, None)


def test_a_session_that_is_too_long_has_its_text_and_ends():
    with talking_gateway(max_audio_minutes=0.1) as gateway, Talk(gateway) as talk:
        talk.set(format=PCM16, turn_detection=None)
        talk.append(saying(1, 40))
        assert closed_with(talk)[0] == 1001
        assert talk.of("error")[0]["error"]["code"] == "invalid_value"
        (text,) = talk.texts
        assert text == words(1, len(text.split()))
        assert len(text.split()) >= 30


def test_a_text_that_is_lost_fails_its_turn_and_the_session_goes_on(gateway: Gateway):
    with Talk(gateway) as talk:
        talk.set(format=PCM16, turn_detection=None, transcription={"prompt": "fail"})
        talk.append(saying(1, 4))
        talk.commit()
        failed = talk.until("input_audio_transcription.failed")[-1]
        assert failed["error"]["type"] == "transcription_error"
        assert failed["item_id"] == talk.of("committed")[0]["item_id"]
        talk.set(transcription={"prompt": None})
        talk.append(saying(5, 9))
        talk.commit()
        talk.until(COMPLETED)
        assert talk.texts == [words(5, 9)]


def test_fifteen_mebibytes_are_one_event_and_sixteen_close_the_socket():
    """G09."""
    with talking_gateway(live_buffer_seconds=60) as gateway:
        with Talk(gateway) as talk:
            talk.set(turn_detection=None)
            talk.append(bytes(3 * (15 << 20) // 4))
            talk.commit()
            assert talk.until(COMPLETED)[-1]["usage"]["seconds"] == pytest.approx(3 * (15 << 20) / 4 / 48_000, abs=0.1)
            with suppress(ConnectionClosed):
                talk.socket.send("x" * ((16 << 20) + 1))
            assert closed_with(talk)[0] == 1009
        with Talk(gateway) as talk:
            with suppress(ConnectionClosed):
                talk.socket.send(b"x" for _ in range(20_000))  # a message in as many fragments
            assert closed_with(talk)[0] == 1009


# --- clients that are rude ----------------------------------------------------------------------------------------------------


def frame(payload: bytes, *, opcode: int = 1, fin: bool = True) -> bytes:
    """Write a client's frame (RFC 6455), with a mask of zeros."""
    size = len(payload)
    if size < 126:
        length = struct.pack("!B", 0x80 | size)
    else:
        length = struct.pack("!BH", 0x80 | 126, size) if size < 1 << 16 else struct.pack("!BQ", 0x80 | 127, size)
    return bytes([fin << 7 | opcode]) + length + bytes(4) + payload


def raw_handshake(gateway: Gateway, *, receive_buffer: int | None = None) -> socket.socket:
    """Open a WebSocket by hand, to be rude with."""
    raw = socket.socket()
    if receive_buffer:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.settimeout(60)
    raw.connect(gateway.address)
    key = base64.b64encode(os.urandom(16)).decode()
    raw.sendall(
        f"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    assert raw.recv(1) == b"H"
    return raw


def reset(raw: socket.socket) -> None:
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


@pytest.mark.parametrize(
    ("broken", "code"),
    [(b"\xff" * 9, 1002), (b"\x81\x01x", 1002), (frame(b"\xff\xfe"), 1007)],
    ids=["reserved bits", "no mask", "no UTF-8"],
)
def test_who_breaks_the_protocol_hears_why_though_he_sends_on(gateway: Gateway, broken: bytes, code: int):
    raw = raw_handshake(gateway)
    audio = base64.b64encode(bytes(24_000)).decode()
    raw.sendall(frame(json.dumps({"type": "input_audio_buffer.append", "audio": audio}).encode()) + broken)
    for _ in range(16):
        raw.sendall(frame(bytes(1 << 18)))
    heard = b"".join(iter(lambda: raw.recv(1 << 16), b""))  # a reset would raise
    assert b"session.created" in heard
    assert struct.pack("!H", code) in heard[heard.rindex(b"\x88") :]


def test_who_breaks_the_protocol_and_never_stops_is_left(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app.server, "FAREWELL_SECONDS", 1)
    raw = raw_handshake(gateway)
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        any(map(raw.sendall, itertools.repeat(b"\xff" * 9999)))


def rude(gateway: Gateway, chance: random.Random) -> None:
    """Connect, do something, and vanish in the middle of it."""
    raw = raw_handshake(gateway)
    raw.settimeout(0.2)
    with suppress(OSError):
        for _ in range(chance.randrange(8)):
            audio = base64.b64encode(s16le(saying(90, 90 + chance.randrange(9)))).decode()
            said = chance.choice(
                [
                    {"type": "input_audio_buffer.append", "audio": audio},
                    {"type": "input_audio_buffer.append", "audio": audio},
                    {"type": "input_audio_buffer.commit"},
                    {"type": "input_audio_buffer.clear"},
                    {"type": "session.update", "session": {"audio": {"input": {"turn_detection": None, "format": PCM16}}}},
                    {"type": "session.update", "session": {"audio": {"input": {"transcription": {"prompt": "hang"}}}}},
                    {"type": "nonsense"},
                ]
            )
            whole = frame(json.dumps(said).encode(), opcode=chance.choice([1, 1, 1, 1, 2]))
            raw.sendall(whole if chance.random() < 0.8 else whole[: chance.randrange(len(whole))])
            if chance.random() < 0.1:
                raw.sendall(chance.randbytes(50))
            if chance.random() < 0.3:
                raw.recv(1000)
    (reset if chance.random() < 0.7 else socket.socket.close)(raw)


def test_fifty_sockets_with_random_resets_leave_nothing_and_harm_nobody():
    chance, process = random.Random(7), psutil.Process()
    with talking_gateway(max_requests=64, kept_share=0.0) as gateway:
        stop, texts, wrong = threading.Event(), [], []

        def polite(number: int) -> None:
            while not stop.is_set():
                try:
                    with Talk(gateway) as talk:
                        talk.set(format=PCM16, turn_detection=None)
                        talk.speak(saying(number, number + 9))
                        talk.commit()
                        talk.until(COMPLETED)
                    (wrong if talk.texts != [words(number, number + 9)] else texts).append(talk.texts)
                except Exception as error:
                    wrong.append(error)

        clients = [threading.Thread(target=polite, args=(10 * i,)) for i in range(1, 5)]
        for client in clients:
            client.start()

        def vandal(seed: int) -> None:
            its_chance = random.Random(seed)
            for _ in range(8):
                rude(gateway, its_chance)

        def fifty() -> None:
            vandals = [threading.Thread(target=vandal, args=(chance.random(),)) for _ in range(46)]
            for one in vandals:
                one.start()
            for one in vandals:
                one.join()

        fifty()
        before = process.memory_info().rss
        fifty()
        stop.set()
        for client in clients:
            client.join(60)
        wait_until_idle(gateway)
        assert not wrong
        assert len(texts) >= 8
        wait_until(lambda: not gateway.server.server_state.connections, seconds=30)
        wait_until(lambda: not gateway.server.server_state.tasks)
        grown = (process.memory_info().rss - before) / 1e6
        print(f"{len(texts)} polite sessions beside 736 rude ones; memory after the second half: {grown:+.1f} MB")
        assert grown < 40
        assert httpx.get(f"{gateway.url}/health/ready", verify=False).status_code == 200


def test_a_session_never_hears_what_another_one_was_told(gateway: Gateway):
    """G15."""
    seen: set[str] = set()
    for number in range(10, 60, 10):
        with Talk(gateway) as first:
            first.set(format=PCM16, turn_detection=None)
            first.append(saying(1, 5))
            first.commit()
        with Talk(gateway) as second:
            second.set(format=PCM16, turn_detection=None)
            second.append(saying(number, number + 4))
            second.commit()
            second.until(COMPLETED)
        assert second.texts == [words(number, number + 4)]
        ids = {event[name] for event in first.told + second.told for name in ("event_id", "item_id") if name in event}
        assert not ids & seen
        seen |= ids


# --- TLS ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A gateway with a certificate of its own: its address, and whom to trust."""
    cert, key, authority = certificates(tmp_path_factory.mktemp("tls"))
    with talking_gateway(tls_cert=cert, tls_key=key, bench_dir=tmp_path_factory.mktemp("bench")) as gateway:
        yield gateway.url.replace("http://127.0.0.1", "https://localhost"), authority


def test_over_tls(tls: tuple[str, Path]):
    url, authority = tls
    trust = ssl.create_default_context(cafile=str(authority))
    assert httpx.get(f"{url}/health/live", verify=trust).status_code == 200
    with Talk(url, ssl=trust) as talk:
        talk.set(format=PCM16, turn_detection=None)
        talk.append(saying(1, 300))
        talk.commit()
        talk.until(COMPLETED)
    assert talk.texts == [words(1, 300)]


def test_over_tls_the_gateway_measures_itself(tls: tuple[str, Path]):
    url, authority = tls
    trust = ssl.create_default_context(cafile=str(authority))
    with httpx.Client(base_url=url, verify=trust, timeout=120) as http:
        order = {"workload": "realtime", "levels": [1], "n": 1, "clip_seconds": 0.1}
        run = http.post("/bench", json=order).json()
        wait_until(lambda: http.get(f"/bench/{run['id']}").json()["status"] != "running", seconds=120)
        read = http.get(f"/bench/{run['id']}", headers={"Accept": "application/json"}).json()
    assert (read["status"], read["detail"]) == ("done", "")
    (level,) = read["result"]["levels"]
    assert (level["ok"], level["load"]) == (1, 1)


@pytest.mark.parametrize("secure", [False, True])
def test_a_socket_is_not_taken_for_half_a_requests_head(
    gateway: Gateway, tls: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, secure: bool
):
    monkeypatch.setattr(app.server, "HEAD_SECONDS", 0.3)
    options = {"ssl": ssl.create_default_context(cafile=str(tls[1]))} if secure else {}
    with Talk(tls[0] if secure else gateway, **options) as talk:
        talk.until("session.created")
        with pytest.raises(TimeoutError):
            talk.next(timeout=1.5)
        talk.say("input_audio_buffer.clear")
        talk.until("cleared")
