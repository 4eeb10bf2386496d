"""A client that leaves: FastAPI does not cancel a handler for it, so work is raced against the disconnect."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


async def disconnected(request: Request) -> None:
    """Wait until the client has disconnected. The body must have been read, or not be wanted."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_client_leaves(client_left: Callable[[], Awaitable[None]], work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, or cancel it as soon as `client_left` returns.

    Raises:
        ClientDisconnect: when the client left first.

    """
    task = asyncio.create_task(work)
    watcher = asyncio.ensure_future(client_left())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for other in (task, watcher):
            other.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
