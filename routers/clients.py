"""A client that leaves: FastAPI does not cancel a handler for it, so work is raced against the disconnect."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

T = TypeVar("T")


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, or cancel it as soon as the client disconnects. The body must have been read.

    Raises:
        ClientDisconnect: when the client left first.

    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for other in (task, watcher):
            other.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
