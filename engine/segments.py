"""Take a decoded window apart at its timestamp tokens. Pure.

Whisper frames each segment of speech by two timestamps. A window may end without the last one: its segment then ends with the
window's audio. Two timestamps with nothing between them frame nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.prompts import TIMESTAMP_STEP_SECONDS, TokenLayout


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of speech: seconds from the window's start, text as decoded, its tokens, their bytes and log-probabilities."""

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spelling: tuple[bytes, ...]


def split_segments(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    *,
    layout: TokenLayout,
    seconds: float,
    detokenize: Callable[[Sequence[int]], str],
    spell: Callable[[int], bytes],
) -> tuple[Segment, ...]:
    """Return the segments of a window.

    Args:
        tokens: text and timestamp tokens, in order.
        logprobs: one for each token.
        layout: tells timestamps from text.
        seconds: length of the window's audio; no time lies past it.
        detokenize: turns text tokens into text.
        spell: gives one token's bytes, which may be part of a character.

    """
    segments: list[Segment] = []
    start = 0.0
    text: list[int] = []
    scores: list[float] = []

    def close(end: float) -> None:
        begin = min(start, seconds)
        end = min(max(end, begin), seconds)
        segments.append(
            Segment(begin, end, detokenize(text), tuple(text), tuple(scores), tuple(spell(token) for token in text))
        )
        text.clear()
        scores.clear()

    for token, logprob in zip(tokens, logprobs, strict=True):
        if token < layout.timestamp_begin:
            text.append(token)
            scores.append(logprob)
            continue
        time = (token - layout.timestamp_begin) * TIMESTAMP_STEP_SECONDS
        if text:
            close(time)
        start = time
    if text:
        close(seconds)
    return tuple(segments)
