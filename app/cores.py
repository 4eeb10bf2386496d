"""How many threads may compute at once."""

import asyncio
import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread

P = ParamSpec("P")
T = TypeVar("T")


class Cores:
    """So many threads of the gateway may compute at once. One that waits for bytes to arrive lets another in."""

    def __init__(self, count: int) -> None:
        self._free = threading.Semaphore(count)
        self._threads = anyio.CapacityLimiter(math.inf)  # those that wait for bytes are as many as there are permits

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a worker thread, on a core. A thread cannot be cancelled: who is, waits for its end."""
        work = functools.partial(self._run, function, *args, **kwargs)
        running = asyncio.ensure_future(anyio.to_thread.run_sync(work, limiter=self._threads))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():  # who cancels may do so again and again
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({running})
            if not running.cancelled():
                running.exception()  # nobody wants it any more
            raise

    def _run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._free:
            return function(*args, **kwargs)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Lend the core that this thread has to others."""
        self._free.release()
        try:
            yield
        finally:
            self._free.acquire()
