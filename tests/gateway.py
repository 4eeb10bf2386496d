"""A gateway under test: a real uvicorn on a free port, with its event loop in a thread of its own."""

import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio.from_thread
import openai

from app.server import Server
from app.services import Services, build_services
from app.settings import Settings
from engine.base import Engine

T = TypeVar("T")


class Gateway:
    """What tests hold of it: its parts, its address, and a way into its event loop."""

    def __init__(self, services: Services, url: str, portal: anyio.from_thread.BlockingPortal, server: Server) -> None:
        self.services = services
        self.server = server
        self.url = url
        self._portal = portal

    @property
    def engine(self) -> Engine:
        return self.services.engine

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run a coroutine function in the gateway's event loop, and wait for it."""
        return self._portal.call(function, *args)

    def client(self, **options: Any) -> openai.OpenAI:
        # Without certificates, which nobody shows on the loopback and which take 0.1 s to load.
        http = openai.DefaultHttpxClient(verify=False)
        defaults = {"api_key": "none", "max_retries": 0, "timeout": 600, "http_client": http}
        return openai.OpenAI(base_url=f"{self.url}/v1", **(defaults | options))

    def async_client(self) -> openai.AsyncOpenAI:
        http = openai.DefaultAsyncHttpxClient(verify=False)
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600, http_client=http)


class _Server(Server):
    """Without signals, which come to the main thread only."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def wait_until_idle(gateway: Gateway) -> None:
    """Wait until nothing of what clients asked for is left: no request, permit or session."""
    services = gateway.services
    wait_until(lambda: gateway.engine.requests == services.admission.in_progress == len(services.live.open) == 0)


@contextmanager
def running_gateway(make_engine: Callable[[], Engine], settings: Settings | None = None) -> Iterator[Gateway]:
    """Serve on a free port of the loopback until left."""
    settings = settings or Settings(_env_file=None)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with anyio.from_thread.start_blocking_portal() as portal:

        async def make() -> Services:
            return build_services(settings, make_engine())

        services = portal.call(make)
        server = _Server(services, reload=lambda: None)
        serving = portal.start_task_soon(server.serve, [listener])
        try:
            wait_until(lambda: server.started or serving.done())
            yield Gateway(services, url, portal, server)
        finally:
            server.should_exit = True
            serving.result(timeout=120)


def wait_until(condition: Callable[[], Any], *, seconds: float = 60.0) -> None:
    """Wait for a condition that other threads bring about; fail loudly when it never comes."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s in vain")
        pause.wait(0.01)
