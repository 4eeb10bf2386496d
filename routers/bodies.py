"""Bodies of requests that are read as a whole."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import Request

from app.errors import UploadStalledError, UploadTooLargeError

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
