"""OpenAI's Realtime protocol without IO: shapes as OpenAI's documents and SDKs have them, and random sessions."""

import base64
import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from app.audio.decode import RawFormat
from app.errors import InvalidInputError, TranscriptionFailedError, UnknownModelError
from app.live_events import (
    AudioCleared,
    LiveDelta,
    LiveEvent,
    LivePartial,
    UtteranceChanged,
    UtteranceClosed,
    UtteranceDropped,
    UtteranceFinal,
    UtteranceLost,
    UtteranceOpened,
)
from app.session.agreement import Token
from app.speech.endpointing import EndpointPolicy
from app.transcript import Options, Segment
from routers.realtime_protocol import (
    LOGPROBS,
    MAX_AUDIO_CHARACTERS,
    MAX_EVENT_CHARACTERS,
    Append,
    Clear,
    ClientMistakeError,
    Commit,
    Conversation,
    SessionConfig,
    Update,
    read,
)

SERVER_EVENT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)  # openai-python's own models
TRANSCRIPTION = "conversation.item.input_audio_transcription"


def check(model: str, options: Options) -> None:
    if model not in ("base", "whisper-1"):
        raise UnknownModelError(model)
    if options.language not in (None, "en", "de"):
        raise InvalidInputError(f"Language {options.language!r} is not known.", param="language", code="invalid_value")


def conversation(**options: Any) -> Conversation:
    counters: dict[str, itertools.count] = {}
    options = {"expires_at": 99, "model": "base", "check": check} | options
    return Conversation(
        "sess_1", make_id=lambda kind: f"{kind}_{next(counters.setdefault(kind, itertools.count(1)))}", **options
    )


def update(talk: Conversation, session: Any, kind: str = "session.update", **more: Any) -> dict[str, Any]:
    """Send a change, and return the answer."""
    try:
        said = read(json.dumps({"type": kind, "session": session, **more}))
        assert isinstance(said, Update)
        return talk.update(said)
    except ClientMistakeError as mistake:
        return talk.refuse(mistake)


def set_input(talk: Conversation, **fields: Any) -> dict[str, Any]:
    return update(talk, {"type": "transcription", "audio": {"input": fields}})


def tokens(text: str) -> tuple[Token, ...]:
    return tuple(Token(i, f" {word}".encode(), -0.5) for i, word in enumerate(text.split()))


def delta(utterance: int, text: str) -> LiveDelta:
    return LiveDelta(utterance, text, tokens(text))


def final(utterance: int, language: str | None = "en") -> UtteranceFinal:
    segment = Segment(0, 1, "", (), (), (), 0, 0, 0, 0, 0)
    return UtteranceFinal(segment, utterance, language)


def tell(talk: Conversation, *events: LiveEvent) -> list[dict[str, Any]]:
    told = [written for event in events for written in talk.tell(event)]
    for event in told:
        SERVER_EVENT.validate_python(event)
    return told


def kinds(told: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix(f"{TRANSCRIPTION}.").removeprefix("input_audio_buffer.") for event in told]


# --- what clients send ------------------------------------------------------------------------------------------------------


def test_events_are_read():
    audio = base64.b64encode(b"\x01\x02").decode()
    assert read(json.dumps({"type": "input_audio_buffer.append", "audio": audio})) == Append(b"\x01\x02")
    assert read('{"type": "input_audio_buffer.commit", "event_id": "mine"}') == Commit("mine")
    assert read('{"type": "input_audio_buffer.clear", "event_id": 7}') == Clear(None)


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        (b"\x00\x01", None, "invalid_value"),
        ("", None, "invalid_json"),
        ("[" * 100_000, None, "invalid_json"),
        ("[]", None, "invalid_value"),
        ("{}", "type", "missing_required_parameter"),
        ('{"type": 7}', "type", "invalid_value"),
        ('{"type": "input_audio_buffer.flush"}', "type", "invalid_value"),
        ('{"type": "response.create"}', "type", "invalid_value"),
        ('{"type": "input_audio_buffer.append"}', "audio", "missing_required_parameter"),
        ('{"type": "input_audio_buffer.append", "audio": "%%%"}', "audio", "invalid_value"),
        ('{"type": "input_audio_buffer.append", "audio": "é"}', "audio", "invalid_value"),
        ('{"type": "session.update"}', "session", "missing_required_parameter"),
        ('{"type": "session.update", "session": {"type": "realtime"}}', "session.type", "invalid_value"),
        ('{"type": "session.update", "session": {"x": "' + "y" * MAX_EVENT_CHARACTERS + '"}}', None, "invalid_value"),
    ],
)
def test_what_is_no_event_is_refused_by_name(message, param, code):
    with pytest.raises(ClientMistakeError) as caught:
        read(message)
    assert (caught.value.error.param, caught.value.error.code) == (param, code)


def test_an_append_has_fifteen_mebibytes_and_no_more():
    whole = "A" * MAX_AUDIO_CHARACTERS
    assert len(read(json.dumps({"type": "input_audio_buffer.append", "audio": whole})).audio) == MAX_AUDIO_CHARACTERS * 3 // 4
    with pytest.raises(ClientMistakeError) as caught:
        read(json.dumps({"type": "input_audio_buffer.append", "audio": whole + "AAAA", "event_id": "mine"}))
    assert caught.value.event_id == "mine"
    assert caught.value.error.code == "string_above_max_length"


FIELDS = "type session audio input event_id turn_detection format transcription rate input_audio_format include language prompt"
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.dictionaries(st.sampled_from(FIELDS.split()), inner, max_size=5) | st.lists(inner, max_size=3),
    max_leaves=12,
)


@given(ANYTHING)
@settings(max_examples=500)
def test_nothing_that_a_client_sends_is_answered_with_anything_but_an_event(value: Any):
    talk = conversation()
    before = talk.config
    for message in (value, {"type": "session.update", "session": value}):
        try:
            said = read(json.dumps(message))
            told = talk.update(said) if isinstance(said, Update) else None
        except ClientMistakeError as mistake:
            told = talk.refuse(mistake)
            assert talk.config == before
        if told is not None:
            json.dumps(told)
            before = talk.config


# --- the configuration ------------------------------------------------------------------------------------------------------


def test_a_session_begins_as_openai_documents_it():
    begun = conversation().begin()
    SERVER_EVENT.validate_python(begun)
    assert begun == {
        "type": "session.created",
        "event_id": "event_1",
        "session": {
            "id": "sess_1",
            "object": "realtime.transcription_session",
            "type": "transcription",
            "expires_at": 99,
            "include": [],
            "audio": {
                "input": {
                    "format": {"type": "audio/pcm", "rate": 24000},
                    "transcription": {"model": "base"},
                    "noise_reduction": None,
                    "turn_detection": {
                        "type": "server_vad",
                        "threshold": 0.5,
                        "prefix_padding_ms": 300,
                        "silence_duration_ms": 500,
                    },
                }
            },
        },
    }


def test_an_update_changes_what_it_names_and_leaves_the_rest():
    talk = conversation()
    set_input(talk, transcription={"language": "de", "prompt": "Grüße"}, turn_detection={"silence_duration_ms": 900})
    set_input(talk, transcription={"keywords": ["Steno"]})
    assert talk.options == Options(language="de", prompt="Grüße Steno")
    assert talk.config.endpoints == EndpointPolicy(0.5, 0.3, 0.4, 0.9)
    answer = set_input(talk, transcription={"language": None}, turn_detection=None)
    assert talk.options == Options(prompt="Grüße Steno")
    assert talk.config.endpoints is None
    given = answer["session"]["audio"]["input"]
    assert given["transcription"] == {"model": "base", "prompt": "Grüße", "keywords": ["Steno"]}
    assert given["turn_detection"] is None
    set_input(talk, transcription=None)
    assert talk.options == Options()


def test_another_kind_of_turn_detection_begins_with_its_own_defaults():
    talk = conversation()
    set_input(talk, turn_detection={"type": "server_vad", "threshold": 0.9})
    answer = set_input(talk, turn_detection={"type": "semantic_vad", "eagerness": "low"})
    assert answer["session"]["audio"]["input"]["turn_detection"] == {"type": "semantic_vad", "eagerness": "low"}
    waits = {}
    for eagerness in ("low", "medium", "high", "auto"):
        set_input(talk, turn_detection={"type": "semantic_vad", "eagerness": eagerness})
        waits[eagerness] = talk.config.endpoints.closing_silence(8.0)
    assert waits["low"] > waits["medium"] == waits["auto"] > waits["high"]


@pytest.mark.parametrize(
    ("form", "raw"),
    [
        ({"type": "audio/pcm"}, RawFormat("s16le", 24_000)),
        ({"type": "audio/pcm", "rate": 8000}, RawFormat("s16le", 8_000)),
        ({"type": "audio/pcm", "rate": 48000}, RawFormat("s16le", 48_000)),
        ({"type": "audio/pcmu"}, RawFormat("mulaw", 8_000)),
        ({"type": "audio/pcma"}, RawFormat("alaw", 8_000)),
    ],
)
def test_formats(form, raw):
    talk = conversation()
    answer = set_input(talk, format=form)
    assert talk.config.raw_format == raw
    assert answer["session"]["audio"]["input"]["format"].items() >= form.items()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"format": {"type": "mp3"}}, "format"),
        ({"format": {"type": "audio/pcm", "rate": 7999}}, "format.rate"),
        ({"format": {"type": "audio/pcm", "rate": "fast"}}, "format.rate"),
        ({"turn_detection": {"type": "server_vad", "threshold": 1.1}}, "turn_detection.threshold"),
        ({"turn_detection": {"type": "server_vad", "silence_duration_ms": -1}}, "turn_detection.silence_duration_ms"),
        ({"turn_detection": {"type": "none"}}, "turn_detection"),
        ({"turn_detection": {"type": "semantic_vad", "eagerness": "much"}}, "turn_detection.eagerness"),
        ({"transcription": {"model": "gpt-9"}}, "transcription.model"),
        ({"transcription": {"language": "xx"}}, "transcription.language"),
        ({"transcription": {"language": "en", "languages": ["de"]}}, "transcription.languages"),
        ({"transcription": {"keywords": "one"}}, "transcription.keywords"),
        ({"noise_reduction": {"type": "off"}}, "noise_reduction.type"),
        (7, ""),
    ],
)
def test_a_wrong_value_is_named_and_changes_nothing(fields, param):
    talk = conversation()
    set_input(talk, transcription={"prompt": "before"})
    before, options = talk.config, talk.options
    answer = update(talk, {"audio": {"input": fields}}, event_id="mine")
    SERVER_EVENT.validate_python(answer)
    assert answer["type"] == "error"
    assert answer["error"]["param"] == f"session.audio.input.{param}".rstrip(".")
    assert answer["error"]["event_id"] == "mine"
    assert answer["error"]["type"] == "invalid_request_error"
    assert (talk.config, talk.options) == (before, options)


def test_what_has_no_effect_is_taken_and_named():
    talk = conversation()
    answer = set_input(
        talk,
        noise_reduction={"type": "near_field"},
        transcription={"delay": "low", "tone": "warm"},
        turn_detection={"type": "server_vad", "create_response": False},
    )
    named = {"noise_reduction", "transcription.delay", "transcription.tone", "turn_detection.create_response"}
    assert {name.removeprefix("audio.input.") for name in answer["session"]["without_effect"]} == named
    assert answer["session"]["audio"]["input"]["noise_reduction"] == {"type": "near_field"}
    answer = set_input(talk, noise_reduction=None, transcription={"delay": None})
    assert "without_effect" not in answer["session"]


def test_the_betas_shapes_are_understood_and_answered():
    talk = conversation(beta=True)
    assert talk.begin()["type"] == "transcription_session.created"
    flat = {
        "input_audio_format": "g711_ulaw",
        "input_audio_transcription": {"model": "whisper-1", "language": "en"},
        "turn_detection": {"type": "server_vad", "silence_duration_ms": 350},
        "input_audio_noise_reduction": {"type": "far_field"},
        "include": [LOGPROBS],
    }
    answer = update(talk, flat, "transcription_session.update")
    assert answer["type"] == "transcription_session.updated"
    assert talk.config.raw_format == RawFormat("mulaw", 8_000)
    assert talk.options.language == "en"
    session = answer["session"]
    assert session["turn_detection"]["silence_duration_ms"] == 350
    assert {name: session[name] for name in flat if name != "turn_detection"} == {
        name: value for name, value in flat.items() if name != "turn_detection"
    }
    assert kinds(tell(talk, UtteranceOpened(0, 0.0), UtteranceClosed(0, 1.0))) == [
        "speech_started", "speech_stopped", "committed", "conversation.item.created",
    ]  # fmt: skip
    for value in ("g711-ulaw", "mp3", 7):
        wrong = update(talk, {"input_audio_format": value}, "transcription_session.update")
        assert (wrong["type"], wrong["error"]["param"]) == ("error", "session.input_audio_format")
    wrong = update(talk, {"turn_detection": {"type": "server_vad", "threshold": 2}}, "transcription_session.update")
    assert wrong["error"]["param"] == "session.turn_detection.threshold"
    assert talk.config.raw_format == RawFormat("mulaw", 8_000)


def test_a_configuration_may_come_with_the_key():
    config = SessionConfig().changed({"audio": {"input": {"format": {"type": "audio/pcma"}}}})
    assert conversation(config=config).begin()["session"]["audio"]["input"]["format"] == {"type": "audio/pcma"}


# --- turns --------------------------------------------------------------------------------------------------------------------


def test_a_turn_from_its_first_sound_to_its_text():
    talk = conversation()
    told = tell(talk, UtteranceOpened(0, 0.7), delta(0, "ask not"), LivePartial(0, 1, "what", 2.0), delta(0, " what"))
    told += tell(talk, UtteranceClosed(0, 3.25), delta(0, " your country"), final(0))
    item = told[0]["item_id"]
    text = {"type": f"{TRANSCRIPTION}.delta", "item_id": item, "content_index": 0}
    message = {
        "id": item, "object": "realtime.item", "type": "message", "status": "completed", "role": "user",
        "content": [{"type": "input_audio", "transcript": None}],
    }  # fmt: skip
    for event in told:
        assert event.pop("event_id")
    assert told == [
        {"type": "input_audio_buffer.speech_started", "audio_start_ms": 700, "item_id": item},
        text | {"delta": "ask not"},
        text | {"delta": " what"},
        {"type": "input_audio_buffer.speech_stopped", "audio_end_ms": 3250, "item_id": item},
        {"type": "input_audio_buffer.committed", "item_id": item, "previous_item_id": None},
        {"type": "conversation.item.added", "previous_item_id": None, "item": message},
        {"type": "conversation.item.done", "previous_item_id": None, "item": message},
        text | {"delta": " your country"},
        {
            "type": f"{TRANSCRIPTION}.completed", "item_id": item, "content_index": 0,
            "transcript": "ask not what your country", "languages": [{"code": "en"}],
            "usage": {"type": "duration", "seconds": 2.55},
        },
    ]  # fmt: skip


def test_each_turn_names_the_one_before_it_and_its_text_begins_without_a_space():
    talk = conversation()
    told = tell(talk, UtteranceOpened(0, 0.0), UtteranceClosed(0, 1.0), UtteranceOpened(1, 2.0), UtteranceClosed(1, 3.0))
    told += tell(talk, delta(0, "one"), final(0), delta(1, " two"), final(1))
    committed = [event for event in told if event["type"].endswith("committed")]
    first, second = (event["item_id"] for event in committed)
    assert [event["previous_item_id"] for event in committed] == [None, first]
    assert [e["transcript"] for e in told if e["type"].endswith("completed")] == ["one", "two"]
    assert [(e["item_id"], e["delta"]) for e in told if e["type"].endswith("delta")] == [(first, "one"), (second, "two")]


def test_a_turn_longer_than_the_window_is_one_item():
    talk = conversation()
    told = tell(talk, UtteranceOpened(0, 0.0), UtteranceClosed(0, 30.0, cut=True), UtteranceOpened(1, 30.0))
    told += tell(talk, delta(0, "one"), final(0), delta(1, " two"), UtteranceClosed(1, 45.0), final(1, "de"))
    assert kinds(told) == [
        "speech_started", "delta", "delta", "speech_stopped", "committed", "conversation.item.added", "conversation.item.done",
        "completed",
    ]  # fmt: skip
    assert told[-1]["transcript"] == "one two"
    assert told[-1]["usage"]["seconds"] == 45
    assert told[-1]["languages"] == [{"code": "en"}, {"code": "de"}]
    assert len({event["item_id"] for event in told if "item_id" in event}) == 1


def test_without_voice_activity_the_client_commits_and_no_speech_is_reported():
    talk = conversation()
    set_input(talk, turn_detection=None)
    with pytest.raises(ClientMistakeError) as caught:
        talk.commit(Commit("mine"), open_seconds=0)
    error = talk.refuse(caught.value)["error"]
    assert error["code"] == "input_audio_buffer_commit_empty"
    assert error["message"] == (
        "Error committing input audio buffer: buffer too small. Expected at least 100ms of audio, "
        "but buffer only has 0.00ms of audio."
    )
    for milliseconds, enough in ((50, False), (49.5, False), (0.5, True)):
        talk.append(Append(bytes(2 * round(milliseconds * 24))))
        if enough:
            talk.commit(Commit(), open_seconds=0)
        else:
            with pytest.raises(ClientMistakeError):
                talk.commit(Commit(), open_seconds=0)
    told = tell(talk, UtteranceOpened(0, 0.0), UtteranceClosed(0, 0.1), final(0, None))
    assert kinds(told) == ["committed", "conversation.item.added", "conversation.item.done", "completed"]
    assert (told[-1]["transcript"], told[-1]["languages"]) == ("", [])
    talk.append(Append(bytes(9600)))
    talk.clear()
    with pytest.raises(ClientMistakeError):
        talk.commit(Commit(), open_seconds=0)


def test_with_voice_activity_a_commit_wants_an_open_turn():
    talk = conversation()
    talk.append(Append(bytes(96_000)))
    with pytest.raises(ClientMistakeError):
        talk.commit(Commit(), open_seconds=0)
    talk.commit(Commit(), open_seconds=0.4)


def test_a_turn_that_was_taken_back_has_no_more_events():
    talk = conversation()
    tell(talk, UtteranceOpened(0, 0.0), UtteranceClosed(0, 30.0, cut=True), UtteranceOpened(1, 30.0), delta(0, "one"))
    assert kinds(tell(talk, UtteranceDropped(1), AudioCleared(), delta(0, " more"), final(0))) == ["cleared"]
    told = tell(talk, UtteranceOpened(2, 50.0), UtteranceClosed(2, 51.0), delta(2, " two"), final(2))
    assert [e["previous_item_id"] for e in told if e["type"].endswith("committed")] == [None]
    assert told[-1]["transcript"] == "two"


def test_a_turn_whose_text_was_lost_fails_and_the_next_one_is_well():
    talk = conversation()
    lost = TranscriptionFailedError("The transcription failed.")
    told = tell(talk, UtteranceOpened(0, 0.0), delta(0, "one"), UtteranceClosed(0, 1.0), UtteranceLost(0, lost))
    assert kinds(told)[-1] == "failed"
    assert told[-1]["error"] == {
        "type": "transcription_error", "code": "transcription_failed", "message": "The transcription failed.", "param": None,
    }  # fmt: skip
    assert kinds(tell(talk, UtteranceOpened(1, 2.0), UtteranceClosed(1, 3.0), final(1)))[-1] == "completed"
    # In the middle of a long turn: it is said once, when the turn is over.
    assert kinds(tell(talk, UtteranceOpened(2, 0.0), UtteranceClosed(2, 30.0, cut=True), UtteranceOpened(3, 30.0))) == [
        "speech_started"
    ]
    assert tell(talk, UtteranceLost(2, lost)) == []
    assert kinds(tell(talk, UtteranceClosed(3, 31.0), final(3)))[-1] == "failed"


def test_a_text_that_a_final_changed_is_the_finals():
    talk = conversation()
    told = tell(talk, UtteranceOpened(0, 0.0), UtteranceClosed(0, 30.0, cut=True), UtteranceOpened(1, 30.0), delta(0, "tasks"))
    told += tell(talk, UtteranceChanged(0, "ask not"), final(0), delta(1, " what"), UtteranceClosed(1, 40.0), final(1))
    assert told[-1]["transcript"] == "ask not what"


def test_logprobs_come_where_they_are_asked_for():
    talk = conversation()
    update(talk, {"include": [LOGPROBS]})
    told = tell(talk, UtteranceOpened(0, 0.0), delta(0, "ask"), UtteranceClosed(0, 1.0), delta(0, " not"), final(0))
    ask, no = ({"token": text, "logprob": -0.5, "bytes": list(text.encode())} for text in (" ask", " not"))
    assert [event["logprobs"] for event in told if event["type"].endswith("delta")] == [[ask], [no]]
    assert told[-1]["logprobs"] == [ask, no]


@given(st.integers(0, 2**32))
@settings(max_examples=1000)
def test_whatever_a_session_tells_each_turn_is_told_whole_and_in_order(seed: int):
    """Finals overlap, turns are cut, taken back and lost, and who commits changes meanwhile."""
    chance, talk = random.Random(seed), conversation()
    waiting: list[int] = []  # utterances whose text has not all been told
    told: list[dict[str, Any]] = []
    turn, utterance, open_ = 0, 0, False
    turns: dict[int, int] = {}  # of utterances
    text_of: dict[int, str] = {}
    lost: set[int] = set()
    dropped: set[int] = set()  # turns
    for _ in range(chance.randrange(5, 60)):
        match chance.choices(["open", "close", "cut", "drop", "tell", "switch"], [4, 3, 2, 1, 6, 1])[0]:
            case "open" if not open_:
                open_, turns[utterance] = True, turn
                told += tell(talk, UtteranceOpened(utterance, float(utterance)))
            case "close" if open_:
                open_ = False
                told += tell(talk, UtteranceClosed(utterance, utterance + 0.5))
                waiting.append(utterance)
                utterance, turn = utterance + 1, turn + 1
            case "cut" if open_:
                told += tell(talk, UtteranceClosed(utterance, utterance + 1.0, cut=True))
                waiting.append(utterance)
                utterance += 1
                turns[utterance] = turn
                told += tell(talk, UtteranceOpened(utterance, float(utterance)))
            case "drop" if open_:
                open_ = False
                dropped.add(turn)
                told += tell(talk, UtteranceDropped(utterance))
                utterance, turn = utterance + 1, turn + 1
            case "tell" if waiting:
                of = waiting.pop(0)
                if chance.random() < 0.2:
                    lost.add(of)
                    told += tell(talk, UtteranceLost(of, TranscriptionFailedError("lost")))
                else:
                    text_of[of] = f" u{of}"
                    told += tell(talk, delta(of, text_of[of]), final(of))
            case "switch" if not open_:
                detection = {"type": "server_vad"} if talk.config.endpoints is None else None
                set_input(talk, turn_detection=detection)
    if open_:
        told += tell(talk, UtteranceClosed(utterance, utterance + 0.5))
        waiting.append(utterance)
    for of in waiting:
        text_of[of] = f" u{of}"
        told += tell(talk, delta(of, text_of[of]), final(of))
    committed = [event for event in told if event["type"] == "input_audio_buffer.committed"]
    ended = {event["item_id"]: event for event in told if event["type"].endswith((".completed", ".failed"))}
    kept = [t for t in sorted(set(turns.values())) if t not in dropped]
    items = [event["item_id"] for event in committed]
    assert len(items) == len(set(items)) == len(kept) == len(ended)
    assert [event["previous_item_id"] for event in committed] == [None, *items][: len(items)]
    for item, its_turn in zip(items, kept, strict=True):
        mine = [of for of, t in turns.items() if t == its_turn]
        text = "".join(text_of.get(of, "") for of in mine).strip()
        deltas = "".join(e["delta"] for e in told if e["type"].endswith(".delta") and e["item_id"] == item)
        assert deltas == text
        if lost & set(mine):
            assert ended[item]["type"].endswith("failed")
        else:
            assert ended[item]["transcript"] == text
        place = {e["type"]: i for i, e in enumerate(told) if e.get("item_id") == item}
        assert place["input_audio_buffer.committed"] < place[ended[item]["type"]] == max(place.values())
    assert talk.unfinished == 0
    assert len({event["event_id"] for event in told}) == len(told)


def test_what_is_left_when_the_session_fails_is_told_to_have_failed():
    talk = conversation()
    tell(talk, UtteranceOpened(0, 0.0), UtteranceClosed(0, 1.0), UtteranceOpened(1, 2.0), UtteranceClosed(1, 3.0))
    tell(talk, UtteranceOpened(2, 4.0))
    assert talk.unfinished == 2
    failed = talk.lose_all(TranscriptionFailedError("gone"))
    assert kinds(list(failed)) == ["failed", "failed"]
    assert talk.unfinished == 0
