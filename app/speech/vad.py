"""Voice activity by silero: for each frame of 32 ms, how likely it is that somebody speaks.

Incremental: feed samples as they come. The network (1 MB, MIT licence, in the package silero-vad) is loaded at its first use,
and shared; each stream has its own state. About 0.1 ms of CPU a frame; blocks, so it runs in a worker thread.
"""

import functools
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

FRAME_SAMPLES = 512  # at 16 kHz
CONTEXT_SAMPLES = 64  # of the frame before, which the network sees again

Samples = npt.NDArray[np.float32]


class VoiceActivity(Protocol):
    """Tells how likely speech is, frame by frame of `FRAME_SAMPLES`."""

    def feed(self, samples: Samples) -> Samples:
        """Return the probabilities of whole frames, shape (n / 512,); n must be a multiple of 512."""


class SileroVoiceActivity:
    """Voice activity of one stream, 16 kHz."""

    def __init__(self) -> None:
        self._context = np.zeros(CONTEXT_SAMPLES, dtype=np.float32)
        self._h = np.zeros((1, 1, 128), dtype=np.float32)
        self._c = np.zeros((1, 1, 128), dtype=np.float32)

    def feed(self, samples: Samples) -> Samples:
        """Return the probabilities of whole frames."""
        frames = samples.reshape(-1, FRAME_SAMPLES)
        if not len(frames):
            return np.zeros(0, dtype=np.float32)
        contexts = np.vstack([self._context, frames[:-1, -CONTEXT_SAMPLES:]])
        self._context = frames[-1, -CONTEXT_SAMPLES:].copy()
        inputs = {"input": np.hstack([contexts, frames]), "h": self._h, "c": self._c}
        probabilities, self._h, self._c = _session().run(["speech_probs", "hn", "cn"], inputs)
        flat: Samples = probabilities.reshape(-1)
        return flat


class AlwaysSpeech:
    """Hears speech everywhere: for audio that is known to be speech, or when every sample shall be decoded."""

    def feed(self, samples: Samples) -> Samples:
        """Return ones."""
        return np.ones(len(samples) // FRAME_SAMPLES, dtype=np.float32)


@functools.cache
def _session() -> Any:
    """Load the network; its runtime session may be used by many threads."""
    from silero_vad import load_silero_vad

    return load_silero_vad(sequence=True).session
