"""Server-sent events as OpenAI's SDKs read them. The only file that knows sse-starlette.

Data lines only: openai-python's parser breaks on an `id:` line before a comment, on a lone `retry:` and on empty data. While
nothing is to be said, comment pings keep the connection. The stream ends with `[DONE]`, or with one error object and nothing
after it, so that a broken transcript never looks whole. A client that stops reading is left after a while.
"""

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing
from typing import Any

from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from app.errors import StenoError
from routers.errors import body_of

logger = logging.getLogger(__name__)

PING_SECONDS = 15
SEND_SECONDS = 60  # a client that takes nothing for so long is asleep, and holds a permit


def event_stream(events: AsyncGenerator[dict[str, Any], None], *, holding: ExitStack) -> EventSourceResponse:
    """Send each event as JSON. When the stream ends, or its client leaves, the generator and `holding` are closed."""
    return _EventStream(events, holding)


class _EventStream(EventSourceResponse):
    def __init__(self, events: AsyncGenerator[dict[str, Any], None], holding: ExitStack) -> None:
        super().__init__(_encoded(events), ping=PING_SECONDS, send_timeout=SEND_SECONDS, sep="\n")
        self._holding = holding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in the generator: one that is never started never closes what it holds.
        with self._holding:
            try:
                await super().__call__(scope, receive, send)
            except SendTimeoutError:
                logger.info("%s: the client has stopped reading, and is left", scope["state"]["request_id"])


async def _encoded(events: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[dict[str, str]]:
    async with aclosing(events):
        try:
            async for event in events:
                yield _data(event)
        except StenoError as error:
            yield _data(body_of(error))
        else:
            yield {"data": "[DONE]"}


def _data(value: dict[str, Any]) -> dict[str, str]:
    return {"data": json.dumps(value, ensure_ascii=False, separators=(",", ":"))}
