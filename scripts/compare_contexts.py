"""Compare true-length audio with the whole window: `python scripts/compare_contexts.py base`. It prints a table.

Speech of the bench's corpus is cut at many lengths and at awkward places: in the middle of words, after silence, before
silence, under noise. Each cut is decoded once in the whole window and once for each amount of trailing silence, on one engine,
at temperature 0 and without fallbacks: what the model itself says. Where the words are known (whole clips) the word error rate
is given, elsewhere how far the text differs from the whole window's.
"""

import argparse
import asyncio
import platform
import sys
from collections import defaultdict
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import jiwer
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from app.quality import judge
from app.services import build_engine
from app.settings import Settings
from bench.corpus import RATE, Clip, load_corpus
from bench.metrics import words
from engine import features
from engine.base import DecodeRequest, Engine

LENGTHS = (0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 18.0, 25.0, 29.0)
NOISE = 0.02  # RMS of the noise, of full scale: about 15 dB below speech


@dataclass(frozen=True)
class Cut:
    """Samples to decode; `text` is known for whole clips only."""

    kind: str
    samples: np.ndarray
    text: str | None = None


@dataclass(frozen=True)
class Said:
    """What a decode said."""

    text: str
    looped: bool
    trusted: bool


def cuts(clips: list[Clip], count: int, seed: int) -> list[Cut]:
    """Cut the speech in every way."""
    draws = np.random.default_rng(seed)
    speech = np.concatenate([clip.samples for clip in clips]).astype(np.float32) / 32768
    found = [Cut("whole clip", clip.samples.astype(np.float32) / 32768, clip.text) for clip in clips if clip.text]
    for length in LENGTHS:
        n = int(length * RATE)
        for _ in range(count):
            start = int(draws.integers(0, len(speech) - n))
            found.append(Cut(f"{length:g} s, mid-word", speech[start : start + n]))
    for clip in clips:
        samples = clip.samples.astype(np.float32) / 32768
        if clip.text and clip.seconds < 20:
            quiet = np.zeros(int(draws.uniform(1, 4) * RATE), np.float32)
            found.append(Cut("silence after", np.concatenate([samples, quiet]), clip.text))
            found.append(Cut("silence before", np.concatenate([quiet, samples]), clip.text))
            found.append(
                Cut("under noise", samples + NOISE * draws.standard_normal(len(samples)).astype(np.float32), clip.text)
            )
    return found


async def say(engine: Engine, cut: Cut, name: str, whole: bool) -> Said:
    """Decode a cut."""
    request = DecodeRequest(id=name, samples=cut.samples, language="en", audio_context="full" if whole else "true")
    async for delta in engine.transcribe(request):
        if delta.outcome is not None:
            text = "".join(segment.text for segment in delta.outcome.segments)
            looped = delta.outcome.finish_reason == "repetition"
            outcome = delta.outcome
            verdict = judge(text, avg_logprob=outcome.avg_logprob, no_speech_prob=outcome.no_speech_prob, looped=looped)
            return Said(text, looped, verdict == "good")
    raise AssertionError("a decode ends with its outcome")


async def run(model: str, slacks: list[tuple[int, int]], count: int, seed: int) -> None:
    """Decode everything, and print the table."""
    settings = Settings(_env_file=None, model=model)
    found = cuts(load_corpus(None), count, seed)
    async with build_engine(settings) as engine:
        await engine.wait_ready()
        print(f"{model}, {engine.device}; {platform.processor() or platform.machine()}; {date.today()}; seed {seed}")
        gate = asyncio.Semaphore(8)

        async def one(i: int, name: str, whole: bool) -> Said:
            async with gate:
                return await say(engine, found[i], f"{name}-{i}", whole)

        said: dict[str, list[Said]] = {}
        said["whole window"] = await asyncio.gather(*(one(i, "whole", True) for i in range(len(found))))
        for trailing, step in slacks:
            features.TRAILING_POSITIONS, features.POSITION_STEP = trailing, step
            name = f"{trailing * 0.02:.2f} s, steps of {step * 0.02:.1f} s"
            said[name] = await asyncio.gather(*(one(i, f"true{trailing}-{step}", False) for i in range(len(found))))
    table(found, said)


def table(found: list[Cut], said: dict[str, list[Said]]) -> None:
    """Print, for each kind of cut and each context: error rate, difference from the whole window, loops, distrust."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for i, cut in enumerate(found):
        kinds[cut.kind].append(i)
    print("| cut | n | context | WER | differs from the whole window | same words | loops | distrusted |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    kinds["all"] = list(range(len(found)))
    for kind, indices in kinds.items():
        for name, texts in said.items():
            known = [(words(found[i].text or ""), words(texts[i].text)) for i in indices if found[i].text]
            pairs = [(words(said["whole window"][i].text), words(texts[i].text)) for i in indices]
            spoken = [pair for pair in pairs if pair[0]]
            wer = f"{jiwer.wer([a for a, _ in known], [b for _, b in known]):.1%}" if known else "-"
            differs = f"{jiwer.wer([a for a, _ in spoken], [b for _, b in spoken]):.1%}" if spoken else "-"
            same = sum(a == b for a, b in pairs)
            loops, distrusted = sum(texts[i].looped for i in indices), sum(not texts[i].trusted for i in indices)
            print(f"| {kind} | {len(indices)} | {name} | {wer} | {differs} | {same} | {loops} | {distrusted} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="base")
    parser.add_argument("--count", type=int, default=8, help="cuts of each length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slack", default="64:25,32:25,128:25", help="trailing:step, in positions of 20 ms")
    given = parser.parse_args()
    pairs = [(int(a), int(b)) for a, _, b in (part.partition(":") for part in given.slack.split(","))]
    asyncio.run(run(given.model, pairs, given.count, given.seed))
