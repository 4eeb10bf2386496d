"""The second door to live sessions: a resource. Pieces may be sent twice, readers come back, and nothing is kept for ever."""

import json
import random
import threading
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from engine.fake import FakeEngine
from tests import speech
from tests.gateway import Gateway, wait_until, wait_until_idle
from tests.test_live import saying
from tests.test_live_wire import s16le, script, words
from tests.test_probes import ffmpeg
from tests.test_wire import ready_gateway


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with ready_gateway(
        lambda: FakeEngine(script), vad=False, session_grace_seconds=60.0, cors_origins="https://page.example"
    ) as gateway:
        yield gateway


@pytest.fixture(autouse=True)
def no_session_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "gateway" in request.fixturenames:
        served: Gateway = request.getfixturevalue("gateway")
        for held in list(served.services.sessions._sessions.values()):
            served.run(served.services.sessions.remove, held)
        wait_until_idle(served)
        assert not len(served.services.sessions)


class Held:
    """A client of the resource."""

    def __init__(self, gateway: Gateway, **fields) -> None:
        self.http = httpx.Client(base_url=gateway.url, timeout=30, verify=False)
        created = self.http.post("/v1/audio/sessions", json={"model": "whisper-1", "endpointing": "client"} | fields)
        assert created.status_code == 201, created.text
        self.body = created.json()
        self.path = f"/v1/audio/sessions/{self.body['id']}"
        self.sequence = 0

    def post(self, samples: np.ndarray | bytes) -> dict:
        data = samples if isinstance(samples, bytes) else s16le(samples)
        answer = self.http.post(f"{self.path}/audio", params={"sequence": self.sequence}, content=data)
        assert answer.status_code == 200, answer.text
        self.sequence = answer.json()["next_sequence"]
        return answer.json()

    def events(self, after: int | None = None, *, at_most: int | None = None) -> list[tuple[int, dict]]:
        headers = {} if after is None else {"last-event-id": str(after)}
        got: list[tuple[int, dict]] = []
        with self.http.stream("GET", self.body["events_url"], headers=headers) as response:
            assert response.status_code == 200
            number = 0
            for line in response.iter_lines():
                if line.startswith("id: "):
                    number = int(line[4:])
                elif line.startswith("data: "):
                    got.append((number, json.loads(line[6:])))
                    if len(got) == at_most:
                        break
        return got


def told(events: list[tuple[int, dict]]) -> str:
    return "".join(event["delta"] for _, event in events if event["type"] == "transcript.text.delta")


def test_a_session_from_its_first_piece_to_its_end(gateway: Gateway):
    held = Held(gateway)
    for i in range(1, 21):
        assert held.post(saying(i, i)) == {"sequence": i - 1, "next_sequence": i, "taken": True}
    assert held.http.post(f"{held.path}/stop").status_code == 202
    events = held.events()
    assert [number for number, _ in events] == sorted({number for number, _ in events})
    assert events[-1][1]["type"] == "transcript.text.done"
    assert told(events) == events[-1][1]["text"] == words(1, 20)
    finals = [event for _, event in events if event["type"] == "utterance.final"]
    assert [(f["utterance"], f["text"], f["start"], f["end"], f["language"]) for f in finals] == [
        (0, words(1, 20), 0.0, 4.0, "en")
    ]
    assert held.http.get(held.path).json()["status"] == "over"


def test_a_reader_that_drops_and_comes_back_misses_nothing_and_sees_nothing_twice(gateway: Gateway):
    held = Held(gateway, include=["partials"])
    got: list[tuple[int, dict]] = []

    def read() -> None:
        while not got or got[-1][1]["type"] != "transcript.text.done":
            got.extend(held.events(got[-1][0] if got else None, at_most=3))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for i in range(1, 31):
        held.post(saying(i, i))
    held.http.post(f"{held.path}/stop")
    reader.join(30)
    assert [number for number, _ in got] == list(range(1, len(got) + 1))
    assert told(got) == got[-1][1]["text"] == words(1, 30)
    assert held.http.get(held.body["events_url"], headers={"last-event-id": str(len(got))}).status_code == 204


def test_log_probabilities_come_with_each_delta(gateway: Gateway):
    held = Held(gateway, include=["logprobs"])
    held.post(saying(1, 5))
    held.http.post(f"{held.path}/stop")
    events = [event for _, event in held.events()]
    deltas = [event for event in events if event["type"] == "transcript.text.delta"]
    assert [entry["token"] for event in deltas for entry in event["logprobs"]] == [f" w{i}" for i in range(1, 6)]
    assert {event["utterance"] for event in deltas} == {0}


def test_several_readers_see_the_same(gateway: Gateway):
    held = Held(gateway)
    seen: list[list] = [[], []]
    readers = [threading.Thread(target=lambda got=got: got.extend(held.events()), daemon=True) for got in seen]
    for reader in readers:
        reader.start()
    held.post(saying(1, 10))
    held.http.post(f"{held.path}/stop")
    for reader in readers:
        reader.join(30)
    assert seen[0] == seen[1]
    assert told(seen[0]) == words(1, 10)


def test_a_piece_that_comes_twice_is_taken_once_and_a_gap_is_refused_with_what_is_expected(gateway: Gateway):
    held = Held(gateway)
    held.post(saying(1, 5))
    again = held.http.post(f"{held.path}/audio", params={"sequence": 0}, content=s16le(saying(1, 5)))
    assert again.json() == {"sequence": 0, "next_sequence": 1, "taken": False}
    gap = held.http.post(f"{held.path}/audio", params={"sequence": 3}, content=s16le(saying(6, 6)))
    assert (gap.status_code, gap.json()["error"]["code"]) == (409, "sequence_gap")
    assert "1 is expected" in gap.json()["error"]["message"]
    held.post(saying(6, 10))
    held.http.post(f"{held.path}/stop")
    assert told(held.events()) == words(1, 10)


def test_a_commit_cuts_after_the_last_sample_whatever_the_pieces(gateway: Gateway):
    chance, audio = random.Random(8), s16le(saying(1, 60))
    before = len(gateway.engine.submitted)
    held, sent, commits = Held(gateway), 0, []
    while sent < len(audio):
        size = chance.randrange(1, 20_000)  # a sample may be split
        held.post(audio[sent : sent + size])
        sent = min(sent + size, len(audio))
        if chance.random() < 0.3:
            assert held.http.post(f"{held.path}/commit").status_code == 202
            commits.append(sent // 2)
    held.http.post(f"{held.path}/stop")
    held.events()
    finals = sorted((r for r in gateway.engine.submitted[before:] if not r.priority), key=lambda r: r.samples[0])
    ends = list(np.cumsum([len(request.samples) for request in finals]))
    assert ends in (commits, [*commits, len(audio) // 2])
    assert s16le(np.concatenate([request.samples for request in finals])) == audio


@pytest.mark.parametrize(
    ("arguments", "content_type"),
    [
        ("-ar 48000 -f s16le", "audio/pcm;rate=48000"),
        ("-ar 24000 -f s16le", "audio/pcm;rate=24000"),
        ("-ar 8000 -f mulaw", "audio/pcmu"),
    ],
)
def test_pieces_at_another_rate_are_resampled_without_a_seam(gateway: Gateway, arguments: str, content_type: str):
    data = ffmpeg(speech.wav(speech.tone(3.0)), arguments)
    held = Held(gateway, content_type=content_type)
    for i in range(0, len(data), 7001):
        held.post(data[i : i + 7001])
    held.http.post(f"{held.path}/stop")
    held.events()
    heard = gateway.engine.submitted[-1].samples
    assert abs(len(heard) - 48_000) <= 40
    t = np.arange(len(heard)) / 16_000
    inner = slice(1000, 47_000)
    fit = np.stack([np.sin(2 * np.pi * 440 * t), np.cos(2 * np.pi * 440 * t)], axis=1)[inner]
    residue = heard[inner] - fit @ np.linalg.lstsq(fit, heard[inner], rcond=None)[0]
    assert np.sqrt(np.mean(residue**2)) < 0.01  # a seam would show as a jump of its phase


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "whisper-9"}, "model"),
        ({"language": "qq"}, "language"),
        ({"content_type": "audio/webm"}, "content_type"),
        ({"content_type": "audio/pcm"}, "content-type"),
        ({"content_type": "audio/pcm;rate=" + "1" * 5000}, "content-type"),
        ({"content_type": "audio/pcm;rate=" + "1" * 50}, "content-type"),
        ({"content_type": 'audio/pcm;x="' + ";" * 100_000}, "content-type"),
        ({"colour": "red"}, "colour"),
        ({"endpointing": "never"}, "endpointing"),
    ],
)
def test_a_session_that_cannot_be_is_refused_by_field(gateway: Gateway, fields: dict, param: str):
    refused = httpx.post(f"{gateway.url}/v1/audio/sessions", json={"model": "whisper-1"} | fields)
    assert refused.status_code in (400, 404)
    assert refused.json()["error"]["param"] == param


def test_a_body_that_is_no_json_is_a_400(gateway: Gateway):
    refused = httpx.post(f"{gateway.url}/v1/audio/sessions", content=b"{")
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


def test_bodies_that_are_too_large_are_refused(gateway: Gateway):
    held = Held(gateway)
    for size in (31 * 32_000, 5 << 20):
        refused = held.http.post(f"{held.path}/audio", params={"sequence": 0}, content=bytes(size))
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
    large = httpx.post(f"{gateway.url}/v1/audio/sessions", content=b"x" * 300_000)
    assert large.status_code == 413


def test_events_are_for_those_who_have_their_address(gateway: Gateway):
    held = Held(gateway)
    assert held.http.get(f"{held.path}/events").status_code == 404
    assert held.http.get(f"{held.path}/events", params={"token": "guess"}).status_code == 404
    assert held.http.delete(held.path).status_code == 204
    assert held.http.get(held.path).status_code == 404
    assert (
        held.http.post(f"{held.path}/audio", params={"sequence": 0}, content=b"").json()["error"]["code"] == "session_not_found"
    )


def test_a_session_that_nobody_reads_is_ended_and_forgotten():
    with ready_gateway(lambda: FakeEngine(script), vad=False, session_grace_seconds=0.5) as gateway:
        held = Held(gateway, prompt="hang", language="en")
        held.post(saying(1, 5))
        held.http.post(f"{held.path}/commit")
        wait_until(lambda: not len(gateway.services.sessions))
        assert gateway.engine.requests == gateway.services.admission.in_progress == 0
        assert held.http.get(held.path).status_code == 404


def test_pages_of_the_origins_that_were_named_may_use_it(gateway: Gateway):
    allowed = httpx.options(
        f"{gateway.url}/v1/audio/sessions",
        headers={"origin": "https://page.example", "access-control-request-method": "POST"},
    )
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    other = httpx.get(f"{gateway.url}/health", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


def test_a_reader_that_was_away_too_long_is_told_how_much_it_missed(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("app.session_store.RING_EVENTS", 5)
    held = Held(gateway)
    for i in range(1, 21):
        held.post(saying(i, i))
        held.http.post(f"{held.path}/commit")
    held.http.post(f"{held.path}/stop")
    wait_until(lambda: held.http.get(held.path).json()["status"] == "over")
    (_, missed), *rest = held.events(after=2)
    assert missed["type"] == "session.events_missed"
    assert missed["count"] == rest[0][0] - 3
    assert len(rest) == 5
