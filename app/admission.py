"""How many transcriptions may be in progress. Past the bound a client is refused at once, before any work.

A permit is a parameter of the work, so that unadmitted work cannot be written.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from app.errors import UnavailableError

RETRY_AFTER_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Permit:
    """The right to transcribe one file, for as long as `Admission.admit` is open."""

    number: int


class Admission:
    """Counts the permits that are out."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_progress = 0
        self._issued = 0

    @contextmanager
    def admit(self) -> Iterator[Permit]:
        """Give a permit.

        Raises:
            UnavailableError: when all are out.

        """
        if self.in_progress >= self.limit:
            raise UnavailableError(
                f"All {self.limit} places are taken; come back in a moment.", retry_after=RETRY_AFTER_SECONDS
            )
        self.in_progress += 1
        self._issued += 1
        try:
            yield Permit(self._issued)
        finally:
            self.in_progress -= 1
