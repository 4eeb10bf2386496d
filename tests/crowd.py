"""Clients in threads: some who post a file, some who speak."""

import threading
import time
from dataclasses import dataclass, field

import httpx
import numpy as np

from tests import speech

PACKET = 1600  # samples


@dataclass(eq=False)
class Client(threading.Thread):
    """Transcribes some speech, from a file or in pieces that are spaced as told, and keeps the answer."""

    url: str
    model: str
    samples: np.ndarray
    packet_seconds: float | None = None  # between a speaker's packets; None posts a file
    prompt: str = ""
    stream: bool = False
    status: int = 0
    text: str = ""
    answered_at: float = field(default=0.0)  # time.monotonic()

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    @property
    def live(self) -> bool:
        return self.packet_seconds is not None

    @property
    def error(self) -> bool:
        """Whether the answer is an error, or ends with one."""
        return self.status != 200 or '"error"' in self.text.rsplit("data:", 1)[-1]

    def run(self) -> None:
        url = f"{self.url}/v1/audio/transcriptions"
        if self.packet_seconds is None:
            fields = {"model": self.model, "prompt": self.prompt, "stream": "true" if self.stream else "false"}
            answer = httpx.post(url, data=fields, files={"file": speech.wav(self.samples)}, timeout=300)
        else:
            headers = {"Content-Type": "audio/pcm;rate=16000"}
            params = {"model": self.model, "stream": "true"}
            answer = httpx.post(url, params=params, content=self._packets(self.packet_seconds), headers=headers, timeout=300)
        self.status, self.text, self.answered_at = answer.status_code, answer.text, time.monotonic()

    def _packets(self, seconds: float):
        for start in range(0, len(self.samples), PACKET):
            yield (self.samples[start : start + PACKET] * 32767).astype("<i2").tobytes()
            threading.Event().wait(seconds)


def start(*clients: Client) -> None:
    for client in clients:
        client.start()


def all_answered(clients: list[Client], *, within: float) -> bool:
    """Wait until every client has its answer; say whether it came in time (seconds)."""
    end = time.monotonic() + within
    for client in clients:
        client.join(max(0.0, end - time.monotonic()))
    return not any(client.is_alive() for client in clients)
