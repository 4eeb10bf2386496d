"""LiveKit's OpenAI plugin as a judge: speak a WAV file in real time, print what it was told. `livekit_stt.py URL FILE`."""

import asyncio
import json
import sys
import time
import wave

from livekit import rtc
from livekit.agents import utils
from livekit.plugins import openai

PACKET_SECONDS = 0.05


async def main(url: str, path: str) -> None:
    with wave.open(path) as file:
        rate, data = file.getframerate(), file.readframes(file.getnframes())
    async with utils.http_context.open():
        engine = openai.STT(base_url=f"{url}/v1", api_key="none", model="gpt-4o-mini-transcribe", use_realtime=True)
        stream = engine.stream()
        told: list[list] = []
        open_turns, news = 0, asyncio.Event()

        async def listen() -> None:
            nonlocal open_turns
            async for event in stream:
                kind = event.type.value
                told.append([kind, event.alternatives[0].text if event.alternatives else "", speaking.done()])
                open_turns += (kind == "start_of_speech") - (kind == "recognition_usage")
                news.set()

        speaking, listening = asyncio.create_task(speak(stream, data, rate)), asyncio.create_task(listen())
        await speaking
        while open_turns:
            news.clear()
            await news.wait()
        listening.cancel()
        await stream.aclose()
        await engine.aclose()
    print(json.dumps(told))


async def speak(stream: openai.stt.SpeechStream, data: bytes, rate: int) -> None:
    began, size = time.monotonic(), 2 * round(PACKET_SECONDS * rate)
    for i, first in enumerate(range(0, len(data), size)):
        await asyncio.sleep(max(0.0, began + i * PACKET_SECONDS - time.monotonic()))
        packet = data[first : first + size]
        stream.push_frame(rtc.AudioFrame(packet, rate, 1, len(packet) // 2))


asyncio.run(asyncio.wait_for(main(*sys.argv[1:]), 300))
