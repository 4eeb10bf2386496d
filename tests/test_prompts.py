"""Token layout and decoder prompts, against openai-whisper's own tokenizer and its published layout."""

import importlib.util
from pathlib import Path

import pytest

from engine.prompts import (
    MAX_PROMPT_TOKENS,
    MAX_TARGET_POSITIONS,
    DecoderPrompt,
    TokenLayout,
    UnknownVocabularyError,
    decoder_prompt,
)

ENGLISH, MULTILINGUAL, WITH_CANTONESE = (TokenLayout.of_vocabulary(size) for size in (51_864, 51_865, 51_866))


@pytest.fixture(scope="module")
def openai_tokenizer():
    """Load openai-whisper's tokenizer module by itself: the whole package would import torch and numba."""
    package = Path(importlib.util.find_spec("whisper").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location("openai_whisper_tokenizer", package / "tokenizer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("layout", "multilingual", "languages"), [(ENGLISH, False, 99), (MULTILINGUAL, True, 99), (WITH_CANTONESE, True, 100)]
)
def test_every_special_token_has_openai_whispers_id(openai_tokenizer, layout, multilingual, languages):
    theirs = openai_tokenizer.get_tokenizer(multilingual, num_languages=languages, language="en", task="transcribe")
    assert theirs.encoding.n_vocab == layout.size
    assert dict(theirs.special_tokens) == {name: token for token, name in layout.special_tokens().items()}
    assert (layout.end_of_text, layout.start_of_transcript) == (theirs.eot, theirs.sot)
    assert (layout.start_of_previous, layout.start_of_lm, layout.no_speech) == (
        theirs.sot_prev,
        theirs.sot_lm,
        theirs.no_speech,
    )
    assert (layout.no_timestamps, layout.timestamp_begin) == (theirs.no_timestamps, theirs.timestamp_begin)
    assert (layout.translate, layout.transcribe) == (theirs.translate, theirs.transcribe)
    assert layout.languages == dict(zip(theirs.all_language_codes, theirs.all_language_tokens, strict=True))


def with_forced(prompt: DecoderPrompt) -> tuple[int, ...]:
    """Return all that comes before the text; every forced step must leave one token."""
    assert all(len(step) == 1 for step in prompt.forced)
    return (*prompt.token_ids, *(token for (token,) in prompt.forced))


@pytest.mark.parametrize("task", ["transcribe", "translate"])
@pytest.mark.parametrize("language", ["en", "de", "su"])
def test_multilingual_prompt_is_openai_whispers(openai_tokenizer, language, task):
    theirs = openai_tokenizer.get_tokenizer(True, language=language, task=task)
    ours = decoder_prompt(MULTILINGUAL, language=language, task=task)
    assert with_forced(ours) == theirs.sot_sequence_including_notimestamps
    assert with_forced(decoder_prompt(MULTILINGUAL, language=language, task=task, timestamps=True)) == theirs.sot_sequence


def test_english_only_prompt_has_no_language_and_no_task(openai_tokenizer):
    theirs = openai_tokenizer.get_tokenizer(False)
    assert with_forced(decoder_prompt(ENGLISH, language="en")) == theirs.sot_sequence_including_notimestamps == (50257, 50362)
    assert with_forced(decoder_prompt(ENGLISH, language="en", timestamps=True)) == theirs.sot_sequence == (50257,)


@pytest.mark.parametrize(("layout", "multilingual"), [(ENGLISH, False), (MULTILINGUAL, True)])
@pytest.mark.parametrize("length", [1, 222, 223, 224, 900])
def test_previous_text_comes_first_and_keeps_its_last_223_tokens(openai_tokenizer, layout, multilingual, length):
    theirs = openai_tokenizer.get_tokenizer(multilingual, language="en", task="transcribe")
    previous = (theirs.encode(" Notes about apples, bridges and candles.") * 200)[:length]
    # whisper/decoding.py, DecodingTask._get_initial_tokens, with n_ctx = 448
    expected = (theirs.sot_prev, *previous[-(448 // 2 - 1) :], *theirs.sot_sequence_including_notimestamps)
    ours = decoder_prompt(layout, language="en", previous=previous)
    assert with_forced(ours) == expected
    assert len(ours.token_ids) + ours.max_new_tokens <= MAX_TARGET_POSITIONS
    assert len(expected) - len(theirs.sot_sequence_including_notimestamps) - 1 <= MAX_PROMPT_TOKENS


def test_an_unknown_language_is_left_to_the_model_and_the_rest_is_forced():
    prompt = decoder_prompt(MULTILINGUAL, language=None, task="translate", previous=[11, 12])
    assert prompt.token_ids == (50361, 11, 12, 50258)
    assert prompt.forced == (tuple(range(50259, 50358)), (50358,), (50363,))
    assert prompt.max_new_tokens == 224 + 3


def test_language_of_a_token():
    assert MULTILINGUAL.language_of(50261) == "de"
    assert MULTILINGUAL.language_of(50258) is None
    assert MULTILINGUAL.language_of(50358) is None


@pytest.mark.parametrize("size", [0, 51_863, 51_867, 151_936])
def test_other_vocabularies_are_refused(size):
    with pytest.raises(UnknownVocabularyError, match="Whisper"):
        TokenLayout.of_vocabulary(size)
