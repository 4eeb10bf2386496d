"""A client of the Realtime door, as tests hold it: what it says, and all that it was told."""

import base64
import json
import re
from typing import Any, Self

import numpy as np
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from websockets.sync.client import connect

from tests.gateway import Gateway

PCM16 = {"type": "audio/pcm", "rate": 16000}
KEY_PROTOCOL = "openai-insecure-api-key."
SERVER_EVENT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)  # openai-python's own models


def s16le(samples: np.ndarray) -> bytes:
    """Write float samples as 16-bit integers."""
    return np.round(np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()


class Talk:
    """One connection. Every event that comes is held against openai-python's models."""

    def __init__(self, server: Gateway | str, query: str = "intent=transcription", **options: Any) -> None:
        url = (server if isinstance(server, str) else server.url).replace("http", "ws", 1)
        defaults = {"open_timeout": 60, "max_size": None, "compression": None, "proxy": None, "ping_interval": None}
        self.socket = connect(f"{url}/v1/realtime?{query}", **defaults | options)
        self.told: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, kind: str, **fields: Any) -> None:
        self.socket.send(json.dumps({"type": kind, **fields}))

    def set(self, **fields: Any) -> dict[str, Any]:
        """Change the audio's input, and return the session as it is then."""
        self.say("session.update", session={"type": "transcription", "audio": {"input": fields}})
        return self.until("session.updated")[-1]["session"]

    def append(self, audio: bytes | np.ndarray, **fields: Any) -> None:
        data = audio if isinstance(audio, bytes) else s16le(audio)
        self.say("input_audio_buffer.append", audio=base64.b64encode(data).decode(), **fields)

    def speak(self, audio: np.ndarray, *, packet: int = 1600) -> None:
        for first in range(0, len(audio), packet):
            self.append(audio[first : first + packet])

    def commit(self, **fields: Any) -> None:
        self.say("input_audio_buffer.commit", **fields)

    def next(self, *, timeout: float = 60) -> dict[str, Any]:
        message = self.socket.recv(timeout)
        event = json.loads(message)
        if not event["type"].startswith("transcription_session."):
            # Other rates than 24 kHz are ours: OpenAI's models know one.
            SERVER_EVENT.validate_json(re.sub(r'("audio/pcm","rate":)\d+', r"\g<1>24000", str(message)))
        self.told.append(event)
        return event

    def until(self, kind: str, *, count: int = 1, timeout: float = 60) -> list[dict[str, Any]]:
        """Read up to the event of a kind (its end is enough), and return what came."""
        first = len(self.told)
        for _ in range(count):
            while not self.next(timeout=timeout)["type"].endswith(kind):
                pass
        return self.told[first:]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return what was told of a kind."""
        return [event for event in self.told if event["type"].endswith(kind)]

    @property
    def texts(self) -> list[str]:
        """The completed texts, in the order of the turns."""
        by_item = {event["item_id"]: event["transcript"] for event in self.of(".completed")}
        return [by_item[event["item_id"]] for event in self.of(".committed") if event["item_id"] in by_item]

    def deltas_join(self) -> bool:
        """Say whether each turn's deltas are its text."""
        return all(
            "".join(d["delta"] for d in self.of(".delta") if d["item_id"] == event["item_id"]) == event["transcript"]
            for event in self.of(".completed")
        )
