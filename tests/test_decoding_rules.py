"""The decoding rules against openai-whisper's own logit filters, over random histories and logits."""

import random
from types import SimpleNamespace

import pytest
import torch
from whisper.decoding import ApplyTimestampRules, SuppressBlank, SuppressTokens
from whisper.tokenizer import get_tokenizer

from engine.decoding_rules import RequestRules, VocabularyRules, restrict
from engine.prompts import TokenLayout

SUPPRESSED = [1, 2, 7, 50258, 50359, 50362]


def vocabulary(size: int) -> VocabularyRules:
    layout = TokenLayout.of_vocabulary(size)
    return VocabularyRules(layout, torch.tensor(SUPPRESSED), torch.tensor([220, layout.end_of_text]))


def random_text(layout: TokenLayout, chance: random.Random) -> list[int]:
    """Make a history that the grammar could have produced: pairs of timestamps, text between."""
    text, time = [], layout.timestamp_begin + chance.randrange(50)
    for _ in range(chance.randrange(4)):
        text.append(time)
        text += [chance.randrange(10, 50_000) for _ in range(chance.randrange(1, 4))]
        time = min(time + chance.randrange(1, 300), layout.size - 1)
        text.append(time)
    return text[: len(text) - chance.randrange(3)] if text else []


@pytest.mark.parametrize("size", [51_864, 51_865])
@pytest.mark.parametrize("timestamps", [True, False])
def test_what_may_come_next_is_what_openai_whisper_allows(size: int, timestamps: bool):
    rules = vocabulary(size)
    layout = rules.layout
    tokenizer = get_tokenizer(layout.multilingual, language="en", task="transcribe")
    chance = random.Random(size + timestamps)
    filters = [SuppressBlank(SimpleNamespace(encode=lambda _: [220], eot=layout.end_of_text), 3), SuppressTokens(SUPPRESSED)]
    if timestamps:
        filters.append(ApplyTimestampRules(tokenizer, 3, max_initial_timestamp_index=50))
    for _ in range(150):
        text = random_text(layout, chance) if timestamps else [chance.randrange(10, 50_000) for _ in range(chance.randrange(4))]
        logits = torch.randn(1, size) * 3
        logits[0, layout.timestamp_begin :] += chance.choice([-9.0, 0.0, 3.0])
        ours, theirs = logits[0].clone(), logits.clone()
        for logit_filter in filters:
            logit_filter.apply(theirs, torch.tensor([[9, 9, 9, *text]]))
        if not timestamps:
            theirs[0, layout.timestamp_begin :] = -torch.inf  # theirs leaves these to the model's habit
        elif theirs[0, layout.no_timestamps].isneginf():
            ours[layout.no_timestamps] = -torch.inf  # the adapters suppress it; so does their filter
        restrict(ours, [5, 5, *text], RequestRules(((5,), (5,)), timestamps), rules)
        assert torch.equal(ours, theirs[0]), text


def test_forced_steps_leave_only_their_tokens_and_come_before_all_else():
    rules, logits = vocabulary(51_865), torch.randn(51_865)
    request = RequestRules(((50259, 50261), (50359,), (50363,)))
    for step, allowed in enumerate(request.forced):
        row = logits.clone()
        restrict(row, [50259] * step, request, rules)
        assert row.isfinite().nonzero().flatten().tolist() == sorted(allowed)
        assert torch.equal(row[list(allowed)], logits[list(allowed)])


def test_the_end_is_always_open_once_there_is_text():
    rules = vocabulary(51_865)
    chance = random.Random(1)
    for _ in range(200):
        text = random_text(rules.layout, chance)
        row = torch.randn(51_865)
        restrict(row, text, RequestRules(timestamps=True), rules)
        assert row.isfinite().any(), text
