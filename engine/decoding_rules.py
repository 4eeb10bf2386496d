"""Whisper's decoding rules, step by step, over one row of logits: what the next token may be.

The rules are those of openai-whisper (`whisper/decoding.py`: `SuppressBlank`, `SuppressTokens`, `ApplyTimestampRules`), which
its models were made to be decoded with. Pure: a function of the request's rules, of the tokens decoded so far, and of the row.
Adapters in `engine.vllm_plugin` apply it to vLLM's batches.

Log-probabilities are to be those after the rules and before the temperature, as openai-whisper's are, and the first step's are
to tell how likely silence was before the rules. Neither can be read from vLLM's own, which are from before the rules or after
the temperature. So each row carries two figures of its own out, in places of tokens that are never decoded: `read_logprobs`
reads them.

Forced steps come first: each allows only some tokens. So a multilingual model chooses its language in the same pass that
decodes the text, after a prompt that ends at the start token, where its first step also tells how likely silence is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.prompts import TIMESTAMP_STEP_SECONDS, TokenLayout

MAX_INITIAL_TIMESTAMP_SECONDS = 1.0  # openai-whisper, DecodingOptions.max_initial_timestamp
NEVER = -torch.inf
DEPTH = 50.0  # how far, in logits, the row's own figures lie below all else: sampled once in e^50


@dataclass(frozen=True, slots=True)
class VocabularyRules:
    """What holds for every request of a model.

    `suppressed` may never be decoded (special tokens, and signs of what is no speech); `suppressed_at_start` may not begin a
    text (a blank, and the end: a window that was sent has something in it).
    """

    layout: TokenLayout
    suppressed: torch.Tensor
    suppressed_at_start: torch.Tensor


@dataclass(frozen=True, slots=True)
class RequestRules:
    """What holds for one request.

    `forced` are the allowed tokens of each forced step; `timestamps` tells whether timestamps follow; `begun` whether the
    prompt holds the text's beginning already.
    """

    forced: tuple[tuple[int, ...], ...] = ()
    timestamps: bool = False
    begun: bool = False


def restrict(row: torch.Tensor, decoded: Sequence[int], rules: RequestRules, vocabulary: VocabularyRules) -> None:
    """Forbid in `row`, in place, what may not come after `decoded`.

    Args:
        row: logits, float, shape (vocabulary,).
        decoded: the tokens since the prompt, forced ones included.
        rules: the request's.
        vocabulary: the model's.

    """
    layout, first = vocabulary.layout, not decoded
    no_speech = row[layout.no_speech] - torch.logsumexp(row, 0) if first else 0.0
    _forbid(row, decoded, rules, vocabulary)
    total = torch.logsumexp(row, 0) - DEPTH
    row[layout.start_of_lm] = total
    row[layout.no_speech] = total + no_speech


def read_logprobs(token: float, *, total: float, no_speech: float, temperature: float) -> tuple[float, float]:
    """Compute log-probabilities from a row's logits, as they are after the temperature.

    Args:
        token: the logit of the token that was chosen.
        total, no_speech: the row's own figures, in the places of the start-of-lm and the no-speech token.
        temperature: what the logits were divided by; 0 stands for none.

    Returns:
        the token's, after the rules and before the temperature; and in the first step that of silence, before the rules.

    """
    scale = temperature or 1.0
    return scale * (token - total) - DEPTH, scale * (no_speech - total)


def _forbid(row: torch.Tensor, decoded: Sequence[int], rules: RequestRules, vocabulary: VocabularyRules) -> None:
    step = len(decoded)
    if step < len(rules.forced):
        _allow_only(row, rules.forced[step])
        return
    text = decoded[len(rules.forced) :]
    row[vocabulary.suppressed] = NEVER
    if not text and not rules.begun:
        row[vocabulary.suppressed_at_start] = NEVER
    if rules.timestamps:
        _keep_timestamp_grammar(row, text, vocabulary.layout)
    else:
        row[vocabulary.layout.timestamp_begin :] = NEVER


def _allow_only(row: torch.Tensor, allowed: Sequence[int]) -> None:
    index = torch.tensor(allowed, device=row.device)
    kept = row[index]
    row.fill_(NEVER)
    row[index] = kept


def _keep_timestamp_grammar(row: torch.Tensor, text: Sequence[int], layout: TokenLayout) -> None:
    """Timestamps come in pairs around each segment, never run backwards, and begin within the first second."""
    begin = layout.timestamp_begin
    if not text:
        row[:begin] = NEVER
        row[begin + round(MAX_INITIAL_TIMESTAMP_SECONDS / TIMESTAMP_STEP_SECONDS) + 1 :] = NEVER
        return
    after_one = text[-1] >= begin
    after_pair = after_one and (len(text) < 2 or text[-2] >= begin)
    if after_pair:
        row[begin:] = NEVER  # a segment has begun: text comes
    elif after_one:
        row[: layout.end_of_text] = NEVER  # a segment has ended: the next begins, or all is said
    last = next((token for token in reversed(text) if token >= begin), None)
    if last is not None:
        # An end may be repeated as the next beginning; else each must lie after the last, so that no segment is empty.
        row[begin : last if after_one and not after_pair else last + 1] = NEVER
    if not after_pair and torch.logsumexp(row[begin:], 0) > row[:begin].max():
        row[:begin] = NEVER  # all timestamps together are likelier than any one word
