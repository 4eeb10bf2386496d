"""Log-mel spectrograms as Whisper expects them, equal to transformers' `WhisperFeatureExtractor` within 1e-4.

A pure function over samples. It needs torch and torchaudio's pure-Python filter bank; it knows no engine.
"""

import functools

import numpy as np
import numpy.typing as npt
import torch
import torchaudio.functional

SAMPLE_RATE = 16_000  # Hz
N_FFT = 400
HOP = 160  # samples a frame: 10 ms
FRAMES_PER_POSITION = 2  # the second convolution of the encoder halves the frames
SAMPLES_PER_POSITION = HOP * FRAMES_PER_POSITION  # 20 ms
WINDOW_POSITIONS = 1500  # encoder positions of the 30 s window
# True length: at least 1.28 s of silence after the audio (whisper-acft issue 5: 64 frames), rounded up so that requests of
# similar length are encoded together; and after it the last second of a silent window's encoding. By its end the decoder
# sees that nothing more is said: without it Whisper goes on for ever (scripts/compare_contexts.py).
TRAILING_POSITIONS = 64
POSITION_STEP = 25
END_POSITIONS = 50
SILENCE = -1.5  # what `log_mel` makes of digital silence


def encoder_positions(samples: int) -> int:
    """Return how many positions to encode for audio of so many samples, the silence after it included.

    Less than `WINDOW_POSITIONS` means that the end of a silent window has to follow.
    """
    needed = -(-samples // SAMPLES_PER_POSITION) + TRAILING_POSITIONS
    rounded = -(-needed // POSITION_STEP) * POSITION_STEP
    return rounded if rounded + END_POSITIONS < WINDOW_POSITIONS else WINDOW_POSITIONS


def attended_positions(encoded: int) -> int:
    """Return how many positions the decoder attends to, where so many are encoded."""
    return encoded if encoded == WINDOW_POSITIONS else encoded + END_POSITIONS


@functools.cache
def _mel_filters(n_mels: int) -> torch.Tensor:
    filters: torch.Tensor = torchaudio.functional.melscale_fbanks(
        n_freqs=N_FFT // 2 + 1,
        f_min=0.0,
        f_max=SAMPLE_RATE / 2,
        n_mels=n_mels,
        sample_rate=SAMPLE_RATE,
        norm="slaney",
        mel_scale="slaney",
    )
    return filters.T.contiguous()


@functools.cache
def _hann_window() -> torch.Tensor:
    return torch.hann_window(N_FFT)


def log_mel(samples: npt.NDArray[np.float32], *, n_mels: int, positions: int = WINDOW_POSITIONS) -> torch.Tensor:
    """Compute the log-mel spectrogram of `samples`, padded with silence to `positions`.

    Args:
        samples: mono, 16 kHz, float32 in -1 to 1, shape (n,), n <= positions x 320.
        n_mels: filters, 80 or 128, as the checkpoint says.
        positions: encoder positions of 20 ms each; 1,500 is Whisper's whole window.

    Returns:
        float32, shape (n_mels, 2 x positions).

    Raises:
        ValueError: if the samples do not fit into `positions`.

    """
    length = positions * SAMPLES_PER_POSITION
    if len(samples) > length:
        raise ValueError(f"{len(samples)} samples do not fit into {positions} encoder positions ({length} samples)")
    padded = torch.zeros(length)
    padded[: len(samples)] = torch.from_numpy(np.ascontiguousarray(samples))
    spectrum = torch.stft(padded, N_FFT, HOP, window=_hann_window(), return_complex=True)
    power = spectrum[:, :-1].abs() ** 2
    mel = _mel_filters(n_mels) @ power
    log = mel.clamp(min=1e-10).log10()
    log = torch.maximum(log, log.max() - 8.0)
    return (log + 4.0) / 4.0
