"""Uvicorn as Steno runs it: how it stops, what it waits for, and how large a request's head may be.

A first SIGTERM or SIGINT stops the gateway in order: it listens no more, whoever speaks gets his text, whatever is in progress
may end within the grace period, and what has not ended then is told so. A second one ends the process at once.
"""

import asyncio
import json
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from app.main import create_app
from app.services import Services
from routers.errors import error_body
from routers.sse import let_streams_end

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75  # longer than clients and proxies keep idle connections: a POST into a closing one is lost
FAREWELL_SECONDS = 10  # for those who are told, at the end of the grace period, that there will be no more
HEAD_SECONDS = 30  # in which a request's head must have come
MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 200
ENOUGH_DESCRIPTORS = 65_536
SHARE_OF_DESCRIPTORS = 0.8  # that connections may take: files, the engine and the bench need some too
PING_SECONDS = 20  # between pings of a WebSocket, and for their answers: proxies cut what is idle for 60
MAX_MESSAGE_BYTES = 16 << 20  # of a WebSocket: 15 MiB of base64 in its event
MAX_FRAGMENTS = 10_000  # of a message
LINGER_SECONDS = 30  # for a client that still sends a body, and reads its answer after it
HUSH_SECONDS = 1  # of silence after which a client has heard why its WebSocket is closed


class GuardedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with bounds. Uvicorn itself lets a request's head be as long as it likes, and take as long."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._in_body = False
        self._bytes = 0  # that came since the last of a body: of a head, or of what may follow a body
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a head, not for ever; or hang up, where there are too many connections."""
        super().connection_made(transport)
        if len(self.connections) > _most_connections():
            transport.close()
        self._close_in(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._calm_down()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, unless the head is too long; and never wait for ever for the next one."""
        self._bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self.transport.get_protocol() is not self:  # it has become a WebSocket
            return
        if self._bytes > MAX_HEAD_BYTES:
            if self._in_head:
                self._refuse_head()
            else:  # trailers without an end
                self.transport.close()
        answered = self.cycle is None or self.cycle.response_complete
        if self._in_head and answered and not (self._deadline or self.timeout_keep_alive_task):
            self._close_in(HEAD_SECONDS)

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        if not self._deadline:
            self._close_in(HEAD_SECONDS)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, unless there are too many."""
        if len(self.headers) >= MAX_HEADERS:
            self._refuse_head()
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End a head."""
        self._calm_down()
        self._in_head, self._in_body, self._bytes = False, True, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        self._bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a body."""
        self._in_head, self._in_body, self._bytes = True, False, 0
        self._calm_down()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Leave a client that still sends what is not wanted any more: soon, for at once it could not read its answer."""
        sends_on = self._in_body and not self.pipeline
        super().on_response_complete()
        if sends_on:
            self._close_in(LINGER_SECONDS)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        if not self.transport.is_closing():
            self._refuse(400, "Bad Request", msg)

    def _refuse_head(self) -> None:
        self._refuse(431, "Request Header Fields Too Large", f"A request's head is at most {MAX_HEAD_BYTES} bytes long.")

    def _refuse(self, status: int, reason: str, message: str) -> None:
        body = json.dumps(error_body(message, "invalid_request_error")).encode()
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def _close_in(self, seconds: float) -> None:
        self._calm_down()
        self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _calm_down(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class GuardedWebSocket(WebSocketsSansIOProtocol):
    """A WebSocket that is left when its client is gone, and not before.

    Uvicorn itself leaves who does not answer a ping in time, though the answer may stand behind audio that the session has no
    room for yet; and closes every socket at once when the server stops, though a text may still come.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Their own lines have addresses with queries, and at the debug level all headers: keys.
        self.logger = logger.getChild("websocket")
        self.logger.setLevel(logging.WARNING)
        self.conn.logger, self.conn.debug = self.logger, False
        self._heard_at = 0.0
        self._failed = False

    def data_received(self, data: bytes) -> None:
        """Take what came; nothing more of a client that broke the protocol."""
        self._heard_at = self.loop.time()
        if self._failed:
            self._close_in_silence()
        else:
            super().data_received(data)

    def handle_cont(self, event: Frame) -> None:
        """Take a part of a message, unless there are too many."""
        if len(self.frames) >= MAX_FRAGMENTS:
            self.conn.fail(1009, "too many fragments")
            self.handle_parser_exception()
        else:
            super().handle_cont(event)

    def handle_parser_exception(self) -> None:
        """Say what was wrong, and read on: were the connection closed at once, a client that still sends could not hear it."""
        if self.close_sent:
            return
        self._failed = self.close_sent = True
        self.frames = []
        if (sent := self.conn.close_sent) is not None:
            self.queue.put_nowait({"type": "websocket.disconnect", "code": sent.code, "reason": sent.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self._close_in_silence()

    def _close_in_silence(self) -> None:
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(HUSH_SECONDS, self.transport.close)

    async def send(self, message: Any) -> None:
        """Send what the application says. Uvicorn takes a refused handshake for one that nobody answered, and logs an error.

        Raises:
            ClientDisconnected: if the connection is at its end, which the application may not have heard yet.

        """
        await self.writable.wait()
        if self.close_sent and message["type"] == "websocket.send":
            raise ClientDisconnected
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True

    def keepalive_timeout(self) -> None:
        """Leave a client that has not answered a ping, nor said anything since; one that is not being read has time."""
        if self.read_paused or self._heard_at > self.ping_sent_at:
            self.pong_timer = None
            self.schedule_ping()
        else:
            super().keepalive_timeout()

    def shutdown(self) -> None:
        """Let a session that is being told its last text come to its end."""
        if self.close_sent or not self.handshake_complete:
            super().shutdown()

    def on_task_complete(self, task: "asyncio.Task[None]") -> None:
        """Let go of a client that does not read: a close would wait for it to take what is written."""
        super().on_task_complete(task)
        self.loop.call_later(FAREWELL_SECONDS, self.transport.abort)


def _most_connections() -> int:
    return int(SHARE_OF_DESCRIPTORS * resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def raise_descriptor_limit() -> None:
    """Take more descriptors, as far as the system lets this process: each connection is one, and the usual limit is 1,024."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = ENOUGH_DESCRIPTORS if most == resource.RLIM_INFINITY else min(ENOUGH_DESCRIPTORS, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, enough), most))


class Server(uvicorn.Server):
    """Serves a gateway until it is told to stop.

    Args:
        services: the gateway's parts.
        reload: called on SIGHUP.

    """

    def __init__(self, services: Services, reload: Callable[[], None]) -> None:
        let_streams_end()
        self._services, self._reload = services, reload
        self._grace_seconds = services.settings.shutdown_grace_seconds
        super().__init__(
            uvicorn.Config(
                create_app(services),
                http=GuardedProtocol,
                ws=GuardedWebSocket,
                ws_max_size=MAX_MESSAGE_BYTES,
                ws_ping_interval=PING_SECONDS,
                ws_ping_timeout=PING_SECONDS,
                ws_per_message_deflate=False,  # speech does not compress, and a small message could be a large one
                ssl_certfile=services.settings.tls_cert,
                ssl_keyfile=services.settings.tls_key,
                log_config=None,
                access_log=False,  # the gateway writes its own
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(self._grace_seconds) + FAREWELL_SECONDS,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals. Uvicorn raises them once more after all has ended, and a clean stop would not exit with 0."""
        loop = asyncio.get_running_loop()
        for sent in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sent, self.handle_exit, sent, None)
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop in order, or at once if that has begun."""
        if self.should_exit:
            logger.warning("told to stop once more: ending at once, with %d in progress", self._services.admission.in_progress)
            os._exit(128 + sig)
        self.should_exit = True
        logger.info("stopping, with %d in progress", self._services.admission.in_progress)
        self._services.live.drain()  # whoever still speaks gets his text
        asyncio.get_running_loop().call_later(self._grace_seconds, self._give_up)

    def _give_up(self) -> None:
        if left := self._services.admission.in_progress:
            logger.warning("%d have not ended within %g s, and are told so", left, self._grace_seconds)
            self._services.engine.kill()
