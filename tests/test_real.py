"""Real speech through the whole gateway: uvicorn, the engine, `base` and `tiny.en`.

The right words are those that were spoken, known from the recordings' sources.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import jiwer
import numpy as np
import openai
import psutil
import pytest

from tests import speech
from tests.crowd import Client, all_answered, start
from tests.gateway import Gateway, wait_until
from tests.test_wire import hanging


def real(order: int, *, always: bool = False) -> pytest.MarkDecorator:
    return pytest.mark.real(order=order, always=always)


def word_error_rate(expected: str, heard: str) -> float:
    return jiwer.wer(" ".join(speech.words(expected)), " ".join(speech.words(heard)))


def transcribe(gateway: Gateway, clip: bytes, **fields) -> str:
    return gateway.client().audio.transcriptions.create(model="whisper-1", file=clip, **fields).text


def engine_idle(gateway: Gateway) -> None:
    wait_until(lambda: gateway.engine.requests == gateway.services.admission.in_progress == 0)


# --- base, on the shared gateway --------------------------------------------------------------------------------------


@real(1, always=True)
def test_curl_gets_kennedys_sentence_word_for_word(real_gateway: Gateway):
    clip = speech.jfk()
    url = f"{real_gateway.url}/v1/audio/transcriptions"
    curl = ["curl", "-s", url, "-F", "model=whisper-1", "-F", f"file=@{clip.path}"]
    answer = subprocess.run(curl, check=True, capture_output=True, timeout=600).stdout
    assert speech.words(json.loads(answer)["text"]) == speech.words(clip.words)


@real(1, always=True)
def test_the_sdk_gets_the_same_with_and_without_streaming_sync_and_async(real_gateway: Gateway):
    clip = speech.beckett()
    plain = transcribe(real_gateway, clip.path.read_bytes())
    stream = real_gateway.client().audio.transcriptions.create(model="whisper-1", file=clip.path, stream=True)
    *deltas, done = list(stream)
    assert "".join(delta.delta for delta in deltas) == done.text == plain
    assert len(deltas) > 5

    async def both() -> tuple[str, str]:
        async with real_gateway.async_client() as client:
            create = client.audio.transcriptions.create
            one = (await create(model="whisper-1", file=clip.path)).text
            two = [event async for event in await create(model="whisper-1", file=clip.path, stream=True)]
            return one, two[-1].text

    assert set(asyncio.run(both())) == {plain}
    assert word_error_rate(clip.words, plain) < 0.1


@real(2, always=True)
def test_two_windows_keep_every_word_and_double_none_at_the_seam(real_gateway: Gateway):
    clip = speech.two_cities()
    heard, said = speech.words(transcribe(real_gateway, clip.path.read_bytes())), speech.words(clip.words)
    assert heard[:40] == said[:40]
    assert heard[-40:] == said[-40:]
    assert word_error_rate(clip.words, " ".join(heard)) < 0.05
    too_many = {word: n - Counter(said)[word] for word, n in Counter(heard).items() if n > Counter(said)[word] + 1}
    assert not too_many


SOUNDS = {
    "silence": "trim 0 8",
    "white noise": "synth 8 whitenoise vol 0.1",
    "brown noise": "synth 8 brownnoise vol 0.5",
    "music": "synth 4 pluck C4 pluck E4 pluck G4 remix - vol 0.6 repeat 2",
}


@real(28)
@pytest.mark.parametrize("sound", SOUNDS)
@pytest.mark.parametrize("stream", [False, True])
def test_sound_in_which_nobody_speaks_is_an_empty_text(real_gateway: Gateway, sound: str, stream: bool, tmp_path: Path):
    sox = shutil.which("sox")
    if sox is None:
        pytest.skip("sox is not installed")
    path = tmp_path / "a.wav"
    source = ["-n", "-r", "16000", "-c", "1", str(path)]
    subprocess.run([sox, "-R", *source, *SOUNDS[sound].split()], check=True, capture_output=True, timeout=60)
    assert path.stat().st_size > 16_000 * 2 * 7
    answer = real_gateway.client().audio.transcriptions.create(model="whisper-1", file=path, stream=stream)
    assert (list(answer)[-1] if stream else answer).text == ""


@real(3, always=True)
@pytest.mark.parametrize(
    ("first", "last", "language_words"),
    [
        (0, 30, "permission is hereby granted free of charge to any person obtaining a copy of this software and"),
        (30, 60, "die software zu verwenden"),
    ],
    ids=["english", "german"],
)
def test_each_half_is_heard_in_its_own_language(real_gateway: Gateway, first: int, last: int, language_words: str):
    samples = speech.multilingual().audio.samples[first * speech.RATE : last * speech.RATE]
    text = transcribe(real_gateway, speech.wav(samples))
    assert language_words in " ".join(speech.words(text))


@real(4, always=True)
async def test_eight_clients_at_once_all_get_their_own_words(real_gateway: Gateway):
    whole, said = speech.two_cities().audio.samples, speech.words(speech.two_cities().words)
    beckett = speech.beckett()
    # The first six seconds end after the third clause.
    clips = [(speech.wav(whole[: 6 * speech.RATE]), " ".join(said[:18])), (beckett.path.read_bytes(), beckett.words)] * 4
    async with real_gateway.async_client() as client:
        create = client.audio.transcriptions.create
        heard = await asyncio.gather(*(create(model="whisper-1", file=clip) for clip, _ in clips))
    for (_, expected), transcription in zip(clips, heard, strict=True):
        assert word_error_rate(expected, transcription.text) <= 0.2
    engine_idle(real_gateway)


@real(5, always=True)
@pytest.mark.parametrize("stream", [{}, {"stream": "true"}], ids=["json", "sse"])
def test_a_client_killed_at_half_frees_the_engine(real_gateway: Gateway, stream: dict):
    with hanging(real_gateway, file=speech.two_cities().path.read_bytes(), **stream) as raw:
        if stream:
            while b"transcript.text.delta" not in raw.recv(65536):
                pass
        assert real_gateway.engine.requests > 0
    engine_idle(real_gateway)
    assert "better" in transcribe(real_gateway, speech.beckett().path.read_bytes())


@real(6)
def test_a_prompt_steers_the_spelling_and_does_not_leak(real_gateway: Gateway):
    clip = speech.beckett()
    text = transcribe(real_gateway, clip.path.read_bytes(), prompt="Notes about apples, bridges and candles.")
    assert word_error_rate(clip.words, text) < 0.2
    assert not {"apples", "bridges", "candles", "notes"} & set(speech.words(text))


@real(7)
def test_a_voice_on_the_right_channel_alone_is_heard(real_gateway: Gateway):
    samples = speech.beckett().audio.samples
    right = speech.wav(np.stack([0 * samples, samples], axis=1), channels=2)
    assert word_error_rate(speech.beckett().words, transcribe(real_gateway, right)) < 0.2


@real(10)
def test_the_converted_weights_say_the_same_in_transformers(real_gateway: Gateway):
    import torch
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    from engine.checkpoints import resolve

    folder = resolve("base", real_gateway.services.settings.cache_dir).path
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    processor = WhisperProcessor.from_pretrained(folder)
    samples = speech.two_cities().audio.samples[: 20 * speech.RATE]
    features = processor(samples, sampling_rate=speech.RATE, return_tensors="pt").input_features
    theirs = processor.decode(model.generate(features, language="en", task="transcribe")[0], skip_special_tokens=True)
    ours = transcribe(real_gateway, speech.wav(samples), language="en")
    assert word_error_rate(theirs, ours) <= 0.02


@real(56)
def test_lengths_of_all_kinds_at_once_are_all_answered(real_gateway: Gateway):
    """Probe H06: very short, short, long, silent, and in another language, sixteen at once."""
    long, short = speech.two_cities().audio.samples, speech.beckett().audio.samples
    kinds = [short[:6400], short[:16_000], short, long, np.zeros(5 * 16_000, np.float32)]
    clients = [Client(real_gateway.url, "base", kinds[i % len(kinds)], stream=i % 2 == 0) for i in range(16)]
    start(*clients)
    assert all_answered(clients, within=1200)
    for i, client in enumerate(clients):
        assert client.status == 200
        assert not client.error
        if i % len(kinds) == 4:
            assert '"text":""' in client.text
    engine_idle(real_gateway)
    told = httpx.get(f"{real_gateway.url}/metrics").text
    assert re.search(r"^vllm:num_requests_running\{.*\} 0\.0$", told, flags=re.MULTILINE)
    assert re.search(r'^steno_stage_seconds_count\{kind="file",stage="engine"\} [1-9]', told, flags=re.MULTILINE)


# --- tiny.en, as the command runs it ----------------------------------------------------------------------------------


@contextmanager
def tiny_server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`steno serve` with tiny.en and true lengths, as a process of its own; its URL is read from what it prints."""
    command = [sys.executable, "-m", "app.cli", "serve", "--model", "tiny.en", "--port", "0", "--audio-context", "true"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"NO_COLOR": "1"})
    assert process.stderr is not None
    url = process.stderr.readline().split()[-1]
    try:
        refused = httpx.post(f"{url}/v1/audio/transcriptions", files={"file": b"x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "15")
        for line in process.stderr:
            if line.startswith("Ready"):
                break
        assert httpx.get(f"{url}/health/ready").status_code == 200
        yield process, url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def tiny() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with tiny_server() as server:
        yield server


@real(60)
def test_tiny_en_transcribes_and_knows_only_english(tiny: tuple[subprocess.Popen[str], str]):
    _, url = tiny
    create = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).audio.transcriptions.create
    for clip, bound in ((speech.beckett(), 0.2), (speech.two_cities(), 0.1)):
        assert word_error_rate(clip.words, create(model="tiny.en", file=clip.path).text) <= bound
    with pytest.raises(openai.BadRequestError) as refusal:
        create(model="tiny.en", file=speech.beckett().path, language="de")
    assert refusal.value.param == "language"


@real(61)
def test_a_killed_engine_leaves_nobody_without_an_answer_and_is_built_anew(tiny: tuple[subprocess.Popen[str], str]):
    """Eight speakers and eight files, and kill -9 twice."""
    process, url = tiny
    spoken = speech.two_cities().audio.samples[: 24 * 16_000]
    for _ in range(2):
        speakers = [Client(url, "tiny.en", spoken[i * 800 :], 0.1) for i in range(8)]
        files = [Client(url, "tiny.en", spoken[i * 900 :]) for i in range(8)]
        start(*speakers)
        wait_until(lambda: httpx.get(f"{url}/health/ready").json()["transcriptions"] == 8)
        start(*files)
        wait_until(lambda: httpx.get(f"{url}/health/ready").json()["engine_requests"] >= 8)
        engine = [child for child in psutil.Process(process.pid).children(recursive=True) if "EngineCore" in child.name()]
        assert len(engine) == 1
        engine[0].kill()
        assert all_answered(files, within=60)
        assert all(client.error for client in files)
        assert all_answered(speakers, within=120)
        for speaker in speakers:  # one who was between two utterances meanwhile may go on
            assert speaker.status == 200
            assert speaker.error != ("[DONE]" in speaker.text)
        wait_until(lambda: httpx.get(f"{url}/health/ready").status_code == 200, seconds=900)
        after = Client(url, "tiny.en", speech.beckett().audio.samples)
        after.run()
        assert word_error_rate(speech.beckett().words, json.loads(after.text)["text"]) <= 0.2
    assert process.poll() is None


@real(62)
def test_a_terminated_server_leaves_in_order_and_takes_its_engine_along(tiny: tuple[subprocess.Popen[str], str]):
    process, _ = tiny
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert len(gone) == len(children)


@real(63)
def test_a_killed_server_takes_its_engine_along():
    with tiny_server() as (process, _):
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.kill()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
