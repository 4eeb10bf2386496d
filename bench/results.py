"""A run's result as it lies on disk.

`steno bench schema` prints its JSON Schema; `schema_version` rises when a field changes.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

SCHEMA_VERSION = 1


class Interval(BaseModel):
    """Two values that hold a true one between them with 95% confidence."""

    low: float
    high: float


class Distribution(BaseModel):
    """Values of a level of load. Null where there is none."""

    n: int = Field(description="How many requests have the value.")
    mean: float | None
    max: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    intervals: dict[str, Interval | None] = Field(
        description="Of each percentile, from order statistics; null where n is too small (p95 below 59, p99 below 299)."
    )


class InFlight(BaseModel):
    """How many requests were under way, from when the level was reached to when the last request began."""

    mean: float = Field(description="Weighted by time.")
    min: int
    max: int


class ClientHealth(BaseModel):
    """Whether the client kept up, so that what was measured is the server."""

    cpu_share: float = Field(description="CPU time of the client's event loop by wall time; 1 is a whole core.")
    loop_lag_ms_p99: float | None = Field(description="How late a timer of the client's event loop fired.")
    send_late_ms_p99: float | None = Field(description="How late a live packet was sent although the sender was free.")
    valid: bool
    why: str = ""


class Level(BaseModel):
    """The figures of one concurrency, or of one rate of arrivals."""

    load: float = Field(description="Requests in flight (closed), or arrivals a second (open).")
    sent: int
    ok: int
    failed: int
    errors: dict[str, int] = Field(description="Failures by kind.")
    with_text: int = Field(description="How many that succeeded had any text.")
    wall_seconds: float
    audio_seconds: float = Field(description="Of the requests that succeeded.")
    unique_audio_seconds: float = Field(description="Of the different recordings in it.")
    requests_per_second: float
    rtfx: float = Field(description="Seconds of audio that succeeded, by wall second.")
    tokens_per_second: float | None
    wer: float | None = Field(description="Word error rate where the words are known.")
    in_flight: InFlight
    metrics: dict[str, Distribution]
    server: dict[str, Distribution] = Field(description="Stages as the server tells them, in ms.")
    client: ClientHealth
    slo: dict[str, Literal["holds", "fails", "open"]] = {}
    slo_holds: bool | None = Field(None, description="By the figures as they stand; whether they prove it is in `slo`.")
    cost_per_audio_hour: float | None = None


class SloAnswer(BaseModel):
    """How much load keeps the service level."""

    slo: str
    last_passing: int | None
    first_failing: int | None
    binding: str | None = Field(description="The limit that failed first.")
    conclusive: bool = Field(description="Whether the sustained run shows with 95% confidence that every limit holds.")
    needs_n: int | None = Field(description="About how many requests would decide it.")
    words: str


class Machine(BaseModel):
    """Where it ran."""

    cpu: str
    cores: int
    memory_gib: float | None
    system: str
    python: str


class Result(BaseModel):
    """A whole run."""

    schema_version: int = SCHEMA_VERSION
    created: str = Field(description="ISO 8601, UTC.")
    command: str
    target: str
    label: str
    workload: Literal["file", "stream", "live"]
    load_kind: Literal["closed", "open"]
    machine: Machine
    versions: dict[str, str]
    server: dict[str, str] = Field(description="What the server says of itself.")
    settings: dict[str, str | int | float | bool | None]
    levels: list[Level]
    reading: list[str] = Field(default_factory=list, description="The levels in words.")
    slo: SloAnswer | None = None

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def load_result(path: Path) -> Result:
    """Read a result.

    Raises:
        ValueError: if the file is none, or of another version.

    """
    try:
        result = Result.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no result of a bench") from error
    if result.schema_version != SCHEMA_VERSION:
        raise ValueError(f"{path} has version {result.schema_version}, this is {SCHEMA_VERSION}")
    return result
