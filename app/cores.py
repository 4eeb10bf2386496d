"""How many threads may compute at once."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Cores:
    """So many threads of the gateway may compute at once. One that waits for bytes to arrive lets another in."""

    def __init__(self, count: int) -> None:
        self._free = threading.Semaphore(count)

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on a core, waiting for one to be free."""
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
