"""The real engine: Whisper on one vLLM `AsyncLLM`, with inputs that we build ourselves.

vLLM's own preparation of audio is one thread, pads everything to 30 s, and its prompt for Whisper is wrong for
English-only models and for previous text. So the log-mel spectrogram and the decoder's token ids are made here, in worker
threads, and handed over ready. vLLM is imported when the engine starts, in a thread: the import takes from half a minute to
minutes, and the gateway listens meanwhile.

Any exception in vLLM's worker kills the engine for everyone, so every request is checked before it is submitted.
"""

import asyncio
import contextlib
import functools
import gc
import logging
import math
import multiprocessing
import os
import re
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import anyio
import anyio.to_thread
import numpy as np

from engine.base import (
    Ability,
    AudioContext,
    DecodeRequest,
    Delta,
    EngineFailedError,
    EngineLimits,
    EngineState,
    EngineUnavailableError,
    FinishReason,
    Outcome,
    Usage,
    check_request,
)
from engine.checkpoints import Checkpoint, CheckpointError, resolve
from engine.prompts import MAX_NEW_TOKENS, DecoderPrompt, TokenLayout, decoder_prompt, spelling
from engine.segments import split_segments

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import RequestStateStats

    from engine.alignment import Aligner

logger = logging.getLogger(__name__)

# A loop of up to 28 tokens that comes 8 times ends the decode; people do say one word five times.
LOOP_MAX_TOKENS = 28
LOOP_COUNT = 8

# Timestamps are special tokens only in the tokenizers that we convert; others leave them in the text.
_TIMESTAMP = re.compile(r"<\|\d+\.\d\d\|>")

KV_BLOCK = 128  # vLLM's block on a CPU, in tokens


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How to run the engine. Zeros and "auto" are chosen from the machine.

    Attributes:
        model: what `engine.checkpoints.resolve` takes.
        cache_dir: where converted checkpoints are kept.
        audio_context: encode the whole 30 s window, or each audio at its true length.
        dtype: auto, bfloat16, float16 or float32; auto is bfloat16 where the hardware multiplies it.
        threads: OpenMP threads of the engine on a CPU.
        concurrency: requests that decode at once; more of them wait in the engine.
        encoders_per_step: whole windows that one engine step may encode.
        kv_cache_bytes: memory for keys and values; 0 is what `concurrency` needs.

    """

    model: str
    cache_dir: Path
    audio_context: AudioContext = "full"
    dtype: str = "auto"
    threads: int = 0
    concurrency: int = 16
    encoders_per_step: int = 0
    kv_cache_bytes: int = 0


class VllmEngine:
    """An `Engine` over vLLM. Start-up runs in a thread of its own; `state` tells how far it is."""

    def __init__(self, options: VllmOptions) -> None:
        self._options = options
        self._state = EngineState("starting", "the model is being prepared")
        self._settled = asyncio.Event()
        self._model: LoadedModel | None = None
        self._llm: AsyncLLM | None = None
        self._building = False
        self._other_children: set[BaseProcess] = set()
        self._workers = anyio.CapacityLimiter(max(1, os.cpu_count() or 1))

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        # A daemon thread, not a pool's: a stop during the minutes of start-up must not wait for them.
        threading.Thread(target=self._start_in_thread, args=(loop,), name="engine-start", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state = EngineState("draining", "the gateway is stopping")
        self._settled.set()
        llm, self._llm = self._llm, None
        if llm is not None:
            # vLLM stops its process first, and then reports as a failure that it is gone.
            vllm_logger = logging.getLogger("vllm")
            level = vllm_logger.level
            vllm_logger.setLevel(logging.CRITICAL)
            await anyio.to_thread.run_sync(llm.shutdown)
            vllm_logger.setLevel(level)
            await anyio.to_thread.run_sync(_forget_caches)
            llm.shutdown = lambda *_: None  # vLLM calls it once more at the interpreter's end, and fails
        elif self._building:  # vLLM may have spawned its process already
            for child in set(multiprocessing.active_children()) - self._other_children:
                child.kill()

    def kill(self) -> None:
        """End the engine's process at once; vLLM sees it and fails every request."""
        for process in self._processes():
            process.kill()

    def _processes(self) -> list[BaseProcess]:
        """Return the processes that are the engine's own."""
        manager = self._llm.engine_core.resources.engine_manager if self._llm is not None else None
        return list(manager.processes) if manager is not None else []

    # --- start-up ---------------------------------------------------------------------------------------------------

    def _start_in_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        def report(phase: str) -> None:
            self._call_back(loop, self._set_starting, phase)

        try:
            began = time.monotonic()
            _set_environment(self._options)
            _import_ahead()
            checkpoint = resolve(self._options.model, self._options.cache_dir)
            report("importing vLLM")
            model = LoadedModel.load(checkpoint, self._options)
            report(f"loading {checkpoint.name} into the engine")
            self._other_children, self._building = set(multiprocessing.active_children()), True
            with _forking_from_who_has_imported():
                llm = self._build(model)
            self._building = False
            logger.info("engine built in %.0f s", time.monotonic() - began)
        except CheckpointError as error:
            self._call_back(loop, self._fail, str(error))
        except Exception as error:
            logger.exception("the engine did not start")
            self._call_back(loop, self._fail, f"{type(error).__name__}: {error}")
        else:
            self._call_back(loop, self._built, model, llm)

    @staticmethod
    def _call_back(loop: asyncio.AbstractEventLoop, function: Any, *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the gateway stopped meanwhile
            loop.call_soon_threadsafe(function, *args)

    def _set_starting(self, phase: str) -> None:
        if self._state.phase == "starting":
            logger.info("engine: %s", phase)
            self._state = EngineState("starting", phase)

    def _fail(self, reason: str) -> None:
        if self._state.phase == "starting":
            self._state = EngineState("failed", reason)
            logger.error("the engine failed: %s", reason)
            self._settled.set()

    def _built(self, model: "LoadedModel", llm: "AsyncLLM") -> None:
        if self._state.phase != "starting":  # stopped meanwhile
            llm.shutdown()
            return
        self._model, self._llm = model, llm
        self._set_starting("warming up")
        self._warm_up_task = asyncio.create_task(self._warm_up(model))

    async def _warm_up(self, model: "LoadedModel") -> None:
        """Decode a second of silence: on a CPU vLLM itself warms nothing up, and the first request would pay."""
        silence = np.zeros(16_000, dtype=np.float32)
        request = DecodeRequest(id=f"warm-up-{uuid.uuid4().hex[:8]}", samples=silence, audio_context="true")
        try:
            async for _ in self._decode(request):
                pass
        except Exception as error:
            logger.exception("the engine's first decode failed")
            self._fail(f"{type(error).__name__}: {error}")
        else:
            self._state = EngineState("ready")
            self._settled.set()
            logger.info("engine ready: %s on %s", model.checkpoint.name, self.device)

    # --- the protocol -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """Where the engine is now; a dead engine process shows as failed."""
        if self._state.phase == "ready" and self._llm is not None and self._llm.errored:
            return EngineState("failed", "the engine process died")
        return self._state

    @property
    def limits(self) -> EngineLimits:
        """What the engine can take."""
        if self._model is None:
            raise EngineUnavailableError(self.state)
        return self._model.limits

    @property
    def requests(self) -> int:
        """How many requests the engine holds now."""
        return self._llm.get_num_unfinished_requests() if self._llm is not None else 0

    @property
    def device(self) -> str:
        """The device, its threads and the type of numbers."""
        return self._model.device if self._model is not None else "unknown"

    async def wait_ready(self) -> None:
        """Return once the engine is ready."""
        await self._settled.wait()
        if self.state.phase != "ready":
            raise EngineUnavailableError(self.state)

    async def transcribe(self, request: DecodeRequest) -> AsyncGenerator[Delta, None]:
        """Decode a request; see the protocol."""
        if self.state.phase != "ready":
            raise EngineUnavailableError(self.state)
        async with contextlib.aclosing(self._decode(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def align(self, request: DecodeRequest, tokens: Sequence[int]) -> tuple[float, ...]:
        """Tell when each token was said; see the protocol."""
        if self._model is None:
            raise EngineUnavailableError(self.state)
        return await anyio.to_thread.run_sync(self._model.align, request, tokens, limiter=self._workers)

    # --- one request ------------------------------------------------------------------------------------------------

    def _build(self, model: "LoadedModel") -> Any:
        """Start vLLM. Blocks until it is up."""
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(engine_args(model))

    async def _decode(self, request: DecodeRequest) -> AsyncGenerator[Delta, None]:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        model, llm = self._model, self._llm
        if model is None or llm is None:
            raise EngineUnavailableError(self.state)
        prepared = await anyio.to_thread.run_sync(model.prepare, request, limiter=self._workers)
        outputs = llm.generate(prepared.inputs, prepared.sampling, request.id, priority=request.turn)
        finished = False
        try:
            async with contextlib.aclosing(outputs):
                async for delta in _deltas(outputs, prepared, model):
                    finished = delta.outcome is not None
                    yield delta
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineFailedError("the engine died while it decoded this request") from error
        finally:
            # vLLM aborts on cancellation itself, except when it comes in the middle of the submission.
            if not finished and not llm.errored:
                await llm.abort(request.id)


async def _deltas(outputs: AsyncIterator[Any], prepared: "_Prepared", model: "LoadedModel") -> AsyncIterator[Delta]:
    """Turn vLLM's outputs into deltas."""
    reading = _Reading(prepared, model)
    async for output in outputs:
        completion = output.outputs[0]
        delta = reading.take(completion)
        if output.finished:
            yield replace(delta, outcome=reading.outcome(completion.finish_reason, output.metrics))
        elif delta.text or delta.tokens or delta.language != reading.told_language:
            reading.told_language = delta.language
            yield delta


class _Reading:
    """Reads a request's tokens as they come: forced ones become the language, timestamps the segments, the rest is text."""

    def __init__(self, prepared: "_Prepared", model: "LoadedModel") -> None:
        from engine.decoding_rules import read_logprobs

        self._prepared, self._model, self._read_logprobs = prepared, model, read_logprobs
        self._language = prepared.language
        self._steps = 0
        self._tokens: list[int] = []  # text and timestamps
        self._logprobs: list[float] = []
        self._total_logprob = 0.0
        self._no_speech_prob = 0.0
        self.told_language: str | None = None

    def take(self, completion: Any) -> Delta:
        """Read what one output of vLLM adds."""
        layout, forced = self._model.layout, len(self._prepared.prompt.forced)
        text: list[tuple[int, float, bytes]] = []
        for token, known in zip(completion.token_ids, completion.logprobs, strict=True):
            logprob, no_speech_logprob = self._read_logprobs(
                known[token].logprob,
                total=known[layout.start_of_lm].logprob,
                no_speech=known[layout.no_speech].logprob,
                temperature=self._prepared.sampling.temperature,
            )
            if self._steps == 0 and not self._prepared.begun:
                self._no_speech_prob = math.exp(no_speech_logprob)
                self._language = self._language or layout.language_of(token)
            self._steps += 1
            if self._steps <= forced:
                continue
            self._total_logprob += logprob
            if token != layout.end_of_text:
                self._tokens.append(token)
                self._logprobs.append(logprob)
                if token < layout.end_of_text:
                    text.append((token, logprob, self._model.spell(token)))
        tokens, logprobs, spellings = zip(*text, strict=True) if text else ((), (), ())
        return Delta(_TIMESTAMP.sub("", completion.text), tokens, logprobs, spellings, self._language)

    def outcome(self, finish_reason: str | None, stats: "RequestStateStats") -> Outcome:
        """Sum up, once vLLM has ended the request."""
        if finish_reason not in ("stop", "length", "repetition"):
            raise EngineFailedError(f"the engine ended the request with {finish_reason!r}")
        prepared, layout = self._prepared, self._model.layout
        decoded = self._steps - len(prepared.prompt.forced)
        segments = split_segments(
            self._tokens,
            self._logprobs,
            layout=layout,
            seconds=prepared.seconds,
            detokenize=lambda tokens: self._model.tokenizer.decode(list(tokens)),
            spell=self._model.spell,
        )
        text_tokens = sum(token < layout.end_of_text for token in self._tokens)
        return Outcome(
            finish_reason=cast(FinishReason, finish_reason),
            usage=Usage(prepared.positions, len(prepared.prompt.token_ids), text_tokens),
            avg_logprob=self._total_logprob / max(decoded, 1),
            no_speech_prob=self._no_speech_prob,
            segments=segments,
            queue_seconds=stats.scheduled_ts - stats.queued_ts,
            encode_seconds=stats.first_token_ts - stats.scheduled_ts,
            engine_seconds=stats.last_token_ts - stats.scheduled_ts,
        )


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request in the form that vLLM takes."""

    inputs: Any
    sampling: "SamplingParams"
    prompt: DecoderPrompt
    positions: int
    seconds: float
    language: str | None
    begun: bool


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """All that turns requests into vLLM's inputs. Its methods block, and run in worker threads."""

    checkpoint: Checkpoint
    layout: TokenLayout
    tokenizer: "Tokenizer"
    limits: EngineLimits
    options: VllmOptions
    device: str
    dtype: str
    threads: int
    on_cpu: bool
    aligner: "Aligner"

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: VllmOptions) -> "LoadedModel":
        """Read the tokenizer and look at the machine. Imports vLLM."""
        import torch
        from tokenizers import Tokenizer
        from vllm.platforms import current_platform

        from engine.alignment import Aligner

        torch.set_num_threads(1)  # this process makes log-mels, one per worker thread
        layout = checkpoint.layout
        on_cpu = current_platform.is_cpu()
        dtype = _dtype(options.dtype, on_cpu)
        threads = options.threads or _default_threads()
        abilities: tuple[Ability, ...] = (
            ("detection", "translation", "prompt", "words") if layout.multilingual else ("prompt", "words")
        )
        return cls(
            checkpoint=checkpoint,
            layout=layout,
            tokenizer=Tokenizer.from_file(str(checkpoint.path / "tokenizer.json")),
            limits=EngineLimits(
                concurrency=options.concurrency,
                languages=tuple(layout.languages) if layout.multilingual else ("en",),
                abilities=frozenset(abilities),
                audio_context=options.audio_context,
            ),
            options=options,
            device=f"CPU, {threads} thread{'s'[: threads > 1]}, {dtype}" if on_cpu else f"GPU, {dtype}",
            dtype=dtype,
            threads=threads,
            on_cpu=on_cpu,
            aligner=Aligner(checkpoint.path, layout, checkpoint.n_mels),
        )

    def prepare(self, request: DecodeRequest) -> _Prepared:
        """Check a request and build vLLM's inputs for it: log-mel, token ids, sampling."""
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

        from engine.features import WINDOW_POSITIONS, attended_positions, encoder_positions, log_mel

        check_request(request, self.limits)
        whole_window = (request.audio_context or self.limits.audio_context) == "full"
        encoded = WINDOW_POSITIONS if whole_window else encoder_positions(len(request.samples))
        mel = log_mel(request.samples, n_mels=self.checkpoint.n_mels, positions=encoded)
        positions = attended_positions(encoded)
        language = request.language if self.layout.multilingual else "en"
        prompt = decoder_prompt(
            self.layout,
            language=language,
            languages=request.languages,
            task=request.task,
            timestamps=request.timestamps,
            previous=self._previous_tokens(request.previous_text),
            prefix=request.prefix,
        )
        items = MultiModalKwargsItems.from_hf_inputs(
            {"input_features": mel[None]}, {"input_features": MultiModalFieldConfig.batched("audio")}
        )
        inputs = {
            "type": "enc_dec",
            "encoder_prompt": tokens_input([0] * positions),
            "decoder_prompt": mm_input(
                prompt_token_ids=list(prompt.token_ids),
                mm_kwargs=items,
                mm_hashes={"audio": [uuid.uuid4().hex]},
                mm_placeholders={"audio": [PlaceholderRange(offset=0, length=positions)]},
            ),
            "arrival_time": time.time(),
        }
        return _Prepared(
            inputs=inputs,
            sampling=self._sampling(request, prompt),
            prompt=prompt,
            positions=encoded,
            seconds=len(request.samples) / self.limits.sample_rate,
            language=language,
            begun=bool(request.prefix),
        )

    def align(self, request: DecodeRequest, tokens: Sequence[int]) -> tuple[float, ...]:
        """Find when each token was said."""
        check_request(request, self.limits)
        prompt = decoder_prompt(self.layout, language=request.language or "en", task=request.task, timestamps=True)
        start = (*prompt.token_ids, *(step[0] for step in prompt.forced))
        return tuple(self.aligner.align(request.samples, tokens, start).tolist())

    def spell(self, token: int) -> bytes:
        """Return a text token's bytes."""
        return spelling(self.tokenizer.id_to_token(token) or "")

    def _previous_tokens(self, text: str) -> list[int]:
        """Encode text as openai-whisper does. Special tokens that a user may have written out are left away."""
        text = text.encode(errors="ignore").decode()  # half a surrogate pair is no text
        if not text.strip():
            return []
        ids = self.tokenizer.encode(" " + text.strip(), add_special_tokens=False).ids
        return [token for token in ids if token < self.layout.end_of_text]

    def _sampling(self, request: DecodeRequest, prompt: DecoderPrompt) -> "SamplingParams":
        from vllm import SamplingParams
        from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind

        from engine.vllm_plugin import RULES

        return SamplingParams(
            temperature=request.temperature,
            max_tokens=min(prompt.max_new_tokens, len(prompt.forced) + (request.max_tokens or MAX_NEW_TOKENS)),
            output_kind=RequestOutputKind.DELTA if request.deltas else RequestOutputKind.FINAL_ONLY,
            repetition_detection=RepetitionDetectionParams(
                max_pattern_size=LOOP_MAX_TOKENS, min_pattern_size=1, min_count=LOOP_COUNT
            ),
            # One form of log-probabilities for all requests: in vLLM 0.32 one request's choice changes its whole batch.
            logprob_token_ids=[self.layout.no_speech, self.layout.start_of_lm],
            extra_args={
                RULES: {
                    "forced": [list(step) for step in prompt.forced],
                    "timestamps": request.timestamps,
                    "begun": bool(request.prefix),
                }
            },
        )


# --- the machine ---------------------------------------------------------------------------------------------------


def _set_environment(options: VllmOptions) -> None:
    """Tell vLLM and OpenMP, before their import, what they read from the environment. What a user has set stays."""
    threads = str(options.threads or _default_threads())
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine core and worker share a process: one import of vLLM less
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": threads,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # oneDNN keeps code for each length that it meets, for 1,024: tens of MB in half an hour, and nothing is faster.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
        # Without a GPU some of vLLM's helpers would call a C++ compiler in the middle of a step.
        **({} if _has_gpu() else {"TORCHDYNAMO_DISABLE": "1"}),
    }.items():
        os.environ.setdefault(name, value)


def _forget_caches() -> None:
    """Drop what vLLM keeps of an engine beyond its end: four tokenizers in its functions' caches, 140 MB each time."""
    gc.unfreeze()  # else they are not among the objects
    for kept in gc.get_objects():
        if isinstance(kept, functools._lru_cache_wrapper) and kept.__module__.startswith(("vllm.", "transformers.")):
            kept.cache_clear()


def _import_ahead() -> None:
    """Begin to import vLLM in a process from which that of the engine will be forked, while this one imports it too.

    Not where there is a GPU: what an import does with its driver must not be forked.
    """
    if not _has_gpu():
        multiprocessing.set_forkserver_preload(["vllm.v1.engine.core", "engine.vllm_plugin"])
        forkserver.ensure_running()


@contextlib.contextmanager
def _forking_from_who_has_imported() -> Iterator[None]:
    """Let vLLM make its process from the one that has imported it: vLLM itself knows only new and copied processes."""
    import vllm.v1.engine.utils as making

    before = making.get_mp_context
    if not _has_gpu():
        making.get_mp_context = lambda: multiprocessing.get_context("forkserver")
    try:
        yield
    finally:
        making.get_mp_context = before


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def _default_threads() -> int:
    """Leave one core to the gateway and the engine's own event loop."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def _dtype(wanted: str, on_cpu: bool) -> str:
    """Choose bfloat16 where the hardware multiplies it, else float32 on a CPU: emulation is slower than either."""
    if wanted != "auto":
        return wanted
    import torch

    if not on_cpu or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return "bfloat16"
    return "float32"


def _kv_cache_bytes(model: LoadedModel) -> int:
    """Compute what `concurrency` requests need: keys and values of the decoder's positions and of the whole window."""
    import json

    from engine.features import WINDOW_POSITIONS

    config = json.loads((model.checkpoint.path / "config.json").read_text())
    number_bytes = 4 if model.dtype == "float32" else 2
    blocks = -(-448 // KV_BLOCK) + -(-WINDOW_POSITIONS // KV_BLOCK) + 1
    per_block = KV_BLOCK * 2 * config["d_model"] * config["decoder_layers"] * number_bytes
    return int(model.options.concurrency * blocks * per_block)


def engine_args(model: LoadedModel) -> "AsyncEngineArgs":
    """Say how vLLM is to run."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from engine.features import WINDOW_POSITIONS
    from engine.vllm_plugin import ARCHITECTURE

    options = model.options
    rules = "WhisperRulesV1" if model.on_cpu else "WhisperRulesV2"
    encoders = options.encoders_per_step or (2 if model.on_cpu else 16)
    return AsyncEngineArgs(
        model=str(model.checkpoint.path),
        hf_overrides={"architectures": [ARCHITECTURE]},
        logits_processors=[f"engine.vllm_plugin:{rules}"],
        dtype=model.dtype,
        max_model_len=448,
        max_num_seqs=options.concurrency,
        # vLLM admits one encoder a step by default, on every device.
        max_num_batched_tokens=max(WINDOW_POSITIONS * encoders, options.concurrency),
        use_tqdm_on_load=False,
        limit_mm_per_prompt={"audio": 1},
        mm_processor_cache_gb=0,
        enable_prefix_caching=False,
        enforce_eager=model.on_cpu,
        scheduling_policy="priority",
        scheduler_cls="engine.vllm_plugin.SpacedScheduler" if model.on_cpu else None,
        logprobs_mode="processed_logits",
        distributed_executor_backend="uni",
        kv_cache_memory_bytes=options.kv_cache_bytes or (_kv_cache_bytes(model) if model.on_cpu else None),
    )
