"""Voice activity by silero: for each frame of 32 ms, how likely it is that somebody speaks.

Incremental: feed samples as they come. The weights come from the package silero-vad (MIT licence). The network is run here, in
whole blocks of frames with only its recurrent cell step by step, in a tenth of the time of the package's own call for each
frame; the package's fast path needs onnxruntime, which reports to its maker. Blocks, so it runs in a worker thread.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

FRAME_SAMPLES = 512  # at 16 kHz
CONTEXT_SAMPLES = 64  # of the frame before, which the network sees again
STATE_SIZE = 128

Samples = npt.NDArray[np.float32]


class VoiceActivity(Protocol):
    """Tells how likely speech is, frame by frame of `FRAME_SAMPLES`."""

    def feed(self, samples: Samples) -> Samples:
        """Return the probabilities of whole frames, shape (n / 512,); n must be a multiple of 512."""


class SileroVoiceActivity:
    """Voice activity of one stream, 16 kHz. The network is shared, and loaded when first fed; each stream has its own state."""

    def __init__(self) -> None:
        self.context = np.zeros(CONTEXT_SAMPLES, dtype=np.float32)
        self.state = np.zeros((2, STATE_SIZE), dtype=np.float32)

    def feed(self, samples: Samples) -> Samples:
        """Return the probabilities of whole frames."""
        return feed_all([(self, samples)])[0]


def feed_all(streams: Sequence[tuple[VoiceActivity, Samples]]) -> list[Samples]:
    """Feed several streams at once, which costs little more than one of them. Return the probabilities of each."""
    results: list[Samples | None] = [None] * len(streams)
    together: dict[int, list[int]] = defaultdict(list)
    for i, (stream, samples) in enumerate(streams):
        if isinstance(stream, SileroVoiceActivity) and len(samples):
            together[len(samples)].append(i)
        else:
            results[i] = stream.feed(samples) if len(samples) else np.zeros(0, dtype=np.float32)
    for indices in together.values():
        batch = [streams[i] for i in indices]
        for i, probabilities in zip(indices, _feed_equal(batch), strict=True):  # type: ignore[arg-type]
            results[i] = probabilities
    return [result for result in results if result is not None]


def _feed_equal(batch: "list[tuple[SileroVoiceActivity, Samples]]") -> Samples:
    """Feed streams with as many samples each; shape (streams, frames)."""
    windows = []
    for stream, samples in batch:
        frames = samples.reshape(-1, FRAME_SAMPLES)
        contexts = np.vstack([stream.context, frames[:-1, -CONTEXT_SAMPLES:]])
        stream.context = frames[-1, -CONTEXT_SAMPLES:].copy()
        windows.append(np.hstack([contexts, frames]))
    states = np.stack([stream.state for stream, _ in batch], axis=1)
    probabilities, states = _network()(np.stack(windows), states)
    for i, (stream, _) in enumerate(batch):
        stream.state = states[:, i]
    return probabilities


class AlwaysSpeech:
    """Hears speech everywhere: for audio that is known to be speech, or when every sample shall be decoded."""

    def feed(self, samples: Samples) -> Samples:
        """Return ones."""
        return np.ones(len(samples) // FRAME_SAMPLES, dtype=np.float32)


@functools.cache
def _network() -> Callable[[Samples, Samples], tuple[Samples, Samples]]:
    """Load silero's network for 16 kHz (`silero_vad/tinygrad_model.py` shows its layers).

    Returns a function from the frames of streams with their contexts, shape (streams, frames, 576), and the streams' states,
    shape (2, streams, 128), to probabilities (streams, frames) and the next states.
    """
    import torch
    from silero_vad import load_silero_vad
    from torch.nn import functional

    weights = {name.removeprefix("_model."): tensor for name, tensor in load_silero_vad().state_dict().items()}
    layers = [
        (weights[f"encoder.{i}.reparam_conv.weight"], weights[f"encoder.{i}.reparam_conv.bias"], stride)
        for i, stride in enumerate((1, 2, 2, 1))
    ]
    cell = torch.nn.LSTM(STATE_SIZE, STATE_SIZE, batch_first=True)
    cell.load_state_dict(
        {f"{kind}_l0": weights[f"decoder.rnn.{kind}"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    )

    @torch.inference_mode()
    def run(frames: Samples, states: Samples) -> tuple[Samples, Samples]:
        streams, count, width = frames.shape
        x = torch.from_numpy(frames).reshape(streams * count, 1, width)
        x = functional.pad(x, (0, CONTEXT_SAMPLES), mode="reflect")
        real, imaginary = functional.conv1d(x, weights["stft.forward_basis_buffer"], stride=128).chunk(2, dim=1)
        x = (real**2 + imaginary**2).sqrt()
        for weight, bias, stride in layers:
            x = functional.conv1d(x, weight, bias, stride, padding=1).relu()
        hidden, cells = torch.from_numpy(states).unsqueeze(1).contiguous().unbind(0)
        outputs, (hidden, cells) = cell(x.reshape(streams, count, STATE_SIZE), (hidden, cells))
        logits = functional.linear(
            outputs.relu(), weights["decoder.decoder.2.weight"][..., 0], weights["decoder.decoder.2.bias"]
        )
        probabilities: Samples = logits.sigmoid().squeeze(-1).numpy()
        return probabilities, torch.cat([hidden, cells]).numpy()

    return run
