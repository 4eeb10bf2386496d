"""Where somebody speaks: windows cut from any stream, and silero on real speech and on what is none."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.speech.reader import SpeechReader
from app.speech.vad import FRAME_SAMPLES, AlwaysSpeech, SileroVoiceActivity, feed_all
from app.speech.windows import CutPolicy, Window, WindowCutter, quietest
from tests import speech
from tests.test_transcribe import ArrayAudio

RATE = 16_000
POLICY = CutPolicy(limit_seconds=3.0, before_seconds=0.1, after_seconds=0.1, silence_seconds=0.5)


def cut(samples: np.ndarray, probabilities: np.ndarray, policy: CutPolicy, pieces: list[int]) -> list[Window]:
    """Feed a cutter in pieces of so many frames."""
    cutter, windows, frame = WindowCutter(RATE, policy), [], 0
    for piece in [*pieces, len(probabilities)]:
        first, last = frame * FRAME_SAMPLES, min(frame + piece, len(probabilities)) * FRAME_SAMPLES
        windows += cutter.feed(samples[first:last], probabilities[frame : frame + piece])
        frame = last // FRAME_SAMPLES
    return windows + list(cutter.flush(samples[frame * FRAME_SAMPLES :]))


@st.composite
def streams(draw):
    """Draw stretches of speech and silence, noise for samples, and how it is fed."""
    stretches = draw(st.lists(st.tuples(st.integers(1, 200), st.sampled_from([0.0, 0.3, 0.39, 0.4, 1.0])), max_size=8))
    probabilities = np.concatenate([np.zeros(0), *(np.full(n, p) for n, p in stretches)]).astype(np.float32)
    rest = draw(st.integers(0, FRAME_SAMPLES - 1))
    noise = np.random.default_rng(draw(st.integers(0, 99)))
    samples = noise.uniform(-1, 1, len(probabilities) * FRAME_SAMPLES + rest).astype(np.float32)
    return samples, probabilities, draw(st.lists(st.integers(0, 90), max_size=6))


def test_streams_that_are_fed_together_hear_what_each_hears_alone():
    chance = np.random.default_rng(3)
    clip = speech.two_cities().audio.samples
    starts = chance.integers(0, len(clip) // 2, 6)
    alone = [SileroVoiceActivity().feed(clip[start : start + 20 * FRAME_SAMPLES]) for start in starts]
    streams = [SileroVoiceActivity() for _ in starts]
    heard: list[list[np.ndarray]] = [[] for _ in starts]
    positions = np.zeros(len(starts), dtype=int)
    while (positions < 20).any():
        counts = [int(min(chance.integers(0, 4), 20 - position)) for position in positions]
        pairs = [
            (stream, clip[start + position * FRAME_SAMPLES : start + (position + count) * FRAME_SAMPLES])
            for stream, start, position, count in zip(streams, starts, positions, counts, strict=True)
        ]
        for pieces, probabilities in zip(heard, feed_all(pairs), strict=True):
            pieces.append(probabilities)
        positions += counts
    for pieces, expected in zip(heard, alone, strict=True):
        assert np.concatenate(pieces) == pytest.approx(expected, abs=1e-5)


@settings(max_examples=300, deadline=None)
@given(streams(), st.floats(1, 40))
def test_windows_hold_all_speech_once_within_the_limit_and_do_not_depend_on_how_they_are_fed(stream, first_limit):
    samples, probabilities, pieces = stream
    policy = replace(POLICY, first_limit_seconds=first_limit)
    windows = cut(samples, probabilities, policy, pieces)
    whole = cut(samples, probabilities, policy, [])
    assert all(len(w.samples) <= first_limit * RATE for w in windows[:1])
    assert [(w.start, len(w.samples)) for w in windows] == [(w.start, len(w.samples)) for w in whole]
    covered = np.zeros(len(samples), dtype=int)
    for window in windows:
        assert 0 < len(window.samples) <= POLICY.limit_seconds * RATE
        assert np.array_equal(window.samples, samples[window.start : window.start + len(window.samples)])
        covered[window.start : window.start + len(window.samples)] += 1
    assert covered.max(initial=0) <= 1
    loud = np.repeat(probabilities >= POLICY.threshold, FRAME_SAMPLES)
    # A run of three loud frames or more is speech.
    runs = np.flatnonzero(np.diff(np.concatenate([[0], loud.astype(int), [0]])))
    for first, last in zip(runs[::2], runs[1::2], strict=True):
        if last - first >= 3 * FRAME_SAMPLES:
            assert covered[first:last].all()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 400_000), st.floats(1, 40))
def test_of_continuous_speech_every_sample_is_in_exactly_one_window_and_none_is_a_scrap(length, first_limit):
    policy = replace(POLICY, first_limit_seconds=first_limit)
    samples = np.random.default_rng(length).uniform(-1, 1, length).astype(np.float32)
    frames = length // FRAME_SAMPLES
    windows = cut(samples, np.ones(frames, np.float32), policy, [])
    if frames < 3:  # too short to be taken for speech
        return
    assert np.array_equal(np.concatenate([w.samples for w in windows]), samples)
    limit = POLICY.limit_seconds * RATE
    assert all(len(w.samples) <= limit for w in windows)
    assert len(windows) == 1 or min(len(w.samples) for w in windows) >= min(limit, first_limit * RATE) // 6 - FRAME_SAMPLES


def test_the_cut_falls_into_the_pause():
    samples = np.random.default_rng(1).uniform(-1, 1, 5 * RATE).astype(np.float32)
    samples[int(2.4 * RATE) : int(2.6 * RATE)] = 0
    first, second = cut(samples, np.ones(len(samples) // FRAME_SAMPLES, np.float32), POLICY, [])
    assert 2.4 * RATE < len(first.samples) < 2.6 * RATE
    assert second.start == len(first.samples)


@pytest.mark.parametrize("silence", [3.0, 6.0])
def test_short_pauses_stay_inside_a_window_and_long_ones_part_two(silence: float):
    spoken, quiet = round(2 * RATE / FRAME_SAMPLES), round(silence * RATE / FRAME_SAMPLES)
    probabilities = np.concatenate([np.ones(spoken), np.zeros(quiet), np.ones(spoken)]).astype(np.float32)
    windows = cut(np.ones(len(probabilities) * FRAME_SAMPLES, np.float32), probabilities, CutPolicy(), [])
    assert len(windows) == (1 if silence < 4 else 2)
    if silence > 4:
        onset = (spoken + quiet) * FRAME_SAMPLES
        assert onset - windows[1].start == pytest.approx(0.4 * RATE, abs=1)
        assert windows[0].start == 0
        assert len(windows[0].samples) == pytest.approx(spoken * FRAME_SAMPLES + 0.4 * RATE, abs=1)


def test_the_quietest_stretch_is_found():
    samples = np.ones(1000, dtype=np.float32)
    samples[400:500] = 0.1
    assert 440 <= quietest(samples, 80) <= 460


def windows_of(samples: np.ndarray, activity=None) -> list[Window]:
    reader = SpeechReader(ArrayAudio(samples.astype(np.float32)), activity or SileroVoiceActivity(), CutPolicy())
    return list(iter(reader.next_window, None))


def test_silero_finds_the_speech_and_leaves_out_the_silence_around_it():
    clip = speech.beckett().audio.samples
    silence = np.zeros(20 * RATE, dtype=np.float32)
    first, second = windows_of(np.concatenate([silence, clip, silence, clip, silence]))
    for window, onset in ((first, 20 * RATE), (second, 40 * RATE + len(clip))):
        assert onset - RATE < window.start < onset + RATE
        assert len(window.samples) == pytest.approx(len(clip), abs=RATE)


@pytest.mark.parametrize("level", [0.001, 0.01, 0.1, 0.5])
def test_silero_hears_no_speech_in_noise(level: float):
    assert windows_of(np.random.default_rng(3).standard_normal(20 * RATE) * level) == []


@pytest.mark.parametrize("samples", [np.zeros(20 * RATE), speech.tone(20.0), np.zeros(0), np.zeros(100)], ids=range(4))
def test_silero_hears_no_speech_in_silence_and_tones(samples: np.ndarray):
    assert windows_of(samples) == []


def test_the_network_gives_what_the_package_itself_gives():
    from silero_vad import load_silero_vad

    theirs, samples = load_silero_vad(), speech.beckett().audio.samples[: 150 * FRAME_SAMPLES]
    frames = torch.from_numpy(samples.reshape(-1, FRAME_SAMPLES))
    expected = [theirs(frame, RATE).item() for frame in frames]
    assert max(expected) > 0.9
    assert min(expected) < 0.1
    np.testing.assert_allclose(SileroVoiceActivity().feed(samples), expected, atol=1e-4)


def test_silero_gives_the_same_in_pieces():
    samples = speech.beckett().audio.samples[: 200 * FRAME_SAMPLES]
    whole = SileroVoiceActivity().feed(samples)
    stream = SileroVoiceActivity()
    pieces = [stream.feed(piece) for piece in np.split(samples, [0, 7 * FRAME_SAMPLES, 9 * FRAME_SAMPLES])]
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=1e-5)


def test_floats_on_the_scale_of_integers_are_brought_to_that_of_sound():
    (window,) = windows_of(speech.tone(2.0) * 32768, AlwaysSpeech())
    assert np.abs(window.samples).max() == pytest.approx(1.0)
    (window,) = windows_of(speech.tone(2.0), AlwaysSpeech())
    assert np.abs(window.samples).max() == pytest.approx(0.5, abs=1e-3)
