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
        self.count = count
        self.busy = self.waiting = 0
        self._counting = threading.Lock()
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
        self._take()
        try:
            return function(*args, **kwargs)
        finally:
            self._give()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Lend the core that this thread has to others."""
        self._give()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        with self._counting:
            self.waiting += 1
        self._free.acquire()
        with self._counting:
            self.waiting -= 1
            self.busy += 1

    def _give(self) -> None:
        with self._counting:
            self.busy -= 1
        self._free.release()
