"""Voice activity by silero: for each frame of 32 ms, how likely it is that somebody speaks.

Incremental: feed samples as they come. The weights come from the package silero-vad (MIT licence). The network is run here, in
whole blocks of frames with only its recurrent cell step by step, in a tenth of the time of the package's own call for each
frame; the package's fast path needs onnxruntime, which reports to its maker. Blocks, so it runs in a worker thread.
"""

import functools
from collections.abc import Callable
from typing import Protocol

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
    """Voice activity of one stream, 16 kHz. The network is shared; each stream has its own state."""

    def __init__(self) -> None:
        self._network = _network()
        self._context = np.zeros(CONTEXT_SAMPLES, dtype=np.float32)
        self._state: object = None

    def feed(self, samples: Samples) -> Samples:
        """Return the probabilities of whole frames."""
        frames = samples.reshape(-1, FRAME_SAMPLES)
        if not len(frames):
            return np.zeros(0, dtype=np.float32)
        contexts = np.vstack([self._context, frames[:-1, -CONTEXT_SAMPLES:]])
        self._context = frames[-1, -CONTEXT_SAMPLES:].copy()
        probabilities, self._state = self._network(np.hstack([contexts, frames]), self._state)
        return probabilities


class AlwaysSpeech:
    """Hears speech everywhere: for audio that is known to be speech, or when every sample shall be decoded."""

    def feed(self, samples: Samples) -> Samples:
        """Return ones."""
        return np.ones(len(samples) // FRAME_SAMPLES, dtype=np.float32)


@functools.cache
def _network() -> Callable[[Samples, object], tuple[Samples, object]]:
    """Load silero's network for 16 kHz (`silero_vad/tinygrad_model.py` shows its layers).

    Returns a function from frames with their context, shape (n, 576), and a state to probabilities (n,) and the next state.
    """
    import torch
    from silero_vad import load_silero_vad
    from torch.nn import functional

    weights = {name.removeprefix("_model."): tensor for name, tensor in load_silero_vad().state_dict().items()}
    layers = [
        (weights[f"encoder.{i}.reparam_conv.weight"], weights[f"encoder.{i}.reparam_conv.bias"], stride)
        for i, stride in enumerate((1, 2, 2, 1))
    ]
    cell = torch.nn.LSTM(128, 128)
    cell.load_state_dict(
        {f"{kind}_l0": weights[f"decoder.rnn.{kind}"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    )

    @torch.inference_mode()
    def run(frames: Samples, state: object) -> tuple[Samples, object]:
        x = functional.pad(torch.from_numpy(frames).unsqueeze(1), (0, CONTEXT_SAMPLES), mode="reflect")
        real, imaginary = functional.conv1d(x, weights["stft.forward_basis_buffer"], stride=128).chunk(2, dim=1)
        x = (real**2 + imaginary**2).sqrt()
        for weight, bias, stride in layers:
            x = functional.conv1d(x, weight, bias, stride, padding=1).relu()
        hidden, state = cell(x.permute(2, 0, 1).reshape(-1, 1, 128), state)
        logits = functional.linear(
            hidden.relu(), weights["decoder.decoder.2.weight"][..., 0], weights["decoder.decoder.2.bias"]
        )
        probabilities: Samples = logits.sigmoid().flatten().numpy()
        return probabilities, state

    return run
