"""Who may use the gateway: keys that have names. Only their SHA-256 is kept, and every comparison takes as long.

An entry is `name:key`, a key alone, or `name:sha256:...`, so that a file need not hold the key itself. Unlike passwords,
keys are long and random: nobody can try them all, and one round of a hash is enough.
"""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import RateLimitError

HASHED = re.compile(r"sha256:([0-9a-f]{64})")
NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
LEAST_CHARACTERS = 16
MAX_SECRETS = 10_000

_COMMENT = re.compile(r"(?:^|\s)#")


class KeysError(ValueError):
    """An entry is no key. The message says where, and never what."""


class Keys:
    """The keys that are valid now.

    Args:
        entries: keys that stay.
        file: more of them, a line each, with `#` before a comment, at its begin or after a space; `reload` reads it again.

    Raises:
        KeysError: if an entry is no key, or the file cannot be read.

    """

    def __init__(self, entries: Iterable[str] = (), file: Path | None = None) -> None:
        self._fixed = dict(_parsed(entries, "entry"))
        self._file = file
        self._names: dict[bytes, str] = {}
        self.reload()

    def __bool__(self) -> bool:
        return bool(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str, key: str) -> None:
        """Let one more key be valid, as long as this process runs."""
        self._fixed[_digest(key)] = self._names[_digest(key)] = name

    def reload(self) -> None:
        """Read the file again; if it is not sound, what was valid stays so.

        Raises:
            KeysError: if it is not sound.

        """
        read: dict[bytes, str] = {}
        if self._file is not None:
            try:
                lines = self._file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise KeysError(f"{self._file}: {getattr(error, 'strerror', None) or 'this is no text'}") from error
            read = dict(_parsed((_COMMENT.split(line, maxsplit=1)[0] for line in lines), f"{self._file}, line"))
            if not read:
                raise KeysError(f"{self._file} has no key in it")
        self._names = self._fixed | read

    def has(self, name: str) -> bool:
        """Say whether a key of this name is valid."""
        return name in self._names.values()

    def name_of(self, key: str) -> str | None:
        """Return the name of a key, None if it is not valid. Takes as long whether, and where, it matches."""
        digest, found = _digest(key), None
        for known, name in self._names.items():
            if hmac.compare_digest(known, digest):
                found = name
        return found


@dataclass(frozen=True, slots=True)
class ClientSecret:
    """A key for a short time, that a client's server hands to a browser. `expires_at` is in seconds since the epoch."""

    value: str
    client: str
    expires_at: int
    extra: Any  # what its door wants to know again


class ClientSecrets:
    """The client secrets that are valid now, in memory: a restart ends them all."""

    PREFIX = "ek_"

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._secrets: dict[bytes, ClientSecret] = {}

    def new(self, client: str, seconds: int, *, extra: Any = None) -> ClientSecret:
        """Make a secret for a client.

        Raises:
            RateLimitError: if there are too many.

        """
        if len(self._secrets) >= MAX_SECRETS:
            self._secrets = {digest: secret for digest, secret in self._secrets.items() if secret.expires_at > self._now()}
        if len(self._secrets) >= MAX_SECRETS:
            first = min(secret.expires_at for secret in self._secrets.values())
            raise RateLimitError(
                f"There are {MAX_SECRETS} client secrets that have not expired.", retry_after=int(first - self._now()) + 1
            )
        value = f"{self.PREFIX}{secrets.token_urlsafe(32)}"
        secret = ClientSecret(value, client, int(self._now()) + seconds, extra)
        self._secrets[_digest(value)] = secret
        return secret

    def find(self, value: str) -> ClientSecret | None:
        """Return a secret that has not expired."""
        secret = self._secrets.get(_digest(value))
        return secret if secret is not None and secret.expires_at > self._now() else None


def new_key(name: str) -> tuple[str, str]:
    """Make a key; return it, and the line that makes it valid and does not tell it.

    Raises:
        KeysError: if the name cannot be one.

    """
    if not NAME.fullmatch(name):
        raise KeysError("a name is 1 to 64 letters, digits, or one of . _ @ -")
    key = f"sk-steno-{secrets.token_urlsafe(32)}"
    return key, f"{name}:sha256:{_digest(key).hex()}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _parsed(entries: Iterable[str], where: str) -> Iterator[tuple[bytes, str]]:
    """Yield the digest and the name of each entry; empty ones are passed over."""
    for number, entry in enumerate(map(str.strip, entries), 1):
        if not entry:
            continue
        name, colon, secret = entry.partition(":")
        if not colon:
            name, secret = f"key-{number}", entry
        if not NAME.fullmatch(name):
            raise KeysError(f"{where} {number}: a name is 1 to 64 letters, digits, or one of . _ @ -")
        if not secret.isascii() or not secret.isprintable():
            raise KeysError(f"{where} {number}: a key has ASCII characters only: no header carries others")
        if hashed := HASHED.fullmatch(secret):
            yield bytes.fromhex(hashed[1]), name
        elif len(secret) < LEAST_CHARACTERS or secret.startswith("sha256:"):
            raise KeysError(f"{where} {number}: a key has {LEAST_CHARACTERS} characters or more; `steno key {name}` makes one")
        else:
            yield _digest(secret), name
