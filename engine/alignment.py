"""When each token was said: cross-attention and dynamic time warping, over tokens that are decoded already.

The method is openai-whisper's (`whisper/timing.py`, `find_alignment`): the tokens are run through the decoder once more, all at
once; some heads of the cross-attention, named by the checkpoint, follow the sound as it is spoken, and the cheapest path
through their weights gives each token its time. vLLM does not hand out attention, so the same weights are loaded a second
time, by transformers, when the first word times are asked for. Blocks; one call at a time.
"""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.features import SAMPLES_PER_POSITION, log_mel
from engine.prompts import TokenLayout

POSITIONS_PER_SECOND = 50
MEDIAN_WIDTH = 7  # openai-whisper's medfilt_width

Times = npt.NDArray[np.float64]


class Aligner:
    """Gives decoded tokens their times. The model is loaded at the first call, and kept."""

    def __init__(self, folder: Path, layout: TokenLayout, n_mels: int) -> None:
        self._folder, self._layout, self._n_mels = folder, layout, n_mels
        self._lock = threading.Lock()
        self._model: Any = None
        self._heads: list[tuple[int, int]] = []

    def align(self, samples: npt.NDArray[np.float32], tokens: Sequence[int], start: Sequence[int]) -> Times:
        """Return when each token begins and, last, when the last one ends: seconds, shape (tokens + 1,), rising.

        Args:
            samples: the window's audio, 16 kHz.
            tokens: text tokens.
            start: the start token, with language and task where the model has them.

        """
        import torch

        with self._lock:
            self._load()
            ids = [*start, self._layout.no_timestamps, *tokens, self._layout.end_of_text]
            mel = log_mel(samples, n_mels=self._n_mels)
            with torch.inference_mode():
                output = self._model(
                    input_features=mel[None], decoder_input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False
                )
                positions = max(1, -(-len(samples) // SAMPLES_PER_POSITION))
                heads = torch.stack([output.cross_attentions[layer][0, head, :, :positions] for layer, head in self._heads])
                heads = heads / heads.sum(-1, keepdim=True).clamp(min=1e-12)
                deviation, mean = torch.std_mean(heads, dim=-2, keepdim=True, correction=0)
                weights = _median_filter((heads - mean) / deviation.clamp(min=1e-12)).mean(0)
        # A row tells where its token looks while the next is chosen: from the token before the text to the text's last.
        return cheapest_path(-weights[len(start) : -1].double().numpy()) / POSITIONS_PER_SECOND

    def _load(self) -> None:
        if self._model is not None:
            return
        from transformers import WhisperForConditionalGeneration

        model = WhisperForConditionalGeneration.from_pretrained(self._folder, dtype="float32", attn_implementation="eager")
        config = self._folder / "generation_config.json"
        named = json.loads(config.read_text(encoding="utf-8")).get("alignment_heads") if config.is_file() else None
        layers, heads = model.config.decoder_layers, model.config.decoder_attention_heads
        # Without names, all heads of the upper half: openai-whisper's default.
        every = [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]
        self._heads = [(layer, head) for layer, head in named] if named else every
        self._model = model.eval()


def _median_filter(x: Any) -> Any:
    """Smooth along the last dimension; what is narrower than the filter stays as it is."""
    from torch.nn import functional

    side = MEDIAN_WIDTH // 2
    if x.shape[-1] <= side:
        return x
    return functional.pad(x, (side, side), mode="reflect").unfold(-1, MEDIAN_WIDTH, 1).median(-1).values


def cheapest_path(cost: Times) -> Times:
    """Return, for each row, the column at which the cheapest path through `cost` enters it (dynamic time warping).

    The path runs from the first cell to the last, by steps down, right, or both; shape (rows, columns) in, (rows,) out.
    """
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0.0
    for diagonal in range(2, rows + columns + 1):  # the cells of an anti-diagonal do not depend on each other
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        before = np.minimum(np.minimum(total[i - 1, j - 1], total[i - 1, j]), total[i, j - 1])
        total[i, j] = cost[i - 1, j - 1] + before
    entered = np.zeros(rows)
    i, j = rows, columns
    while i > 0:
        entered[i - 1] = j - 1
        both, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        if both < down and both < right:
            i, j = i - 1, j - 1
        elif down < both and down < right:
            i -= 1
        else:
            j -= 1
        if j == 0:
            break
    return entered
