"""The `Engine` protocol: what the gateway asks of whatever turns speech into tokens.

Every decode is a request of its own to one engine that batches continuously; nobody waits for a batch to end. The errors:

    EngineError
    |- InvalidRequestError     the request cannot be decoded; found before it is submitted
    |- EngineUnavailableError  starting, draining, or failed; come back later
    `- EngineFailedError       the request was accepted and then lost

Implementations: `engine.vllm_engine.VllmEngine`, and `engine.fake.FakeEngine`, scripted and deterministic.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from engine.prompts import Task
from engine.segments import Segment

Phase = Literal["starting", "ready", "draining", "failed"]
FinishReason = Literal["stop", "length", "repetition"]
AudioContext = Literal["full", "true"]

MAX_AMPLITUDE = 10.0  # 1, and room for what resamplers overshoot; integers that were not scaled are a mistake
PRIORITY_TURNS = 10**12  # between the turns of two priorities, in milliseconds
MAX_PREFIX_TOKENS = 180  # of the 224 that Whisper decodes for a window, so that there is room for more
Ability = Literal["detection", "translation", "prompt", "words"]


class EngineError(Exception):
    """Base of all that an engine raises."""


class InvalidRequestError(EngineError):
    """The request's `field` holds something that the engine cannot decode."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class EngineUnavailableError(EngineError):
    """The engine is not ready; `state` says why."""

    def __init__(self, state: "EngineState") -> None:
        super().__init__(f"the engine is {state}")
        self.state = state


class EngineFailedError(EngineError):
    """The engine lost a request that it had accepted."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """Where an engine is in its life, and why."""

    phase: Phase
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.phase}: {self.reason}" if self.reason else self.phase


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can take.

    `concurrency` is how many requests decode at once; more of them wait. `audio_context` is that of requests that name none.
    """

    concurrency: int
    languages: tuple[str, ...]
    abilities: frozenset[Ability]
    audio_context: AudioContext = "full"
    window_seconds: float = 30.0
    sample_rate: int = 16_000

    @property
    def window_samples(self) -> int:
        """The longest audio of one request, in samples."""
        return int(self.window_seconds * self.sample_rate)


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """One window of speech to decode.

    Attributes:
        id: unique among the requests in flight; appears in logs.
        samples: mono float32, shape (n,), at the engine's sample rate, at most one window.
        language: one of the engine's codes, or None to let the model choose.
        languages: what the model may choose from; all that it knows when empty.
        task: transcribe, or translate into English.
        previous_text: text that came before this audio (OpenAI's `prompt`); steers style and spelling.
        temperature: 0 decodes greedily; above, tokens are sampled.
        prefix: text tokens that the text is known to begin with; what is decoded comes after them. It needs a `language`, and
            excludes `timestamps`.
        timestamps: frame the text by times, which gives the outcome's segments; without, there is one.
        max_tokens: the most text tokens to decode; None is what the model can.
        deltas: yield text as it comes; else one Delta at the end, which costs less.
        audio_context: encode the whole window (`full`) or only this audio's length (`true`); None is the engine's default.
        priority: lower goes first among the waiting.
        patience_seconds: among those of one priority who came first goes first; this one as if it came so much later.

    """

    id: str
    samples: npt.NDArray[np.float32]
    language: str | None = None
    languages: tuple[str, ...] = ()
    task: Task = "transcribe"
    previous_text: str = ""
    temperature: float = 0.0
    prefix: tuple[int, ...] = ()
    timestamps: bool = False
    max_tokens: int | None = None
    deltas: bool = False
    audio_context: AudioContext | None = None
    priority: int = 0
    patience_seconds: float = 0.0

    @property
    def turn(self) -> int:
        """Where a request that is submitted now stands among the waiting: lower goes first."""
        return self.priority * PRIORITY_TURNS + int((time.monotonic() + self.patience_seconds) * 1000)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, in tokens: encoder positions, decoder prompt, text."""

    audio_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.audio_tokens + other.audio_tokens,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a decode ended, and what its own signals say of it.

    Attributes:
        finish_reason: stop, the token limit, or a loop.
        usage: what it cost.
        avg_logprob: mean log-probability of the tokens, the end included (openai-whisper's `avg_logprob`).
        no_speech_prob: how likely it was, before the first token, that nobody speaks.
        segments: the text by times.
        queue_seconds: how long it waited for its first step.
        encode_seconds: from its first step to its first token.
        engine_seconds: how long it was decoded, from its first step to its last.

    """

    finish_reason: FinishReason
    usage: Usage
    avg_logprob: float
    no_speech_prob: float
    segments: tuple[Segment, ...] = ()
    queue_seconds: float = field(default=0.0, compare=False)
    encode_seconds: float = field(default=0.0, compare=False)
    engine_seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a request. The texts of its deltas join to the whole.

    `tokens` are those of the text, `logprobs` and `spelling` (bytes, maybe part of a character) theirs. `language` is known
    from the first Delta on, and None only for an engine that cannot tell. The last Delta, and only the last, has an `outcome`.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spelling: tuple[bytes, ...] = ()
    language: str | None = None
    outcome: Outcome | None = None


class Engine(Protocol):
    """An async context manager that starts in the background on entry and frees everything on exit."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def kill(self) -> None:
        """End whatever decodes, at once and without its help: every request fails. Nothing is decoded any more."""

    @property
    def state(self) -> EngineState:
        """Where the engine is now."""

    @property
    def limits(self) -> EngineLimits:
        """What the engine can take.

        Raises:
            EngineUnavailableError: before the model is known.

        """

    @property
    def requests(self) -> int:
        """How many requests the engine holds now, running and waiting."""

    @property
    def device(self) -> str:
        """What the engine runs on, for people to read."""

    async def wait_ready(self) -> None:
        """Return once the engine is ready.

        Raises:
            EngineUnavailableError: if it failed instead.

        """

    def transcribe(self, request: DecodeRequest) -> AsyncGenerator[Delta, None]:
        """Decode a request. Closing or cancelling the iterator aborts the request in the engine, at any moment.

        Raises:
            InvalidRequestError: before anything is submitted.
            EngineUnavailableError: before anything is submitted.
            EngineFailedError: when the engine lost the request.

        """

    async def align(self, request: DecodeRequest, tokens: Sequence[int]) -> tuple[float, ...]:
        """Tell when each of a decode's text tokens begins and, last, when the last one ends, in seconds of its audio.

        `request.language` must be the one that was decoded.

        Raises:
            InvalidRequestError: if the request cannot be decoded.
            EngineUnavailableError: before the model is known.

        """


def check_request(request: DecodeRequest, limits: EngineLimits) -> None:
    """Refuse what an engine must never see: in vLLM an exception in the worker kills the engine for everyone.

    Raises:
        InvalidRequestError: naming the field.

    """
    samples = request.samples
    if not isinstance(samples, np.ndarray) or samples.dtype != np.float32 or samples.ndim != 1:
        raise InvalidRequestError("samples", "the audio must be a one-dimensional float32 array")
    if not 1 <= len(samples) <= limits.window_samples:
        raise InvalidRequestError("samples", f"the audio has {len(samples)} samples, not 1 to {limits.window_samples}")
    if not np.abs(samples).max() <= MAX_AMPLITUDE:  # NaN compares false
        raise InvalidRequestError("samples", "the audio's samples are not numbers between -1 and 1")
    if request.language is not None and request.language not in limits.languages:
        raise InvalidRequestError("language", f"the model does not know the language {request.language!r}")
    if unknown := [language for language in request.languages if language not in limits.languages]:
        raise InvalidRequestError("languages", f"the model does not know the language {unknown[0]!r}")
    if request.task == "translate" and "translation" not in limits.abilities:
        raise InvalidRequestError("task", "the model does not translate")
    if request.prefix and (request.timestamps or (request.language is None and "detection" in limits.abilities)):
        raise InvalidRequestError("prefix", "a prefix needs a language, and no timestamps")
    if len(request.prefix) > MAX_PREFIX_TOKENS:
        raise InvalidRequestError("prefix", f"the prefix has {len(request.prefix)} tokens; {MAX_PREFIX_TOKENS} is the most")
    if not 0.0 <= request.temperature <= 1.0:
        raise InvalidRequestError("temperature", f"the temperature {request.temperature} is not between 0 and 1")
