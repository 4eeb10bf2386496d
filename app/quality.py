"""When not to trust a decode: openai-whisper's thresholds over its own signals (`whisper/transcribe.py`). Pure.

A text that compresses too well is a loop; one that is too unlikely is decoded again at a higher temperature; and what is both
unlikely and probably silence is dropped.
"""

import zlib
from typing import Literal

COMPRESSION_RATIO_LIMIT = 2.4
AVG_LOGPROB_LIMIT = -1.0
NO_SPEECH_LIMIT = 0.6
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

Verdict = Literal["good", "silence", "loop", "unlikely"]


def temperatures(first: float) -> tuple[float, ...]:
    """Return what to decode at, one after another: what was asked for, and the higher steps."""
    return (first, *(step for step in TEMPERATURES if step > first))


def compression_ratio(text: str) -> float:
    """Return how many times smaller zlib makes the text; 0 for none."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def judge(text: str, *, avg_logprob: float, no_speech_prob: float, looped: bool = False) -> Verdict:
    """Say whether a window's text can be trusted; `looped` is the engine's own word that it went round in circles."""
    if no_speech_prob > NO_SPEECH_LIMIT and avg_logprob < AVG_LOGPROB_LIMIT:
        return "silence"
    if looped or compression_ratio(text) > COMPRESSION_RATIO_LIMIT:
        return "loop"
    if avg_logprob < AVG_LOGPROB_LIMIT:
        return "unlikely"
    return "good"
