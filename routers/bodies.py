"""Bodies of requests that are read as a whole."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from app.errors import UploadStalledError, UploadTooLargeError
from routers.forms import refusal_of

M = TypeVar("M", bound=BaseModel)

STALL_SECONDS = 60  # a client that sends nothing for so long is asleep, and holds what others want


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Read a body.

    Raises:
        UploadTooLargeError: as soon as it is known.
        UploadStalledError: when nothing came for a while.
        ClientDisconnect: when the client left.

    """
    data = bytearray()
    async for chunk in unless_stalled(request.stream(), STALL_SECONDS):
        data += chunk
        if len(data) > max_bytes:
            raise UploadTooLargeError(max_bytes, len(data), param="body")
    return bytes(data)


async def unless_stalled(chunks: AsyncIterator[bytes], seconds: float) -> AsyncIterator[bytes]:
    """Pass on what comes, and raise UploadStalledError when nothing has come for so long."""
    while True:
        try:
            async with asyncio.timeout(seconds):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise UploadStalledError(seconds) from error
        yield chunk


async def read_json(request: Request, kind: type[M], *, max_bytes: int) -> M:
    """Read a body that is JSON; an empty one says nothing.

    Raises:
        InvalidInputError: naming the field.
        UploadTooLargeError: if it is larger.

    """
    try:
        return kind.model_validate_json(await read_body(request, max_bytes=max_bytes) or b"{}")
    except ValidationError as error:
        raise refusal_of(error) from error
