"""The decoding rules against openai-whisper's own logit filters, over random histories and logits."""

import random
from types import SimpleNamespace

import pytest
import torch
from whisper.decoding import ApplyTimestampRules, SuppressBlank, SuppressTokens
from whisper.tokenizer import get_tokenizer

from engine.decoding_rules import RequestRules, VocabularyRules, read_logprobs, restrict
from engine.prompts import TokenLayout


def suppressed(layout: TokenLayout) -> list[int]:
    return [1, 2, 7, 50258, 50359, layout.start_of_lm, layout.no_speech]


def vocabulary(size: int) -> VocabularyRules:
    layout = TokenLayout.of_vocabulary(size)
    return VocabularyRules(layout, torch.tensor(suppressed(layout)), torch.tensor([220, layout.end_of_text]))


def random_text(layout: TokenLayout, chance: random.Random) -> list[int]:
    """Make a history that the grammar could have produced: pairs of timestamps, text between."""
    text, time = [], layout.timestamp_begin + chance.randrange(50)
    for _ in range(chance.randrange(4)):
        text.append(time)
        text += [chance.randrange(10, 50_000) for _ in range(chance.randrange(1, 4))]
        time = min(time + chance.randrange(1, 300), layout.size - 1)
        text.append(time)
    return text[: len(text) - chance.randrange(3)] if text else []


def take_figures(row: torch.Tensor, layout: TokenLayout) -> dict[str, torch.Tensor]:
    """Take out what the row carries beside its logits, in the places of two tokens that nobody may choose."""
    figures = {name: row[getattr(layout, name)].clone() for name in ("start_of_lm", "no_speech")}
    for name in figures:
        row[getattr(layout, name)] = -torch.inf
    return figures


@pytest.mark.parametrize("size", [51_864, 51_865])
@pytest.mark.parametrize("timestamps", [True, False])
def test_what_may_come_next_is_what_openai_whisper_allows(size: int, timestamps: bool):
    rules = vocabulary(size)
    layout = rules.layout
    tokenizer = get_tokenizer(layout.multilingual, language="en", task="transcribe")
    chance = random.Random(size + timestamps)
    filters = [
        SuppressBlank(SimpleNamespace(encode=lambda _: [220], eot=layout.end_of_text), 3),
        SuppressTokens(suppressed(layout)),
    ]
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
        take_figures(ours, layout)
        assert torch.equal(ours, theirs[0]), text


def test_forced_steps_leave_only_their_tokens_and_come_before_all_else():
    rules, logits = vocabulary(51_865), torch.randn(51_865)
    request = RequestRules(((50259, 50261), (50359,), (50363,)))
    for step, allowed in enumerate(request.forced):
        row = logits.clone()
        restrict(row, [50259] * step, request, rules)
        take_figures(row, rules.layout)
        assert row.isfinite().nonzero().flatten().tolist() == sorted(allowed)
        assert torch.equal(row[list(allowed)], logits[list(allowed)])


def test_the_end_is_always_open_once_there_is_text():
    rules = vocabulary(51_865)
    chance = random.Random(1)
    for _ in range(200):
        text = random_text(rules.layout, chance)
        row = torch.randn(51_865)
        restrict(row, text, RequestRules(timestamps=True), rules)
        take_figures(row, rules.layout)
        assert row.isfinite().any(), text


@pytest.mark.parametrize("temperature", [0.0, 0.2, 1.0])
def test_log_probabilities_are_those_after_the_rules_and_before_the_temperature(temperature: float):
    rules, chance = vocabulary(51_865), random.Random(2)
    request = RequestRules(((50259, 50261),), timestamps=True)
    for _ in range(50):
        text = random_text(rules.layout, chance)
        raw = torch.randn(51_865) * 5 + chance.choice([-20, 0, 20])
        for decoded in ([], [50259, *text]):
            row = raw.clone()
            restrict(row, decoded, request, rules)
            tempered = row / (temperature or 1.0)
            figures = take_figures(row, rules.layout)
            known = row.log_softmax(0)
            token = int(row.argmax())
            logprob, no_speech = read_logprobs(
                float(tempered[token]),
                total=float(figures["start_of_lm"]) / (temperature or 1.0),
                no_speech=float(figures["no_speech"]) / (temperature or 1.0),
                temperature=temperature,
            )
            assert logprob == pytest.approx(float(known[token]), abs=1e-3)
            if not decoded:
                assert no_speech == pytest.approx(float(raw.log_softmax(0)[rules.layout.no_speech]), abs=1e-3)
            assert max(figures.values()) < float(row.max()) - 40  # never sampled
