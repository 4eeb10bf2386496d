"""What Steno adds inside vLLM's engine process: a Whisper that takes audio of any length, and a rule for the first tokens.

vLLM finds `register` through the `vllm.general_plugins` entry point, in every process of its own. The model class is
registered as a class: a "module:Class" string makes vLLM start one more process, only to inspect it.
"""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from vllm import ModelRegistry, SamplingParams
from vllm.model_executor.models.whisper import WhisperForConditionalGeneration
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ARCHITECTURE = "StenoWhisperForConditionalGeneration"
FORCED = "steno_forced"  # key of SamplingParams.extra_args: a list of allowed token ids for each of the first steps


class StenoWhisper(WhisperForConditionalGeneration):  # type: ignore[misc]
    """Whisper whose audio items may differ in length within a step; all else is inherited.

    The parent stacks the log-mel spectrograms of a step, and so refuses unequal ones. Here those of equal length are
    encoded together, and the encoder's outputs return in the order of the items.
    """

    def embed_multimodal(self, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Encode the step's items: each (n_mels, frames) or stacked; out comes (positions, d_model) for each."""
        features = [item.to(self.dtype) for item in kwargs["input_features"]]
        by_length: dict[int, list[int]] = defaultdict(list)
        for i, item in enumerate(features):
            by_length[item.shape[-1]].append(i)
        encoded: list[torch.Tensor] = [torch.empty(0)] * len(features)
        for indices in by_length.values():
            outputs = self.model.get_encoder_outputs(torch.stack([features[i] for i in indices]))
            for i, output in zip(indices, outputs, strict=True):
                encoded[i] = output
        return tuple(encoded)


class ForcedTokens(LogitsProcessor):  # type: ignore[misc]
    """Allows, in each of a request's first steps, only the tokens that its rules name.

    So a multilingual model chooses its language token in the same pass that decodes the text, and detection costs no second
    encode. This is the interface of vLLM's V1 model runner.
    """

    def __init__(self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        # Batch index -> the allowed ids of each step, and the request's output ids, a list that the runner extends.
        self._requests: dict[int, tuple[list[list[int]], list[int]]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Accept any parameters: the engine builds them itself."""

    def is_argmax_invariant(self) -> bool:
        """Say no: a forced token is seldom the likeliest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests as they join, leave and move within the batch."""
        process_dict_updates(self._requests, batch_update, _rules_of)
        done = [i for i, (forced, output) in self._requests.items() if len(output) >= len(forced)]
        for i in done:
            del self._requests[i]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask the rows of requests that are still within their rules; logits is (batch, vocabulary)."""
        for i, (forced, output) in self._requests.items():
            allowed = torch.tensor(forced[len(output)], device=self._device)
            kept = logits[i, allowed]
            logits[i] = -torch.inf
            logits[i, allowed] = kept
        return logits


def _rules_of(params: SamplingParams, _prompt: list[int] | None, output: list[int]) -> tuple[list[list[int]], list[int]] | None:
    forced = (params.extra_args or {}).get(FORCED)
    return (forced, output) if forced else None


def register() -> None:
    """Register the model class with vLLM, under a name that no stock checkpoint has."""
    ModelRegistry.register_model(ARCHITECTURE, StenoWhisper)
