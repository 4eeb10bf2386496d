"""The wire: a real uvicorn on the scripted engine, read by OpenAI's own SDK, by httpx, and by raw sockets for rude clients."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from app.settings import DEFAULT_ALIASES, Settings
from app.speech.windows import CutPolicy
from engine.base import DecodeRequest, Engine
from engine.fake import FakeEngine, Reply
from routers.forms import TranscriptionForm
from tests import speech
from tests.gateway import Gateway, running_gateway, wait_until

ONE_SECOND = speech.wav(speech.tone(1.0))
SAID = "1.00 seconds of audio."
PIECES = (" 今日は", " naïve", " 👩‍👩‍👧", " Ωμέγα", " שלום", " สวัสดี", " привет", " مرحبا", " हैलो", " 再见。")
COUNTED = tuple(f" {word}" for word in ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"])


def script(request: DecodeRequest) -> Reply:
    """Speak several scripts when asked to, and otherwise tell the length."""
    if request.previous_text == "scripts":
        return Reply(PIECES)
    if request.previous_text == "fail":
        return Reply(COUNTED, fail_after=8)
    if request.previous_text == "slow":
        return Reply((" at last",), first_seconds=1.3)
    if request.previous_text == "hang":
        return Reply(COUNTED, stall_after=8)
    if request.previous_text == "hang at once":
        return Reply((" one",), first_seconds=3600)
    return Reply((f" {len(request.samples) / 16_000:.2f}", " seconds", " of", " audio."))


@contextlib.contextmanager
def ready_gateway(make_engine: Callable[[], Engine], **settings) -> Iterator[Gateway]:
    with running_gateway(make_engine, Settings(_env_file=None, **settings)) as gateway:
        wait_until(lambda: gateway.engine.state.phase == "ready")
        yield gateway


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with ready_gateway(lambda: FakeEngine(script), max_upload_mb=1, vad=False) as gateway:
        yield gateway


pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def post(gateway: Gateway, fields: dict | None = None, *, file: bytes | None = ONE_SECOND, name: str = "a.wav", **options):
    fields = {"model": "whisper-1"} | (fields or {})
    files = {"file": (name, file)} if file is not None else {"other": ("x", b"")}
    return httpx.post(f"{gateway.url}/v1/audio/transcriptions", data=fields, files=files, timeout=60, verify=False, **options)


def events(response: httpx.Response) -> list:
    lines = response.text.split("\n")
    return [json.loads(line[6:]) if line != "data: [DONE]" else "[DONE]" for line in lines if line]


# --- OpenAI's SDK ---------------------------------------------------------------------------------------------------


def test_the_sdk_gets_json(gateway: Gateway):
    transcription = gateway.client().audio.transcriptions.create(model="whisper-1", file=("a.wav", ONE_SECOND))
    assert transcription.text == SAID
    assert transcription.usage.type == "tokens"
    usage = transcription.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens == usage.input_token_details.audio_tokens + usage.input_token_details.text_tokens
    assert usage.output_tokens == 4


def test_the_sdk_gets_text(gateway: Gateway):
    text = gateway.client().audio.transcriptions.create(model="whisper-1", file=ONE_SECOND, response_format="text")
    assert text == SAID + "\n"


def test_the_sdk_streams(gateway: Gateway):
    stream = gateway.client().audio.transcriptions.create(model="whisper-1", file=ONE_SECOND, stream=True)
    *deltas, done = list(stream)
    assert {delta.type for delta in deltas} == {"transcript.text.delta"}
    assert "".join(delta.delta for delta in deltas) == done.text == SAID
    assert done.type == "transcript.text.done"
    assert done.usage.output_tokens == 4


async def test_the_async_sdk_gets_json_and_streams(gateway: Gateway):
    async with gateway.async_client() as client:
        plain = await client.audio.transcriptions.create(model="gpt-4o-transcribe", file=ONE_SECOND)
        assert plain.text == SAID
        stream = await client.audio.transcriptions.create(model="gpt-4o-transcribe", file=ONE_SECOND, stream=True)
        received = [event async for event in stream]
    assert received[-1].text == SAID


def test_the_sdk_raises_its_own_errors(gateway: Gateway):
    create = gateway.client().audio.transcriptions.create
    with pytest.raises(openai.NotFoundError) as not_found:
        create(model="whisper-9", file=ONE_SECOND)
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    assert not_found.value.request_id.startswith("req_")
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="whisper-1", file=b"not audio")
    assert bad.value.param == "file"


def test_the_sdk_raises_when_the_engine_fails_in_the_middle_of_a_stream(gateway: Gateway):
    stream = gateway.client().audio.transcriptions.create(model="whisper-1", file=ONE_SECOND, stream=True, prompt="fail")
    heard = []
    with pytest.raises(openai.APIError, match="failed"):
        heard.extend(event.delta for event in stream)


def test_the_sdk_lists_models(gateway: Gateway):
    listed = gateway.client().models.list()
    assert [model.id for model in listed] == ["base", *DEFAULT_ALIASES]
    model = gateway.client().models.retrieve("whisper-1")
    assert (model.object, model.owned_by) == ("model", "steno")
    assert model.created > 1_700_000_000


# --- events, byte by byte -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", ["true", "True", "1"])
def test_events_are_data_lines_only_and_end_with_done(gateway: Gateway, stream: str):
    response = post(gateway, {"stream": stream})
    assert response.status_code == 200
    assert response.headers["content-type"].split(";")[0] == "text/event-stream"
    assert response.headers["x-accel-buffering"] == "no"
    assert "no-" in response.headers["cache-control"]
    assert "content-encoding" not in response.headers
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    assert all(block.startswith("data: ") and "\n" not in block and "\r" not in block for block in blocks[:-1])
    assert blocks[-2] == "data: [DONE]"
    *deltas, done, _ = events(response)
    assert {delta["type"] for delta in deltas} == {"transcript.text.delta"}
    assert "".join(delta["delta"] for delta in deltas) == done["text"] == SAID
    assert set(done["usage"]) == {"type", "input_tokens", "input_token_details", "output_tokens", "total_tokens"}


@pytest.mark.parametrize("stream", ["false", "False", "0", "", "null"])
def test_without_stream_the_answer_is_json(gateway: Gateway, stream: str):
    response = post(gateway, {"stream": stream})
    assert response.headers["content-type"] == "application/json"
    assert response.json()["text"] == SAID


def test_pings_are_comments_and_the_sdk_reads_over_them(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("routers.sse.PING_SECONDS", 1)
    raw = post(gateway, {"stream": "true", "prompt": "slow"}).text
    assert len([block for block in raw.split("\n\n") if block.startswith(": ping")]) >= 1
    assert "id:" not in raw
    assert "retry:" not in raw
    stream = gateway.client().audio.transcriptions.create(model="whisper-1", file=ONE_SECOND, stream=True, prompt="slow")
    assert list(stream)[-1].text == "at last"


def test_no_character_is_split_over_events(gateway: Gateway):
    response = post(gateway, {"stream": "true", "prompt": "scripts"})
    *deltas, done, _ = events(response)
    assert len(deltas) >= 3
    assert "".join(delta["delta"] for delta in deltas) == done["text"] == "".join(PIECES).strip()


def test_text_is_plain_text(gateway: Gateway):
    response = post(gateway, {"response_format": "text", "prompt": "scripts"})
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert response.content.decode() == "".join(PIECES).strip() + "\n"


def test_a_stream_that_fails_ends_with_one_error_and_no_done(gateway: Gateway):
    received = events(post(gateway, {"stream": "true", "prompt": "fail"}))
    assert "".join(event.get("delta") for event in received[:-1]) == "one two three four five six seven eight"
    error = received[-1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "server_error"


def test_a_failure_without_stream_is_a_500_in_shape(gateway: Gateway):
    response = post(gateway, {"prompt": "fail"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "transcription_failed"


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "invalid_value"),
        (
            {"timestamp_granularities": "sentence", "response_format": "verbose_json"},
            "timestamp_granularities",
            "invalid_value",
        ),
        ({"include[]": "logprobs", "response_format": "text"}, "include", "unsupported_value"),
        ({"include[]": "everything"}, "include", "invalid_value"),
        ({"response_format": "diarized_json"}, "response_format", "unsupported_value"),
        ({"response_format": "xml"}, "response_format", "unsupported_value"),
        ({"response_format": "JSON"}, "response_format", "unsupported_value"),
        ({"temperature": "1.5"}, "temperature", "invalid_value"),
        ({"temperature": "-0.1"}, "temperature", "invalid_value"),
        ({"temperature": "warm"}, "temperature", "invalid_value"),
        ({"temperature": "nan"}, "temperature", "invalid_value"),
        ({"stream": "banana"}, "stream", "invalid_value"),
        ({"language": "xx"}, "language", "invalid_value"),
        ({"language": "Klingon"}, "language", "invalid_value"),
        ({"model": ""}, "model", "missing_required_parameter"),
    ],
)
@pytest.mark.parametrize("stream", [{}, {"stream": "true"}], ids=["json", "sse"])
def test_a_bad_field_is_a_400_that_names_it(gateway: Gateway, fields: dict, param: str, code: str, stream: dict):
    response = post(gateway, stream | fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


@pytest.mark.parametrize("stream", [{}, {"stream": "true"}], ids=["json", "sse"])
@pytest.mark.parametrize(
    "file", [b"", b"this is not audio", b"\x00" * 5000, speech.wav(speech.tone(0.05)), ONE_SECOND[:40]], ids=range(5)
)
def test_a_file_that_is_not_audio_is_a_400_before_any_event(gateway: Gateway, file: bytes, stream: dict):
    response = post(gateway, stream, file=file)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "file"
    assert not any(word in response.text.lower() for word in ("traceback", "ffmpeg", "errno", "av.", "/tmp"))


@pytest.mark.parametrize(
    "fields", [{"language": ""}, {"language": "auto"}, {"prompt": ""}, {"temperature": ""}, {"response_format": "null"}]
)
def test_an_empty_field_counts_as_absent(gateway: Gateway, fields: dict):
    assert post(gateway, fields).json()["text"] == SAID


@pytest.mark.parametrize("language", ["en", "EN", "en-US", "de", "zh-TW", "zh_Hans", "English", "german", " Chinese "])
def test_language_tags_are_understood(gateway: Gateway, language: str):
    assert post(gateway, {"language": language}).status_code == 200
    codes = {"english": "en", "german": "de", "chinese": "zh"}
    plain = language.strip().lower()
    assert gateway.engine.submitted[-1].language == codes.get(plain, plain[:2])


def test_unknown_fields_are_ignored_by_name_and_bracketed_ones_are_read(gateway: Gateway):
    response = post(gateway, {"foo": "bar", "wörd": "1", "temperature[]": "0.5"})
    assert response.json()["text"] == SAID
    assert response.headers["x-steno-ignored-fields"] == "foo, w%C3%B6rd"
    assert gateway.engine.submitted[-1].temperature == 0.5
    assert "x-steno-ignored-fields" not in post(gateway).headers


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"keywords[]": ["ComfyUI", "Steno"]}, "ComfyUI, Steno"),
        ({"hotwords": "ComfyUI", "prompt": "A talk."}, "A talk. ComfyUI"),
        ({"context_bias[0]": "ComfyUI"}, "ComfyUI"),
        ({"prompt": "A talk."}, "A talk."),
    ],
)
def test_words_to_expect_are_told_to_the_model(gateway: Gateway, fields: dict, told: str):
    assert post(gateway, fields).status_code == 200
    assert gateway.engine.submitted[-1].previous_text == told


@pytest.mark.parametrize(
    "fields",
    [
        {"chunking_strategy": "auto"},
        {"chunking_strategy": '{"type": "server_vad", "silence_duration_ms": 500}'},
        {"chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "0.3"},
        {"chunking_strategy": "null"},
    ],
)
def test_chunking_strategies_are_read_in_all_their_forms(gateway: Gateway, fields: dict):
    response = post(gateway, fields)
    assert response.json()["text"] == SAID
    assert "x-steno-ignored-fields" not in response.headers


def test_a_chunking_strategy_cuts_where_it_says(gateway: Gateway):
    form = TranscriptionForm.model_validate(
        {"model": "m", "chunking_strategy": {"type": "server_vad", "silence_duration_ms": "700", "prefix_padding_ms": "250"}}
    )
    assert form.policy == CutPolicy(threshold=0.5, before_seconds=0.25, after_seconds=0.4, silence_seconds=0.7)
    assert TranscriptionForm.model_validate({"model": "m", "chunking_strategy": "auto"}).policy == CutPolicy()


@pytest.mark.parametrize(
    "fields",
    [
        {"chunking_strategy": "sometimes"},
        {"chunking_strategy": "{"},
        {"chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "2"},
        {"chunking_strategy[threshold]": "0.5"},
    ],
)
def test_a_wrong_chunking_strategy_is_a_400_that_names_it(gateway: Gateway, fields: dict):
    response = post(gateway, fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chunking_strategy")


@pytest.mark.parametrize(("response_format", "kind"), [("srt", "text/plain"), ("vtt", "text/plain"), ("verbose_json", "json")])
def test_formats_with_times_say_when(gateway: Gateway, response_format: str, kind: str):
    response = post(gateway, {"response_format": response_format})
    assert kind in response.headers["content-type"]
    if response_format == "verbose_json":
        (segment,) = response.json()["segments"]
        assert (segment["start"], segment["end"], response.json()["duration"]) == (0.0, 1.0, 1.0)
    else:
        point = "," if response_format == "srt" else "."
        assert f"00:00:00{point}000 --> 00:00:01{point}000\n{SAID}\n\n" in response.text
        assert response.text.startswith("1\n" if response_format == "srt" else "WEBVTT\n\n")


@pytest.mark.parametrize(
    ("asked", "given"),
    [(["word"], {"words"}), (["segment"], {"segments"}), (["word", "segment"], {"words", "segments"}), ([], {"segments"})],
)
def test_times_are_given_of_what_was_asked_for(gateway: Gateway, asked: list[str], given: set[str]):
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": asked}
    body = post(gateway, fields).json()
    assert {"words", "segments"} & set(body) == given
    if "words" in given:
        assert [word["word"] for word in body["words"]] == SAID.split()
        assert [(word["start"], word["end"]) for word in body["words"]] == [(0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)]


def test_a_stream_of_verbose_json_ends_with_its_segments(gateway: Gateway):
    *_, done, _ = events(post(gateway, {"response_format": "verbose_json", "stream": "true"}))
    assert [s["text"].strip() for s in done["segments"]] == [SAID]
    assert done["language"] == "english"


def test_a_translation_asks_the_engine_for_english(gateway: Gateway):
    translation = gateway.client().audio.translations.create(model="whisper-1", file=ONE_SECOND)
    assert translation.text == SAID
    assert gateway.engine.submitted[-1].task == "translate"


def test_an_english_only_model_refuses_to_translate():
    with ready_gateway(lambda: FakeEngine(script, multilingual=False), vad=False) as gateway:
        with pytest.raises(openai.BadRequestError) as refusal:
            gateway.client().audio.translations.create(model="whisper-1", file=ONE_SECOND)
        assert refusal.value.param == "model"


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_come_with_their_tokens_and_bytes(gateway: Gateway, stream: bool):
    create = gateway.client().audio.transcriptions.create
    answer = create(model="whisper-1", file=ONE_SECOND, include=["logprobs"], prompt="scripts", stream=stream)
    *deltas, last = list(answer) if stream else [answer]
    assert b"".join(bytes(map(int, entry.bytes)) for entry in last.logprobs).decode().strip() == last.text
    assert [entry.token for entry in last.logprobs] == list(PIECES)
    assert all(entry.logprob < 0 for entry in last.logprobs)
    if stream:
        assert [entry.token for delta in deltas for entry in delta.logprobs] == list(PIECES)


def test_the_time_it_took_is_told(gateway: Gateway):
    headers = post(gateway).headers
    total = int(headers["openai-processing-ms"])
    stages = dict(entry.split(";dur=") for entry in headers["server-timing"].split(", "))
    assert list(stages) == ["receive", "decode", "vad", "queue", "engine", "total"]
    assert 0 < float(stages["receive"]) < float(stages["total"]) <= total + 1
    assert 0 < float(stages["decode"]) < float(stages["total"])


@pytest.mark.parametrize("languages", [["en", "de"], ["german", "EN-us"]])
def test_several_languages_may_be_named_and_those_heard_are_told(gateway: Gateway, languages: list[str]):
    create = gateway.client().audio.transcriptions.create
    answer = create(model="gpt-transcribe", file=ONE_SECOND, languages=languages)
    assert set(gateway.engine.submitted[-1].languages) == {"en", "de"}
    assert [language.code for language in answer.languages] == ["en"]
    *_, done = create(model="gpt-transcribe", file=ONE_SECOND, languages=["de"], stream=True)
    assert [language.code for language in done.languages] == ["de"]
    assert gateway.engine.submitted[-1].language == "de"


def test_progress_is_told_when_asked_for(gateway: Gateway):
    received = events(post(gateway, {"stream": "true", "stream_progress": "true"}))
    assert [event for event in received[:-1] if event["type"] == "transcript.progress"] == [
        {"type": "transcript.progress", "seconds": 1.0}
    ]
    assert all(event["type"] != "transcript.progress" for event in events(post(gateway, {"stream": "true"}))[:-1])


def test_a_missing_file_and_a_file_that_is_text_are_400s(gateway: Gateway):
    assert post(gateway, file=None).json()["error"]["param"] == "file"
    url = f"{gateway.url}/v1/audio/transcriptions"
    as_text = httpx.post(url, files={"model": (None, "whisper-1"), "file": (None, "not a file")})
    assert (as_text.status_code, as_text.json()["error"]["param"]) == (400, "file")


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b"--x"),
        ("multipart/form-data; boundary=x", b"--y\r\n\r\nrubbish"),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\nv\r\n--x--\r\n"),
        ("", b""),
    ],
)
def test_a_body_that_is_no_form_is_a_400_in_shape(gateway: Gateway, content_type: str, body: bytes):
    response = httpx.post(
        f"{gateway.url}/v1/audio/transcriptions", content=body, headers={"content-type": content_type} if content_type else {}
    )
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_file_that_is_too_large_is_a_413_by_its_declared_length_and_while_it_comes(gateway: Gateway):
    large = b"\0" * (2 << 20)
    declared = post(gateway, file=large)
    assert declared.status_code == 413

    def chunks() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(20):
            yield large[: 1 << 20]

    with contextlib.suppress(httpx.WriteError):  # the server has answered and closed before all was sent
        response = httpx.post(
            f"{gateway.url}/v1/audio/transcriptions",
            content=chunks(),
            headers={"content-type": "multipart/form-data; boundary=x"},
        )
        assert response.status_code == 413
    slightly = post(gateway, file=b"\0" * ((1 << 20) + 1))
    assert (slightly.status_code, slightly.json()["error"]["code"]) == (413, "request_too_large")


def test_a_large_declared_body_is_refused_before_it_is_sent(gateway: Gateway):
    with socket.create_connection(gateway.address) as raw:
        raw.sendall(
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"
            b"Content-Length: 99999999\r\nExpect: 100-continue\r\n\r\n"
        )
        answer = raw.makefile("rb").readline()
    assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/audio/transcriptions", 405, "method_not_allowed"),
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("POST", "/audio/transcriptions", 404, "unknown_url"),
        ("GET", "/v1/models/whisper-9", 404, "model_not_found"),
        ("GET", "/v1/models/openai/whisper-base", 404, "model_not_found"),
    ],
)
def test_wrong_paths_and_methods_answer_in_shape(gateway: Gateway, method: str, path: str, status: int, code: str):
    response = httpx.request(method, gateway.url + path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


# --- ids, health, readiness, bounds -----------------------------------------------------------------------------------


def test_a_sound_request_id_is_echoed_and_another_replaced(gateway: Gateway):
    assert post(gateway, headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert gateway.engine.submitted[-1].id.startswith("mine-1-")
    assert post(gateway, headers={"x-request-id": "a b\tc"}).headers["x-request-id"].startswith("req_")
    assert httpx.get(f"{gateway.url}/v1/nothing").headers["x-request-id"].startswith("req_")


def test_two_requests_under_one_id_do_not_disturb_each_other(gateway: Gateway):
    first = post(gateway, headers={"x-request-id": "same"})
    second = post(gateway, headers={"x-request-id": "same"})
    assert first.json()["text"] == second.json()["text"] == SAID
    one, other = gateway.engine.submitted[-2:]
    assert one.id != other.id


def test_health_is_alive_and_ready(gateway: Gateway):
    assert httpx.get(f"{gateway.url}/health").json() == httpx.get(f"{gateway.url}/health/live").json() == {"status": "alive"}
    ready = httpx.get(f"{gateway.url}/health/ready")
    assert (ready.status_code, ready.json()["status"], ready.json()["engine_requests"]) == (200, "ready", 0)


def test_the_openapi_document_names_every_field_of_the_form(gateway: Gateway):
    document = httpx.get(f"{gateway.url}/openapi.json").json()
    operation = document["paths"]["/v1/audio/transcriptions"]["post"]
    properties = operation["requestBody"]["content"]["multipart/form-data"]["schema"]["properties"]
    common = {"file", "model", "prompt", "temperature", "response_format", "url", "condition_on_previous_text"}
    assert set(properties) == common | {
        "language",
        "languages",
        "stream",
        "stream_progress",
        "stream_include_usage",
        "timestamp_granularities",
        "include",
        "keywords",
        "chunking_strategy",
    }
    assert "/v1/audio/translations" in document["paths"]


@pytest.mark.parametrize("failing", [False, True])
def test_until_it_is_ready_the_gateway_listens_and_says_why_it_does_not_serve(failing: bool):
    def make() -> FakeEngine:
        return FakeEngine(fail_start="the weights are broken") if failing else FakeEngine(start_seconds=3600)

    with running_gateway(make) as gateway:
        if failing:
            wait_until(lambda: gateway.engine.state.phase == "failed")
        ready = httpx.get(f"{gateway.url}/health/ready")
        assert ready.status_code == 503
        assert ready.json()["status"] == ("failed" if failing else "starting")
        assert ready.json()["reason"] == ("the weights are broken" if failing else "a scripted start")
        assert httpx.get(f"{gateway.url}/health/live").status_code == 200
        refused = post(gateway)
        assert refused.status_code == 503
        assert 1 <= int(refused.headers["retry-after"]) <= 120 >= int(ready.headers["retry-after"])
        assert refused.json()["error"]["type"] == "service_unavailable_error"
        assert httpx.get(f"{gateway.url}/v1/models").status_code == 200


def test_past_its_bound_the_gateway_refuses_at_once_and_recovers():
    with ready_gateway(lambda: FakeEngine(script), max_requests=2, vad=False) as gateway:
        with hanging(gateway), hanging(gateway):
            refused = post(gateway)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "server_is_overloaded"
        wait_until(lambda: gateway.services.admission.in_progress == 0)
        assert post(gateway).json()["text"] == SAID


# --- clients that leave ---------------------------------------------------------------------------------------------


def raw_request(fields: dict[str, str], file: bytes = ONE_SECOND) -> bytes:
    request = httpx.Request("POST", "http://x/v1/audio/transcriptions", data=fields, files={"file": ("a.wav", file)})
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    return f"POST /v1/audio/transcriptions HTTP/1.1\r\n{head}\r\n".encode() + request.read()


@contextlib.contextmanager
def hanging(gateway: Gateway, file: bytes = ONE_SECOND, **fields: str) -> Iterator[socket.socket]:
    """Hold a request that the engine never finishes; on leaving, vanish without a farewell."""
    before = gateway.engine.requests
    raw = socket.create_connection(gateway.address)
    raw.sendall(raw_request({"model": "whisper-1", "prompt": "hang at once"} | fields, file))
    wait_until(lambda: gateway.engine.requests > before)
    yield raw
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


@pytest.mark.parametrize("fields", [{}, {"stream": "true"}, {"stream": "true", "prompt": "hang"}], ids=["json", "sse", "mid"])
def test_a_client_that_leaves_frees_its_engine_requests(gateway: Gateway, fields: dict):
    with hanging(gateway, **fields) as raw:
        if fields.get("prompt") == "hang":
            while b'"one' not in raw.recv(65536):
                pass
    wait_until(lambda: gateway.engine.requests == 0, seconds=10)
    wait_until(lambda: gateway.services.admission.in_progress == 0, seconds=10)


@pytest.mark.parametrize("share", [0.2, 0.6, 0.99])
def test_a_client_that_leaves_during_its_upload_costs_nothing(gateway: Gateway, share: float):
    request = raw_request({"model": "whisper-1"}, speech.wav(speech.tone(20.0)))
    submitted = len(gateway.engine.submitted)
    with socket.create_connection(gateway.address) as raw:
        raw.sendall(request[: int(len(request) * share)])
        wait_until(lambda: gateway.services.admission.in_progress == 1)
    wait_until(lambda: gateway.services.admission.in_progress == 0, seconds=10)
    assert len(gateway.engine.submitted) == submitted


async def test_many_clients_at_once_all_get_their_own_text(gateway: Gateway):
    async with gateway.async_client() as client:

        async def one(i: int) -> None:
            clip = speech.wav(speech.tone(0.5 + i / 100))
            if i % 2:
                text = (await client.audio.transcriptions.create(model="whisper-1", file=clip)).text
            else:
                stream = await client.audio.transcriptions.create(model="whisper-1", file=clip, stream=True)
                text = "".join([event.delta async for event in stream if event.type == "transcript.text.delta"])
            assert text == f"{0.5 + i / 100:.2f} seconds of audio."

        await asyncio.gather(*(one(i) for i in range(40)))
