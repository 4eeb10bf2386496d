"""What Steno adds inside vLLM's engine process: a Whisper that takes audio of any length, and Whisper's decoding rules.

vLLM finds `register` through the `vllm.general_plugins` entry point, in every process of its own. The model class is
registered as a class: a "module:Class" string makes vLLM start one more process, only to inspect it.
"""

import json
import multiprocessing
import os
import threading
from collections import defaultdict
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm import ModelRegistry, SamplingParams
from vllm.model_executor.models.whisper import WhisperForConditionalGeneration
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from engine.decoding_rules import RequestRules, VocabularyRules, restrict
from engine.features import END_POSITIONS, FRAMES_PER_POSITION, SILENCE, WINDOW_POSITIONS
from engine.memory import give_back_often
from engine.prompts import TokenLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState

ARCHITECTURE = "StenoWhisperForConditionalGeneration"
FIRST_TOKENS = 12  # so many make the text that is shown first
SHORT_POSITIONS = 520  # of audio that is not worth waiting for others' first tokens: 8 s
RULES = "steno_rules"  # key of SamplingParams.extra_args: the arguments of RequestRules


class SpacedScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, but it begins one long audio at a time, and none while a request still waits for its first tokens.

    On a CPU to encode a window takes as long as dozens of decode steps, and vLLM puts encodes into every step that it can: each
    of a text's first tokens would wait for another request's audio. Short audio is done as soon as those tokens would be.
    """

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step."""
        admitted: int = self.max_num_active_reqs  # type: ignore[has-type]
        if self._next_is_long():
            waited_for = any(request.num_output_tokens < FIRST_TOKENS for request in self.running)
            self.max_num_active_reqs = min(admitted, len(self.running) + (not waited_for))
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_active_reqs = admitted

    def _next_is_long(self) -> bool:
        """Say whether the audio of the request that is next takes long to encode."""
        if not self.waiting:
            return False
        request = self.waiting.peek_request()
        return bool(request.has_encoder_inputs) and request.get_num_encoder_embeds(0) > SHORT_POSITIONS


class StenoWhisper(WhisperForConditionalGeneration):  # type: ignore[misc]
    """Whisper whose audio items may differ in length within a step; all else is inherited.

    The parent stacks the log-mel spectrograms of a step, and so refuses unequal ones. Here those of equal length are
    encoded together, and the encoder's outputs return in the order of the items. What is shorter than the window is
    followed by the end of a silent window: a decoder that was trained on whole windows finds there that speech is over.
    """

    _window_end: torch.Tensor | None = None

    def embed_multimodal(self, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Encode the step's items: each (n_mels, frames) or stacked; out comes (attended positions, d_model) for each."""
        features = [item.to(self.dtype) for item in kwargs["input_features"]]
        by_length: dict[int, list[int]] = defaultdict(list)
        for i, item in enumerate(features):
            by_length[item.shape[-1]].append(i)
        encoded: list[torch.Tensor] = [torch.empty(0)] * len(features)
        for indices in by_length.values():
            outputs = self.model.get_encoder_outputs(torch.stack([features[i] for i in indices]))
            for i, output in zip(indices, outputs, strict=True):
                whole = len(output) == WINDOW_POSITIONS
                encoded[i] = output if whole else torch.cat([output, self._end_of_silent_window(features[i])])
        return tuple(encoded)

    def _end_of_silent_window(self, like: torch.Tensor) -> torch.Tensor:
        """Return the last positions of an encoded silent window, (END_POSITIONS, d_model)."""
        if self._window_end is None:
            silent = torch.full_like(like[:, :1], SILENCE).expand(-1, WINDOW_POSITIONS * FRAMES_PER_POSITION)
            self._window_end = self.model.get_encoder_outputs(silent[None].contiguous())[0][-END_POSITIONS:].clone()
        return self._window_end


class WhisperRulesV1(LogitsProcessor):  # type: ignore[misc]
    """`engine.decoding_rules` for vLLM's V1 model runner, which serves CPUs."""

    def __init__(self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool) -> None:
        self._vocabulary = _vocabulary_rules(vllm_config, device)
        # Batch index -> the request's rules, and its output ids: a list that the runner extends.
        self._requests: dict[int, tuple[RequestRules, list[int]]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Accept any parameters: the engine builds them itself."""

    def is_argmax_invariant(self) -> bool:
        """Say no: what the rules leave is seldom the likeliest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests as they join, leave and move within the batch."""
        process_dict_updates(self._requests, batch_update, lambda params, _, output: _rules_and_output(params, output))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Restrict the rows of requests that have rules; logits is (batch, vocabulary)."""
        for i, (rules, output) in self._requests.items():
            restrict(logits[i], output, rules, self._vocabulary)
        return logits


class WhisperRulesV2(LogitsProcessorV2):  # type: ignore[misc]
    """`engine.decoding_rules` for vLLM's V2 model runner, which serves CUDA. Not run so far: it wants a GPU."""

    def __init__(self, vllm_config: "VllmConfig", req_states: "LogitsProcRequestState") -> None:
        self._vocabulary = _vocabulary_rules(vllm_config, req_states.device)
        self._states = req_states
        self._requests: dict[int, RequestRules] = {}  # by slot

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Remember the rules of the request that takes this slot."""
        self._requests.pop(req_idx, None)
        rules = _rules_of(sampling_params)
        if rules is not None:
            self._requests[req_idx] = rules
        return rules is not None

    def apply(self, logits: torch.Tensor, ctx: "LogitsContext") -> torch.Tensor:
        """Restrict the rows of requests that have rules; logits is (rows, vocabulary), one row a request."""
        for i, slot in enumerate(ctx.idx_mapping_np.tolist()):
            if slot in self._requests:
                begin, end = int(self._states.prompt_len.np[slot]), int(ctx.seq_lens_upper_bound_np[i])
                output = self._states.all_token_ids.gpu[slot, begin:end].tolist()
                restrict(logits[i], output, self._requests[slot], self._vocabulary)
        return logits


def _rules_of(params: SamplingParams) -> RequestRules | None:
    rules = (params.extra_args or {}).get(RULES)
    return RequestRules(tuple(tuple(step) for step in rules["forced"]), rules["timestamps"], rules["begun"]) if rules else None


def _rules_and_output(params: SamplingParams, output: list[int]) -> tuple[RequestRules, list[int]] | None:
    rules = _rules_of(params)
    return (rules, output) if rules else None


def _vocabulary_rules(vllm_config: "VllmConfig", device: torch.device) -> VocabularyRules:
    """Read which tokens the checkpoint wants suppressed, and add the special ones that are never text."""
    layout = TokenLayout.of_vocabulary(vllm_config.model_config.hf_config.vocab_size)
    path = Path(vllm_config.model_config.model) / "generation_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    specials = (
        layout.start_of_transcript,
        *layout.languages.values(),
        layout.translate,
        layout.transcribe,
        layout.start_of_lm,
        layout.start_of_previous,
        layout.no_speech,
        layout.no_timestamps,
    )
    suppressed = sorted({*(config.get("suppress_tokens") or ()), *specials})
    at_start = sorted({*(config.get("begin_suppress_tokens") or ()), layout.end_of_text})
    return VocabularyRules(layout, torch.tensor(suppressed, device=device), torch.tensor(at_start, device=device))


def _leave_with_parent() -> None:
    """End this process when the gateway that started it is gone: vLLM's stays behind, with all its memory."""

    def wait(parent: BaseProcess) -> None:
        parent.join()
        os._exit(1)

    if parent := multiprocessing.parent_process():
        threading.Thread(target=wait, args=(parent,), name="leave-with-parent", daemon=True).start()


def register() -> None:
    """Register the model class with vLLM, under a name that no stock checkpoint has, and look after this process."""
    ModelRegistry.register_model(ARCHITECTURE, StenoWhisper)
    _leave_with_parent()
    give_back_often()
