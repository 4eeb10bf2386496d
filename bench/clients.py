"""Clients of OpenAI's audio API, one for each workload. They note when what came, and think of nothing else meanwhile."""

import asyncio
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import httpx

from bench.corpus import RATE, Clip
from bench.metrics import changed_words
from bench.record import Record

USER_AGENT = "steno-bench"
MOST_DETAIL = 300  # characters of a failure

Door = Literal["duplex", "session", "realtime"]


class RequestError(Exception):
    """A request that did not succeed: its kind, and what the server said."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind, self.detail = kind, detail[:MOST_DETAIL]


def base_of(url: str) -> str:
    """Return a server's address without `/v1`, for HTTP."""
    plain = f"http{url[2:]}" if url.startswith("ws") else url
    return plain.rstrip("/").removesuffix("/realtime").removesuffix("/v1")


def headers_of(api_key: str) -> dict[str, str]:
    """Return what every request says of itself."""
    return {"User-Agent": USER_AGENT} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})


def _kind_of(error: Exception) -> tuple[str, str]:
    match error:
        case ExceptionGroup():
            return _kind_of(error.exceptions[0])
        case RequestError():
            return error.kind, error.detail
        case TimeoutError():
            return "timeout", ""
        case httpx.HTTPError() | aiohttp.ClientError() | OSError():
            return "connection", f"{type(error).__name__}: {error}"[:MOST_DETAIL]
    raise error


class Client(ABC):
    """Sends clips to one server. Enter it before, leave it after.

    Attributes:
        url: the server's base, without `/v1`.
        fields: of every request, as OpenAI names them.
        timeout: seconds that a request may take, beside its audio's length where that is sent in real time.
        profile: ask for partials and for where the time went, which only Steno knows.
        insecure: take any certificate of an https server.

    """

    def __init__(
        self,
        url: str,
        fields: dict[str, str],
        *,
        api_key: str = "",
        timeout: float = 300.0,
        profile: bool = True,
        insecure: bool = False,
    ) -> None:
        self.profile, self.insecure = profile, insecure
        self.url = base_of(url)
        self.fields = fields
        self.timeout = timeout
        self.headers = headers_of(api_key)

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Open the connections."""

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""

    async def send(self, clip: Clip, record: Record) -> None:
        """Send a clip, and fill in the record. A failure is written into it too, and not raised."""
        try:
            async with asyncio.timeout(self._patience(clip)):
                await self._send(clip, record)
        except (RequestError, TimeoutError, httpx.HTTPError, aiohttp.ClientError, OSError, ExceptionGroup) as error:
            record.error, record.detail = _kind_of(error)
        if record.error or record.ended is None:
            record.ended = time.monotonic()

    def _patience(self, clip: Clip) -> float:
        return self.timeout

    @abstractmethod
    async def _send(self, clip: Clip, record: Record) -> None:
        """Send a clip; raises RequestError, or what the library raises."""


class _UploadClient(Client):
    """Sends the clip as a file, all of it at once."""

    async def __aenter__(self) -> Self:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            headers=self.headers, timeout=None, limits=limits, trust_env=False, verify=not self.insecure
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    def _request(self, clip: Clip, **fields: str) -> httpx.Request:
        return self._http.build_request(
            "POST",
            f"{self.url}/v1/audio/transcriptions",
            data=self.fields | fields,
            files={"file": ("speech.wav", clip.wav, "audio/wav")},
        )


class FileClient(_UploadClient):
    """Workload `file`: upload, and a JSON answer."""

    async def _send(self, clip: Clip, record: Record) -> None:
        request = self._request(clip, response_format="json")
        record.sent = time.monotonic()
        response = await self._http.send(request)
        record.ended = time.monotonic()
        if response.status_code != 200:
            raise RequestError(f"http_{response.status_code}", response.text)
        try:
            body = response.json()
            record.text = str(body["text"]).strip()
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError("no_transcript", response.text) from error
        record.tokens = _output_tokens(body)
        record.server = _server_timing(response.headers.get("server-timing", ""))


class StreamClient(_UploadClient):
    """Workload `stream`: upload, and text as server-sent events."""

    async def _send(self, clip: Clip, record: Record) -> None:
        request = self._request(
            clip, response_format="json", stream="true", **({"include[]": "profile"} if self.profile else {})
        )
        record.sent = time.monotonic()
        response = await self._http.send(request, stream=True)
        try:
            if response.status_code != 200:
                raise RequestError(f"http_{response.status_code}", (await response.aread()).decode(errors="replace"))
            listener = Listener(record)
            async for event in events_of(response.aiter_lines()):
                listener.hear(event)
            listener.end()
        finally:
            await response.aclose()
        record.server = record.server or _server_timing(response.headers.get("server-timing", ""))


class LiveClient(Client):
    """Workload `live`: a speaker's audio in real time, packet by packet, and text meanwhile.

    Packet i is due when its last sample has been spoken, at t0 + (i + 1) * dt: no delay adds up.
    """

    def __init__(
        self,
        url: str,
        fields: dict[str, str],
        *,
        api_key: str = "",
        timeout: float = 300.0,
        profile: bool = True,
        insecure: bool = False,
        packet_seconds: float = 0.1,
        door: Door = "duplex",
    ) -> None:
        super().__init__(url, fields, api_key=api_key, timeout=timeout, profile=profile, insecure=insecure)
        self._packet_seconds = packet_seconds
        self._door = door

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            headers=self.headers,
            connector=aiohttp.TCPConnector(limit=0, ssl=not self.insecure),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    def _patience(self, clip: Clip) -> float:
        return self.timeout + clip.seconds

    async def send(self, clip: Clip, record: Record) -> None:
        """Send a clip, and fill in the record. A speaker who is refused keeps his place for as long as he would have spoken."""
        due = time.monotonic() + clip.seconds
        await super().send(clip, record)
        if not record.ok:
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _send(self, clip: Clip, record: Record) -> None:
        if self._door == "duplex":
            await self._duplex(clip, record)
        else:
            await self._session(clip, record)

    async def _duplex(self, clip: Clip, record: Record) -> None:
        query = [*self.fields.items(), ("stream", "true")]
        query += [("include[]", "partials"), ("include[]", "profile")] * self.profile
        listener = Listener(record)
        async with self._http.post(
            f"{self.url}/v1/audio/transcriptions",
            params=query,
            data=self._spoken(clip, record),
            headers={"Content-Type": f"audio/pcm;rate={RATE}"},
        ) as response:
            if response.status != 200:
                raise RequestError(f"http_{response.status}", await response.text(errors="replace"))
            async for event in events_of(_lines(response.content)):
                listener.hear(event)
        listener.end()

    async def _session(self, clip: Clip, record: Record) -> None:
        body = self.fields | {"content_type": f"audio/pcm;rate={RATE}", "include": ["partials", "profile"]}
        base = f"{self.url}/v1/audio/sessions"
        async with self._http.post(base, json=body) as response:
            if response.status != 201:
                raise RequestError(f"http_{response.status}", await response.text(errors="replace"))
            session = await response.json()
        base = f"{base}/{session['id']}"
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._read_events(session["events_url"], record))
            number = 0
            async for packet in self._spoken(clip, record):
                if reading.done():
                    break
                await self._post(f"{base}/audio?sequence={number}", packet)
                number += 1
            if not reading.done():
                await self._post(f"{base}/stop", b"")

    async def _post(self, url: str, data: bytes) -> None:
        async with self._http.post(url, data=data) as response:
            if response.status >= 400:
                raise RequestError(f"http_{response.status}", await response.text(errors="replace"))

    async def _read_events(self, url: str, record: Record) -> None:
        listener = Listener(record)
        async with self._http.get(url if "://" in url else self.url + url) as response:
            if response.status != 200:
                raise RequestError(f"http_{response.status}", await response.text(errors="replace"))
            async for event in events_of(_lines(response.content)):
                listener.hear(event)
                if event.get("type") == "transcript.text.done":
                    break
        listener.end()

    async def _spoken(self, clip: Clip, record: Record, *, rate: int = RATE) -> AsyncIterator[bytes]:
        """Yield the packets when they are due."""
        samples, size = clip.at(rate), max(1, round(self._packet_seconds * rate))
        record.sent = start = time.monotonic()
        for first in range(0, len(samples), size):
            packet = samples[first : first + size]
            due = start + (first + len(packet)) / rate
            if (ahead := due - time.monotonic()) > 0:
                await asyncio.sleep(ahead)
                record.late.append(time.monotonic() - due)
            else:
                record.held_up = max(record.held_up, -ahead)  # the server did not take the packets before in time
            yield packet.astype("<i2").tobytes()
        record.stopped = time.monotonic()


# --- what is heard --------------------------------------------------------------------------------------------------


class Listener:
    """Notes in a record when what was heard: OpenAI's events, Steno's partials, and vLLM's chunks."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._told: list[str] = []
        self._shown = self._partial = ""
        self._done = False

    def hear(self, event: dict[str, Any]) -> None:
        """Take an event.

        Raises:
            RequestError: if it tells of one.

        """
        record, now = self._record, time.monotonic()
        if record.first_update is None:
            record.first_update = now
        match event:
            case {"error": error} | {"type": "error", "message": error}:
                raise RequestError("stream_error", json.dumps(error))
            case {"type": "transcript.text.delta", "delta": str(text)}:
                self._hear_text(text, now)
            case {"choices": [{"delta": {"content": str(text)}}, *_]}:
                self._hear_text(text, now)
            case {"type": "transcript.text.partial", "text": str(text)}:
                self._hear_partial(text, event.get("seconds"), now)
            case {"type": "transcript.text.done"}:
                self._hear_done(event)
        record.tokens = _output_tokens(event) or record.tokens

    def _hear_text(self, text: str, now: float) -> None:
        self._told.append(text)
        if not text.strip():
            return
        self._mark_text(now)
        if self._record.first_confirmed is None:
            self._record.first_confirmed = now
        self._partial = ""
        self._note(now, "confirmed")

    def _hear_partial(self, text: str, covered: float | None, now: float) -> None:
        record = self._record
        record.partials += 1
        if covered is not None:
            record.lags.append(now - record.sent - covered)
        self._partial = text
        shown = "".join(self._told) + " " + text
        record.taken_back += changed_words(self._shown, shown)
        self._shown = shown
        if text.strip():
            self._mark_text(now)
        self._note(now, "partial")

    def _hear_done(self, event: dict[str, Any]) -> None:
        record = self._record
        self._done = True
        record.text = str(event.get("text", "")).strip()
        if record.partials:
            record.taken_back += changed_words(self._shown, record.text)
        profile = event.get("profile")
        if isinstance(profile, dict):
            record.server = {name: float(value) for name, value in profile.items() if isinstance(value, int | float)}

    def _mark_text(self, now: float) -> None:
        self._record.last_text = now
        if self._record.first_text is None:
            self._record.first_text = now

    def _note(self, now: float, kind: str) -> None:
        if self._record.workload == "live":
            count = len("".join(self._told).split())
            self._record.timeline.append((now - self._record.sent, kind, count + len(self._partial.split())))

    def end(self) -> None:
        """Take the end of the stream.

        Raises:
            RequestError: if something is missing.

        """
        self._record.ended = time.monotonic()
        if not self._done:
            self._record.text = "".join(self._told).strip()  # vLLM has no event for the end
            if not self._told:
                raise RequestError("incomplete", "the stream ended without a transcript")


async def events_of(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """Read server-sent events, up to `[DONE]`. Comments and what is no JSON object are passed over."""
    data: list[str] = []
    async for line in lines:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            text = "\n".join(data)
            data.clear()
            if text == "[DONE]":
                return
            event = _json(text)
            if isinstance(event, dict):
                yield event


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[str]:
    async for line in content:
        yield line.decode(errors="replace").rstrip("\r\n")


def _output_tokens(body: dict[str, Any]) -> int | None:
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return None
    count = usage.get("output_tokens", usage.get("completion_tokens"))
    return count if isinstance(count, int) else None


def _server_timing(header: str) -> dict[str, float]:
    """Read the header `Server-Timing` (W3C): names and milliseconds."""
    return {name: float(ms) for name, ms in re.findall(r"([\w-]+);dur=([\d.]+)", header)}
