"""Pipecat's OpenAI service as a judge: speak a WAV file in real time, print what it was told. `pipecat_stt.py URL FILE TURNS`.

TURNS is `server`, or `client` for one turn that the pipeline ends itself.
"""

import asyncio
import json
import sys
import time
import wave
from collections import Counter

from loguru import logger
from pipecat.frames.frames import EndFrame, Frame, InputAudioRawFrame, VADUserStoppedSpeakingFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.stt import OpenAIRealtimeSTTService

PACKET_SECONDS = 0.02


class Keeper(FrameProcessor):
    """Keeps the frames that tell what was heard."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[list] = []
        self.spoken = False
        self.news = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        kind = type(frame).__name__
        if "Transcription" in kind or "Error" in kind or kind.startswith("ProposedUser"):
            self.told.append([kind, str(getattr(frame, "text", getattr(frame, "error", ""))), self.spoken])
            self.news.set()
        await self.push_frame(frame, direction)

    def complete(self, *, turns_of_server: bool) -> bool:
        counts = Counter(kind for kind, _, _ in self.told)
        begun = counts["ProposedUserStartedSpeakingFrame"] if turns_of_server else 1
        return self.spoken and counts["TranscriptionFrame"] >= begun


async def main(url: str, path: str, turns: str) -> None:
    with wave.open(path) as file:
        rate, data = file.getframerate(), file.readframes(file.getnframes())
    service = OpenAIRealtimeSTTService(
        api_key="none",
        base_url=url.replace("http", "ws", 1) + "/v1/realtime",
        turn_detection={"type": "server_vad"} if turns == "server" else False,
        settings=OpenAIRealtimeSTTService.Settings(model="gpt-realtime-whisper"),
    )
    keeper = Keeper()
    task = PipelineTask(Pipeline([service, keeper]), params=PipelineParams(audio_in_sample_rate=rate))

    async def speak() -> None:
        while not service._session_ready:  # noqa: ASYNC110 - its own flag
            await asyncio.sleep(0.05)
        began, size = time.monotonic(), 2 * round(PACKET_SECONDS * rate)
        for i, first in enumerate(range(0, len(data), size)):
            await asyncio.sleep(max(0.0, began + i * PACKET_SECONDS - time.monotonic()))
            await task.queue_frame(InputAudioRawFrame(data[first : first + size], sample_rate=rate, num_channels=1))
        keeper.spoken = True
        if turns == "client":
            await task.queue_frame(VADUserStoppedSpeakingFrame())
        while not keeper.complete(turns_of_server=turns == "server"):
            keeper.news.clear()
            await keeper.news.wait()
        await task.queue_frame(EndFrame())

    await asyncio.gather(PipelineRunner(handle_sigint=False).run(task), speak())
    print(json.dumps(keeper.told))


logger.remove()
asyncio.run(asyncio.wait_for(main(*sys.argv[1:]), 300))
