"""Words and their times: against openai-whisper's own alignment on the same weights, and by hand."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from whisper.timing import dtw_cpu, find_alignment, merge_punctuations
from whisper.tokenizer import get_tokenizer

from app.settings import Settings
from app.words import CLOSING, OPENING, words_of
from engine.alignment import Aligner, cheapest_path
from engine.checkpoints import resolve
from engine.features import log_mel
from engine.prompts import decoder_prompt
from tests import speech
from tests.oracle import openai_whisper


@pytest.mark.real(order=70)
@pytest.mark.parametrize("name", ["tiny.en", "base"])
@pytest.mark.parametrize(
    ("make", "seconds", "spoken"), [(speech.two_cities, 20, 48), (speech.jfk, 11, 22)], ids=["two_cities", "jfk"]
)
def test_word_times_are_openai_whispers(make: Callable[[], speech.Clip], seconds: int, spoken: int, name: str):
    checkpoint = resolve(name, Settings(_env_file=None).cache_dir)
    clip = make()
    samples = clip.audio.samples[: seconds * speech.RATE]
    text = " " + " ".join(clip.words.split()[:spoken])
    layout = checkpoint.layout
    tokenizer = get_tokenizer(layout.multilingual, language="en", task="transcribe")
    tokens = tokenizer.encode(text)
    aligner = Aligner(checkpoint.path, layout, checkpoint.n_mels)
    prompt = decoder_prompt(layout, language="en", timestamps=True)
    start = (*prompt.token_ids, *(step[0] for step in prompt.forced))
    times = aligner.align(samples, tokens, start)
    ours = words_of([tokenizer.encoding.decode_single_token_bytes(token) for token in tokens], times, "en")

    model = openai_whisper(checkpoint, aligner._heads)
    mel = log_mel(samples, n_mels=80)
    theirs = find_alignment(model, tokenizer, tokens, mel, len(samples) // 160)
    merge_punctuations(theirs, OPENING, CLOSING)
    theirs = [word for word in theirs if word.word]
    assert len(ours) == spoken
    assert [word.text for word in ours] == [word.word.strip() for word in theirs]
    near = [abs(a.start - b.start) <= 0.2 and abs(a.end - b.end) <= 0.2 for a, b in zip(ours, theirs, strict=True)]
    assert np.mean(near) >= 0.9
    assert all(a.start <= a.end for a in ours)
    assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(ours))


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 10_000))
def test_the_cheapest_path_is_openai_whispers(rows: int, columns: int, seed: int):
    cost = np.random.default_rng(seed).standard_normal((rows, columns))
    text, time = dtw_cpu(cost.astype(np.float32).astype(np.float64))
    first_columns = [time[list(text).index(row)] for row in range(rows)]
    assert cheapest_path(cost.astype(np.float32).astype(np.float64)).tolist() == first_columns


@pytest.mark.parametrize(
    ("pieces", "language", "words"),
    [
        ([" It", " was", " the", " best", "."], "en", ["It", "was", "the", "best."]),
        ([" un", "believ", "able", ",", " he", " said"], "en", ["unbelievable,", "he", "said"]),
        ([' "', "Yes", '"', " (", "maybe", ")"], "en", ['"Yes"', "(maybe)"]),
        (["今日", "は", "。"], "ja", ["今日", "は。"]),
        ([" don", "'t", " stop"], "en", ["don't", "stop"]),
        ([], "en", []),
    ],
)
def test_words(pieces: list[str], language: str, words: list[str]):
    spelling = [piece.encode() for piece in pieces]
    found = words_of(spelling, [float(i) for i in range(len(pieces) + 1)], language)
    assert [word.text for word in found] == words
    assert "".join(word.text for word in found) == "".join(pieces).replace(" ", "")
    assert all(word.start < word.end for word in found)


def test_characters_that_are_split_over_tokens_come_whole():
    pieces = [bytes([byte]) for byte in "天气 👩‍👩‍👧".encode()]
    found = words_of(pieces, [float(i) for i in range(len(pieces) + 1)], "zh")
    assert "".join(word.text for word in found) == "天气👩‍👩‍👧"
    assert all("\N{REPLACEMENT CHARACTER}" not in word.text for word in found)
