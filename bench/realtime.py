"""A client of OpenAI's Realtime transcription over a WebSocket: a speaker's audio in real time, turns that the server finds.

Its sessions are those of the workload `live`, through another door: the same audio at the same times, and the same figures.
"""

import asyncio
import base64
import json
from typing import Any

import aiohttp

from bench.clients import Listener, LiveClient, RequestError
from bench.corpus import Clip
from bench.record import Record

RATE = 24_000  # Hz, the one that OpenAI's own door takes
LAST = "last"  # what the client calls its commit at the end


class RealtimeClient(LiveClient):
    """Workload `realtime`. At the end what is open is committed, and its text waited for."""

    async def _send(self, clip: Clip, record: Record) -> None:
        url = self.url.replace("http", "ws", 1) + "/v1/realtime"
        query = {"intent": "transcription", "model": self.fields["model"]}
        listener = RealtimeListener(record)
        try:
            async with self._http.ws_connect(url, params=query, max_msg_size=0) as socket, asyncio.TaskGroup() as group:
                await socket.send_str(json.dumps({"type": "session.update", "session": self._configuration()}))
                hearing = group.create_task(self._hear(socket, listener))
                async for packet in self._spoken(clip, record, rate=RATE):
                    if hearing.done():
                        break
                    audio = base64.b64encode(packet).decode()
                    await socket.send_str(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
                listener.committing = True
                await socket.send_str(json.dumps({"type": "input_audio_buffer.commit", "event_id": LAST}))
        except aiohttp.WSServerHandshakeError as error:
            raise RequestError(f"http_{error.status}", error.message) from error
        listener.end()

    def _configuration(self) -> dict[str, Any]:
        known = {name: value for name, value in self.fields.items() if name in ("model", "language")}
        given = {
            "format": {"type": "audio/pcm", "rate": RATE},
            "transcription": known,
            "turn_detection": {"type": "semantic_vad"},
        }
        return {"type": "transcription", "audio": {"input": given}}

    async def _hear(self, socket: aiohttp.ClientWebSocketResponse, listener: "RealtimeListener") -> None:
        async for message in socket:
            listener.hear(json.loads(message.data))
            if listener.complete:
                return
        raise RequestError("incomplete", f"the server closed the socket with {socket.close_code}")


class RealtimeListener(Listener):
    """Notes in a record when what was heard of which turn."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self.committing = False  # the client has said that no more comes
        self._refused = False  # nothing was open then
        self._begun: set[str] = set()
        self._committed: list[str] = []
        self._texts: dict[str, str] = {}
        self._last_item = ""

    @property
    def complete(self) -> bool:
        """Whether all that was said has its text."""
        told = self._begun == set(self._committed) == set(self._texts)
        return self.committing and told and (self._refused or bool(self._committed))

    def hear(self, event: dict[str, Any]) -> None:
        """Take an event.

        Raises:
            RequestError: if it tells of one.

        """
        kind, item = str(event.get("type")), str(event.get("item_id"))
        match kind.removeprefix("conversation.item.input_audio_transcription."):
            case "error" if self.committing and event["error"].get("event_id") == LAST:
                self._refused = True
            case "input_audio_buffer.speech_started":
                self._begun.add(item)
            case "input_audio_buffer.committed":
                self._begun.add(item)
                self._committed.append(item)
            case "delta":
                seam = " " if self._last_item not in ("", item) else ""
                self._last_item = item
                super().hear({"type": "transcript.text.delta", "delta": seam + str(event["delta"])})
            case "completed":
                self._texts[item] = str(event["transcript"])
            case "failed":
                raise RequestError("failed", json.dumps(event["error"]))
            case "error":
                super().hear(event)
        if self.complete:
            text = " ".join(self._texts[item] for item in self._committed)
            super().hear({"type": "transcript.text.done", "text": text})
