"""Server-sent events as OpenAI's SDKs read them. The only file that knows sse-starlette.

Data lines only: openai-python's parser breaks on an `id:` line before a comment, on a lone `retry:` and on empty data. While
nothing is to be said, comment pings keep the connection. The stream ends with `[DONE]`, or with one error object and nothing
after it, so that a broken transcript never looks whole. A client that stops reading is left after a while.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any

from sse_starlette import EventSourceResponse
from sse_starlette.sse import AppStatus, SendTimeoutError
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from app.errors import StenoError
from routers.errors import body_of
from routers.media import MAX_DIGITS

logger = logging.getLogger(__name__)

PING_SECONDS = 15
SEND_SECONDS = 60  # a client that takes nothing for so long is asleep, and holds a permit


def event_stream(
    events: AsyncGenerator[dict[str, Any], None], *, client_left: Callable[[], Awaitable[None]], holding: AsyncExitStack
) -> EventSourceResponse:
    """Send each event as JSON.

    Args:
        events: what to send.
        client_left: returns when the client has gone; the request's body may still be arriving, and is not ours to read.
        holding: closed, after the generator, when the stream ends or its client leaves.

    """
    return _EventStream(_encoded(events), client_left, holding)


def numbered_stream(
    events: AsyncGenerator[tuple[int | None, dict[str, Any]], None], *, client_left: Callable[[], Awaitable[None]]
) -> EventSourceResponse:
    """Send events with their numbers as ids, for a browser's EventSource, which comes back with the last one it saw."""

    async def written() -> AsyncIterator[dict[str, str]]:
        async with aclosing(events):
            async for number, event in events:
                yield _data(event) | ({} if number is None else {"id": str(number)})

    return _EventStream(written(), client_left, AsyncExitStack())


def last_number(last_event_id: str | None) -> int | None:
    """Read the number after which an EventSource comes back; None where it names none of ours."""
    known = last_event_id is not None and last_event_id.isdecimal() and len(last_event_id) < MAX_DIGITS
    return int(last_event_id) if last_event_id and known else None


def let_streams_end() -> None:
    """Let a server that stops wait for its event streams: sse-starlette would end them in the middle of their text."""
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]


class _EventStream(EventSourceResponse):
    def __init__(
        self,
        events: AsyncIterator[dict[str, str]],
        client_left: Callable[[], Awaitable[None]],
        holding: AsyncExitStack,
    ) -> None:
        super().__init__(events, ping=PING_SECONDS, sep="\n")
        self._client_left = client_left
        self._holding = holding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_disconnect() -> Message:
            await self._client_left()
            return {"type": "http.disconnect"}

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await send(message)
            except TimeoutError as error:
                raise SendTimeoutError from error

        # Not in the generator: one that is never started never closes what it holds.
        async with self._holding:
            try:
                await super().__call__(scope, receive_disconnect, send_in_time)
            except SendTimeoutError:
                logger.info("the client has stopped reading, and is left")


async def _encoded(events: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[dict[str, str]]:
    async with aclosing(events):
        try:
            async for event in events:
                yield _data(event)
        except StenoError as error:
            yield _data(body_of(error))
        except ClientDisconnect:
            return
        else:
            yield {"data": "[DONE]"}


def _data(value: dict[str, Any]) -> dict[str, str]:
    return {"data": json.dumps(value, ensure_ascii=False, separators=(",", ":"))}
