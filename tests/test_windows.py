"""Windows, with any sound: nothing lost, nothing twice, no scraps, and cuts where it is quiet."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.audio.windows import cut_windows
from tests import speech


@st.composite
def sounds(draw):
    """Draw samples, a rate and a limit; the sound has loud, quiet and silent stretches of any length."""
    rate = draw(st.integers(10, 200))
    limit = draw(st.integers(1, 300))
    stretches = draw(st.lists(st.tuples(st.integers(0, 400), st.sampled_from([0.0, 1e-6, 0.01, 0.5, 1.0])), max_size=8))
    noise = np.random.default_rng(draw(st.integers(0, 1000)))
    samples = [noise.uniform(-level, level, length) for length, level in stretches]
    return np.concatenate([np.zeros(0), *samples]).astype(np.float32), rate, limit


@given(sounds())
def test_windows_hold_every_sample_once_and_none_is_too_long_or_a_scrap(sound):
    samples, rate, limit = sound
    windows = cut_windows(samples, rate=rate, limit=limit)
    starts, ends = zip(*windows, strict=True)
    assert starts[0] == 0
    assert ends[-1] == len(samples)
    assert starts[1:] == ends[:-1]
    lengths = [end - start for start, end in windows]
    assert max(lengths) <= limit
    if len(windows) > 1:
        assert min(lengths) >= max(1, limit // 6)


@given(st.integers(0, 100), st.integers(100, 1000))
def test_audio_no_longer_than_the_limit_is_one_window(length, limit):
    assert cut_windows(np.ones(length, np.float32), rate=100, limit=limit) == [(0, length)]


@given(
    begin=st.integers(200, 290),
    length=st.integers(10, 100),
    level=st.sampled_from([1e-3, 0.1, 1.0]),
    total=st.integers(360, 800),
    seed=st.integers(0, 1000),
)
def test_a_silence_in_the_last_third_of_a_window_gets_the_cut(begin, length, level, total, seed):
    end = min(begin + length, 300)  # the window is searched from 200 to 300, the quiet stretch is 10 samples long
    samples = np.random.default_rng(seed).uniform(level / 2, level, total).astype(np.float32)
    samples[begin:end] = 0
    (_, cut), *_ = cut_windows(samples, rate=100, limit=300)
    assert begin < cut < end


@given(begin=st.integers(200, 240), total=st.integers(301, 349))
def test_a_silence_too_near_the_end_for_another_window_does_not_get_the_cut(begin, total):
    samples = np.ones(total, np.float32)
    samples[begin : begin + 10] = 0.5
    samples[total - 45 :] = 0  # a cut in here would leave a scrap
    windows = cut_windows(samples, rate=100, limit=300)
    assert len(windows) == 2
    assert begin < windows[0][1] < begin + 10


def test_of_equally_quiet_places_the_latest_gets_the_cut():
    samples = np.ones(1000, np.float32)
    samples[210:230] = samples[260:280] = 0
    assert 260 < cut_windows(samples, rate=100, limit=300)[0][1] < 280


@pytest.mark.parametrize("pauses", [[25.0], [21.5, 48.0, 70.2], [29.5, 59.0]])
def test_at_16_khz_and_30_s_every_cut_falls_into_a_pause(pauses):
    rate, limit = 16_000, 480_000
    samples = speech.tone(pauses[-1] + 20)
    for second in pauses:
        samples[int(second * rate) : int((second + 0.3) * rate)] = 1e-4
    windows = cut_windows(samples, rate=rate, limit=limit)
    assert len(windows) == len(pauses) + 1
    for (_, cut), second in zip(windows, pauses, strict=False):
        assert second < cut / rate < second + 0.3


def test_speech_is_cut_where_its_neighbourhood_is_quieter_than_elsewhere():
    audio = speech.two_cities().audio
    ((_, cut), _) = cut_windows(audio.samples, rate=audio.rate, limit=30 * audio.rate)

    def loudness(samples: np.ndarray) -> float:
        return float(np.sqrt(np.mean(samples**2)))

    assert loudness(audio.samples[cut - 400 : cut + 400]) < 0.1 * loudness(audio.samples)
