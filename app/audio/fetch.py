"""Fetch audio from an address that a client names.

The address comes from a stranger, so every connection is checked where it is made, those of redirects included: it must lead
to a public address. Size and time are bounded.
"""

import asyncio
import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from app.audio.arriving import ArrivingFile
from app.errors import InvalidInputError, UploadTooLargeError

MAX_REDIRECTS = 3
# IPv6 that stands for an IPv4 address, which may be private (NAT64, 6to4, Teredo, the compatible ones), and site-local.
_EMBEDDING = [
    ipaddress.ip_network(network)
    for network in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96", "fec0::/10")
]
CHUNK_BYTES = 256 * 1024


class Fetcher:
    """Downloads files over HTTP.

    Args:
        max_bytes: the largest file.
        seconds: the longest download.
        private: whether addresses that are not public may be fetched from.

    """

    def __init__(self, *, max_bytes: int, seconds: float, private: bool = False) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._private = private

    async def fetch(self, url: str, file: ArrivingFile) -> None:
        """Write what lies at `url` into `file`, as it comes, and finish it.

        Raises:
            InvalidInputError: if nothing can be fetched from there.
            UploadTooLargeError: as soon as it is known.

        """
        try:
            if urlsplit(url).scheme not in ("http", "https"):
                raise _refusal("its scheme is not http or https")
            async with (
                asyncio.timeout(self._seconds),
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=self._socket)) as session,
                session.get(url, max_redirects=MAX_REDIRECTS) as response,
            ):
                if response.status != 200:
                    raise _refusal(f"it answers with status {response.status}")
                if (response.content_length or 0) > self._max_bytes:
                    raise UploadTooLargeError(self._max_bytes, response.content_length, param="url")
                async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                    if file.size + len(chunk) > self._max_bytes:
                        raise UploadTooLargeError(self._max_bytes, file.size + len(chunk), param="url")
                    await asyncio.to_thread(file.write, chunk)
        except TimeoutError as error:
            raise _refusal(f"it takes longer than {self._seconds:g} seconds") from error
        except aiohttp.TooManyRedirects as error:
            raise _refusal("it leads to too many others") from error
        except (aiohttp.ClientError, ValueError, OSError) as error:
            raise _refusal("there is no answer from a public address") from error
        file.finish()

    def _socket(self, address: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, _, endpoint = address
        host = ipaddress.ip_address(endpoint[0].split("%")[0])
        is_public = host.is_global and not host.is_multicast and not any(host in network for network in _EMBEDDING)
        if not self._private and not is_public:
            raise OSError("not a public address")
        return socket.socket(family, kind, protocol)


def _refusal(reason: str) -> InvalidInputError:
    return InvalidInputError(f"The audio cannot be fetched from its url: {reason}.", param="url", code="invalid_value")
