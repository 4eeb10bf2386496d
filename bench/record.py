"""What a client saw of one request or live session."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path


@dataclass(slots=True)
class Record:
    """One request. Times in seconds on the client's monotonic clock, from the run's start; None is what did not happen.

    Attributes:
        intended: in an open load, when it should have begun.
        sent: when it did; of a live session, when its speaker began.
        stopped: when the last of its audio was sent.
        first_update, first_text, first_confirmed: the first event, the first with text, the first text that stays.
        last_text: the last new text.
        ended: when the answer was complete, or the failure known.
        tokens: as the server counted them.
        taken_back: words that were shown as uncertain and then changed.
        lags: of each partial that tells how much audio it covers, how far it was behind the speaker.
        timeline: of a live session, each event's time, kind, and number of words shown.
        late: of a live session, how late each packet was sent although the sender was free: the client's own fault.
        held_up: of a live session, for how long the server took no audio that was due.
        error: the kind of failure.
        server: what the server says of where the time went, in milliseconds.

    """

    workload: str
    number: int
    clip: str
    audio_seconds: float
    reference: str | None
    intended: float | None = None
    sent: float = 0.0
    stopped: float | None = None
    first_update: float | None = None
    first_text: float | None = None
    first_confirmed: float | None = None
    last_text: float | None = None
    ended: float | None = None
    text: str = ""
    tokens: int | None = None
    partials: int = 0
    taken_back: int = 0
    lags: list[float] = field(default_factory=list)
    timeline: list[tuple[float, str, int]] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    held_up: float = 0.0
    error: str | None = None
    detail: str = ""
    server: dict[str, float] = field(default_factory=dict)
    level: float = 0

    @property
    def start(self) -> float:
        """From when its latencies count: in an open load from when it was due, however late the client was."""
        return self.sent if self.intended is None else self.intended

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""
        return self.error is None


def write_rows(path: Path, records: Iterable[Record]) -> None:
    """Write records as JSON lines, times to the microsecond."""
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(_rounded(asdict(record)), ensure_ascii=False) + "\n")


def read_rows(path: Path) -> list[Record]:
    """Read records that were written as JSON lines.

    Raises:
        ValueError: if they are something else.

    """
    known = {f.name for f in fields(Record)}
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [Record(**{name: value for name, value in row.items() if name in known}) for row in rows]
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} has no rows of a bench: {error}") from error


def _rounded(value: object) -> object:
    match value:
        case float():
            return round(value, 6)
        case dict():
            return {key: _rounded(item) for key, item in value.items()}
        case list() | tuple():
            return [_rounded(item) for item in value]
        case _:
            return value
