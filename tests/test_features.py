"""Spectrograms, against transformers' own feature extractor."""

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from engine.features import SILENCE, attended_positions, encoder_positions, log_mel
from tests import speech

WINDOW = 480_000  # samples of Whisper's 30 s
SOUNDS = {
    "speech": lambda: speech.beckett().audio.samples,
    "silence": lambda: np.zeros(32_000, np.float32),
    "full-scale noise": lambda: np.random.default_rng(1).uniform(-1, 1, 50_000).astype(np.float32),
    "full-scale square": lambda: np.where(np.arange(50_000) % 40 < 20, 1, -1).astype(np.float32),
    "one sample": lambda: np.array([0.5], np.float32),
    "nothing": lambda: np.zeros(0, np.float32),
    "a whole window": lambda: np.random.default_rng(2).normal(0, 0.1, WINDOW).astype(np.float32),
}


@pytest.mark.parametrize("n_mels", [80, 128])
@pytest.mark.parametrize("sound", SOUNDS)
def test_the_spectrogram_is_that_of_transformers(sound, n_mels):
    samples = SOUNDS[sound]()
    theirs = WhisperFeatureExtractor(feature_size=n_mels)(samples, sampling_rate=16_000, return_tensors="np").input_features[0]
    ours = log_mel(samples, n_mels=n_mels)
    assert ours.dtype == torch.float32
    assert ours.shape == theirs.shape == (n_mels, 3000)
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("n_mels", [80, 128])
@pytest.mark.parametrize("trailing_zeros", [200, 1000, 20_480])
@pytest.mark.parametrize("positions", [65, 500, 1499])
def test_audio_that_ends_in_200_zeros_has_the_first_frames_of_the_whole_windows_spectrogram(positions, trailing_zeros, n_mels):
    samples = np.random.default_rng(3).normal(0, 0.2, positions * 320).astype(np.float32)
    samples[-trailing_zeros:] = 0
    short = log_mel(samples, n_mels=n_mels, positions=positions)
    assert short.shape == (n_mels, 2 * positions)
    np.testing.assert_allclose(short, log_mel(samples, n_mels=n_mels)[:, : 2 * positions], rtol=0, atol=1e-5)


def test_the_padding_counts_as_trailing_zeros():
    samples = speech.beckett().audio.samples
    positions = -(-(len(samples) + 200) // 320)
    short = log_mel(samples, n_mels=80, positions=positions)
    np.testing.assert_allclose(short, log_mel(samples, n_mels=80)[:, : 2 * positions], rtol=0, atol=1e-5)


@pytest.mark.parametrize("positions", [1, 64, 1500])
def test_what_does_not_fit_is_refused_and_never_cut(positions):
    fits = np.zeros(320 * positions, np.float32)
    assert log_mel(fits, n_mels=80, positions=positions).shape == (80, 2 * positions)
    with pytest.raises(ValueError, match=rf"{len(fits) + 1} samples .* {positions} encoder positions"):
        log_mel(np.append(fits, np.float32(0)), n_mels=80, positions=positions)


@pytest.mark.parametrize("seconds", [0.01, 1.0, 10.0, 27.0, 27.5, 30.0])
def test_audio_its_silence_and_the_end_of_a_window_fit_into_the_window(seconds):
    samples = round(seconds * 16_000)
    encoded = encoder_positions(samples)
    attended = attended_positions(encoded)
    assert encoded * 320 >= samples
    assert attended <= 1500
    if encoded < 1500:
        assert encoded * 320 - samples >= 1.28 * 16_000
        assert attended > encoded


def test_silence_has_the_value_that_the_end_of_a_silent_window_is_made_from():
    assert float(log_mel(np.zeros(16_000, np.float32), n_mels=80).unique()) == SILENCE


def test_the_samples_are_left_as_they_were():
    samples = speech.tone(1.0)
    samples.flags.writeable = False
    before = samples.copy()
    log_mel(samples[::2], n_mels=80)
    np.testing.assert_array_equal(samples, before)
