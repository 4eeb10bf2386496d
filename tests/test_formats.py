"""Captions, languages, quality, and the shapes of the response formats."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from openai.types.audio import TranscriptionVerbose

from app.captions import srt, vtt
from app.languages import NAMES, OTHER_NAMES, code_of, name_of
from app.quality import compression_ratio, judge, temperatures
from app.settings import Settings
from app.transcript import Segment, Transcript
from engine.base import Usage
from engine.checkpoints import resolve
from engine.prompts import LANGUAGE_CODES, spelling
from routers import formats
from routers.forms import TranscriptionForm


def segment(start: float, end: float, text: str = " word", window_start: float = 0.0) -> Segment:
    return Segment(start, end, text, (1, 2), (-0.1, -0.2), (b" wo", b"rd"), window_start, 0.2, -0.3, 1.1, 0.04)


# --- captions: the milliseconds that others got wrong ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "00:00:00,000"),
        (0.9995, "00:00:01,000"),
        (59.9996, "00:01:00,000"),
        (3599.9996, "01:00:00,000"),
        (2.3, "00:00:02,300"),
        (36000.0, "10:00:00,000"),
        (1.0004, "00:00:01,000"),
        (359999.999, "99:59:59,999"),
    ],
)
def test_times_are_rounded_before_they_are_taken_apart(seconds: float, shown: str):
    assert srt([segment(seconds, seconds)]) == f"1\n{shown} --> {shown}\nword\n\n"
    point = shown.replace(",", ".")
    assert vtt([segment(seconds, seconds)]) == f"WEBVTT\n\n{point} --> {point}\nword\n\n"


def test_cues_are_numbered_from_one_and_cannot_be_broken_by_their_text():
    text = srt([segment(0, 1, " one\n\n2\n00:00:00,000 --> 00:00:01,000"), segment(1, 2)])
    cues = text.strip().split("\n\n")
    assert [cue.split("\n")[0] for cue in cues] == ["1", "2"]
    assert all(len(cue.split("\n")) == 3 for cue in cues)
    assert len(re.findall("-->", text)) == 2


def test_no_segments_are_an_empty_srt_and_a_bare_webvtt():
    assert srt([]) == ""
    assert vtt([]) == "WEBVTT\n\n"


# --- languages --------------------------------------------------------------------------------------------------------


def test_languages_are_openai_whispers():
    package = Path(importlib.util.find_spec("whisper").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location("openai_whisper_tokenizer", package / "tokenizer.py")
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    assert theirs.LANGUAGES == NAMES
    assert {name: code_of(name) for name in theirs.TO_LANGUAGE_CODE} == theirs.TO_LANGUAGE_CODE
    assert tuple(NAMES) == LANGUAGE_CODES
    assert set(OTHER_NAMES.values()) <= set(NAMES)


@pytest.mark.parametrize(
    ("sent", "code"),
    [("EN", "en"), ("en-US", "en"), ("zh_TW", "zh"), ("Haitian Creole", "ht"), (" French ", "fr"), ("yue-HK", "yue")],
)
def test_what_clients_send_is_understood(sent: str, code: str):
    assert code_of(sent) == code


@pytest.mark.parametrize("sent", ["xx", "Klingon", "english please", "e", "xx-US"])
def test_what_is_no_language_stays_what_it_is(sent: str):
    assert code_of(sent) not in NAMES


def test_a_name_comes_back_in_full():
    assert (name_of("en"), name_of("ht"), name_of("zh")) == ("english", "haitian creole", "chinese")


# --- quality: openai-whisper's thresholds ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "avg_logprob", "no_speech_prob", "looped", "verdict"),
    [
        ("A plain sentence that says something.", -0.3, 0.0, False, "good"),
        ("A plain sentence that says something.", -1.01, 0.0, False, "unlikely"),
        ("A plain sentence that says something.", -1.01, 0.61, False, "silence"),
        ("A plain sentence that says something.", -0.99, 0.99, False, "good"),
        ("again and again " * 30, -0.1, 0.0, False, "loop"),
        ("again and again and again", -0.1, 0.0, False, "good"),
        ("Short.", -0.1, 0.0, True, "loop"),
        ("", -0.1, 0.0, False, "good"),
    ],
)
def test_verdicts(text: str, avg_logprob: float, no_speech_prob: float, looped: bool, verdict: str):
    assert judge(text, avg_logprob=avg_logprob, no_speech_prob=no_speech_prob, looped=looped) == verdict


def test_the_compression_ratio_is_openai_whispers():
    from whisper.utils import compression_ratio as theirs

    for text in ("a", "Hello there.", "la " * 200, "天气" * 50):
        assert compression_ratio(text) == theirs(text)


@pytest.mark.parametrize(
    ("first", "steps"),
    [(0.0, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)), (0.5, (0.5, 0.6, 0.8, 1.0)), (0.6, (0.6, 0.8, 1.0)), (1.0, (1.0,))],
)
def test_temperatures_rise_from_what_was_asked_for(first: float, steps: tuple[float, ...]):
    assert temperatures(first) == steps


# --- response formats ---------------------------------------------------------------------------------------------------

TRANSCRIPT = Transcript(
    "word word", ("de",), 8.4701, (segment(0, 1.00049), segment(31, 32.5, window_start=30.25)), Usage(9, 1, 4)
)


VERBOSE = TranscriptionForm(model="m", response_format="verbose_json")


def body(task: str = "transcribe") -> dict:
    return json.loads(formats.respond(TRANSCRIPT, VERBOSE, task).body)


def test_verbose_json_is_what_the_sdk_expects_to_the_letter():
    parsed = TranscriptionVerbose.model_validate(body(), strict=True)
    assert (parsed.language, parsed.duration, parsed.text) == ("german", 8.47, "word word")
    assert [s.id for s in parsed.segments] == [0, 1]
    assert [s.seek for s in parsed.segments] == [0, 3025]
    assert (parsed.segments[0].end, parsed.segments[1].start) == (1.0, 31.0)
    assert (parsed.segments[0].avg_logprob, parsed.segments[0].no_speech_prob) == (-0.3, 0.04)
    assert body()["task"] == "transcribe"
    assert body()["usage"] == {"type": "duration", "seconds": 9}


def test_a_translation_says_so():
    assert (body("translate")["task"], body("translate")["language"]) == ("translate", "english")


def test_the_spelling_of_every_vocabulary_entry_is_gpt2s():
    from whisper.tokenizer import get_tokenizer

    theirs = get_tokenizer(True).encoding
    path = resolve("base", Settings(_env_file=None).cache_dir).path / "tokenizer.json"
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    wrong = [
        entry
        for entry, token in vocabulary.items()
        if token < 50257 and spelling(entry) != theirs.decode_single_token_bytes(token)
    ]
    assert not wrong
