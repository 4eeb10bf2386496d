"""The Realtime door on the real engine, judged by OpenAI's own client and the frameworks of those who build voice agents."""

import asyncio
import base64
import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import jiwer
import numpy as np
import pytest
from whisper.normalizers import EnglishTextNormalizer

from tests import speech
from tests.gateway import Gateway
from tests.talking import s16le
from tests.test_real import real

JUDGES = Path(__file__).parent / "judges"
RATE = 24_000
SILENCE_SECONDS = 1.5  # after the last word, so that the server finds its end


def rate_of(clip: speech.Clip, text: str) -> float:
    normalise = EnglishTextNormalizer()
    return jiwer.wer(normalise(clip.words), normalise(text))


@real(5)
async def test_text_comes_while_somebody_speaks_and_its_turns_join_to_what_the_file_says(real_gateway: Gateway):
    clip = speech.two_cities()
    samples = speech.decode(clip.path.read_bytes(), rate=RATE).samples
    client = real_gateway.async_client()
    file = await client.audio.transcriptions.create(model="whisper-1", file=clip.path, language="en")
    told: list = []
    async with client.realtime.connect(model="whisper-1", extra_query={"intent": "transcription"}) as connection:
        given = {"transcription": {"model": "whisper-1", "language": "en"}}
        await connection.session.update(session={"type": "transcription", "audio": {"input": given}})

        async def speak() -> None:
            packet, began = RATE // 10, time.monotonic()
            whole = np.concatenate([samples, np.zeros(int(SILENCE_SECONDS * RATE), np.float32)])
            for first in range(0, len(whole), packet):
                await asyncio.sleep(max(0.0, began + first / RATE - time.monotonic()))
                audio = base64.b64encode(s16le(whole[first : first + packet])).decode()
                await connection.input_audio_buffer.append(audio=audio)

        open_turns, news = 0, asyncio.Event()

        async def read() -> None:
            nonlocal open_turns
            async for event in connection:
                told.append((event, speaking.done()))
                assert event.type != "error", event
                open_turns += event.type.endswith("speech_started") - event.type.endswith("transcription.completed")
                news.set()

        speaking, reading = asyncio.create_task(speak()), asyncio.create_task(read())
        await speaking
        while open_turns and not reading.done():
            news.clear()
            await asyncio.wait({reading, waiting := asyncio.create_task(news.wait())}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        reading.cancel()
        assert not open_turns
    of = {
        kind: [e for e, _ in told if e.type.endswith(kind)]
        for kind in ("session.created", "speech_started", "committed", "transcription.delta", "transcription.completed")
    }
    items = [event.item_id for event in of["committed"]]
    assert [event.previous_item_id for event in of["committed"]] == [None, *items[:-1]]
    assert len(items) == len(of["speech_started"]) == len(of["transcription.completed"]) >= 4
    texts = {event.item_id: event.transcript for event in of["transcription.completed"]}
    for item in items:
        assert "".join(e.delta for e in of["transcription.delta"] if e.item_id == item) == texts[item]
    deltas = [done for event, done in told if event.type.endswith("transcription.delta")]
    assert deltas.count(False) > len(deltas) / 2  # came while he spoke
    assert sum(event.usage.seconds for event in of["transcription.completed"]) <= len(samples) / RATE + SILENCE_SECONDS
    rates = rate_of(clip, file.text), rate_of(clip, " ".join(texts[item] for item in items))
    print(f"\n{len(items)} turns, {len(deltas)} deltas; WER of the file {rates[0]:.3f}, of the turns {rates[1]:.3f}")
    assert rates[1] <= rates[0] + 0.03


@cache
def python_with(package: str) -> Path:
    """Install a judge into an environment of its own, and return its Python."""
    folder = JUDGES / ".venv" / package.split("==", maxsplit=1)[0].split("[", maxsplit=1)[0]
    python, uv = folder / "bin" / "python", Path(sys.executable).with_name("uv")
    if not python.exists():
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    installing = [uv, "pip", "install", "--quiet", "--python", python, package]
    installed = subprocess.run(installing, capture_output=True, text=True, timeout=600, check=False)
    if installed.returncode:
        pytest.skip(f"{package} cannot be installed here: {installed.stderr[-300:]}")
    return python


def judged(package: str, script: str, gateway: Gateway, folder: Path, *arguments: str) -> list:
    """Let a judge speak Beckett's sentences, and return what it was told."""
    python = python_with(package)
    samples = speech.decode(speech.beckett().path.read_bytes(), rate=RATE).samples
    silence = np.zeros(int(SILENCE_SECONDS * RATE), np.float32)
    path = folder / "beckett.wav"
    path.write_bytes(speech.wav(np.concatenate([samples, silence]), rate=RATE))
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    ran = subprocess.run(
        [python, JUDGES / script, gateway.url, path, *arguments],
        capture_output=True, text=True, timeout=600, env=own, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@real(27)
def test_livekits_plugin_hears_every_sentence(real_gateway: Gateway, tmp_path: Path):
    told = judged("livekit-plugins-openai==1.8.9", "livekit_stt.py", real_gateway, tmp_path)
    kinds = [kind for kind, _, _ in told]
    finals = [text for kind, text, _ in told if kind == "final_transcript"]
    assert kinds.count("start_of_speech") == kinds.count("end_of_speech") == kinds.count("recognition_usage") >= 3
    assert rate_of(speech.beckett(), " ".join(finals)) <= 0.2
    assert [spoken for kind, _, spoken in told if kind == "final_transcript"].count(False) >= 2  # while he spoke


@real(28)
@pytest.mark.parametrize("turns", ["server", "client"])
def test_pipecats_service_hears_every_sentence(real_gateway: Gateway, tmp_path: Path, turns: str):
    told = judged("pipecat-ai[openai]==1.14.0", "pipecat_stt.py", real_gateway, tmp_path, turns)
    finals = [text for kind, text, _ in told if kind == "TranscriptionFrame"]
    assert not [text for kind, text, _ in told if kind == "ErrorFrame"]
    assert rate_of(speech.beckett(), " ".join(finals)) <= 0.2
    assert [spoken for kind, _, spoken in told if kind == "InterimTranscriptionFrame"].count(False) >= 2
    assert (len(finals) == 1) == (turns == "client")
