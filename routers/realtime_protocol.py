"""OpenAI's Realtime transcription protocol: a client's JSON in, what to do out; a session's events in, the server's JSON out.

Sans-IO: no sockets, no tasks, no clock. What a client gets wrong becomes an `error` event that names the field and, as its
`event_id`, the client's event; nothing of it is done, and the conversation goes on.

An *item* is a turn: what lies between two commits. Voice activity commits, or the client. A turn that is longer than the
model's window is transcribed in pieces, the utterances of the live session, and stays one item.

Beside the shapes of the general API those of the beta are understood: `transcription_session.update`, and its flat fields. Who
has used them is answered in them.
"""

import binascii
import json
import secrets
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.audio.decode import RawFormat
from app.errors import InvalidInputError, StenoError
from app.live_events import (
    AudioCleared,
    LiveDelta,
    LiveEvent,
    UtteranceChanged,
    UtteranceClosed,
    UtteranceDropped,
    UtteranceFinal,
    UtteranceLost,
    UtteranceOpened,
)
from app.session.agreement import Token
from app.speech.endpointing import EndpointPolicy
from app.transcript import Options, TextJoiner
from routers.errors import body_of
from routers.formats import logprobs_of
from routers.forms import TranscriptionForm

MAX_AUDIO_CHARACTERS = 15 << 20  # of base64, in one event
MAX_EVENT_CHARACTERS = 256 << 10  # of any other event
MAX_NAME, MAX_NAMES = 64, 20  # of unknown fields
LEAST_COMMIT_MS = 100
LOGPROBS = "item.input_audio_transcription.logprobs"

_TRANSCRIPTION = "conversation.item.input_audio_transcription"
_BETA_FORMATS = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}
# Of the beta's flat fields: where they lie in the general API's session.
_BETA_FIELDS = {
    "input_audio_format": "format",
    "input_audio_transcription": "transcription",
    "input_audio_noise_reduction": "noise_reduction",
    "turn_detection": "turn_detection",
}
_TAGS = {"audio/pcm", "audio/pcmu", "audio/pcma", "server_vad", "semantic_vad"}  # which pydantic has in an error's place
_ELSEWHERE = ("conversation.", "response.", "output_audio_buffer.")  # events of sessions that answer


# --- what a client may set ------------------------------------------------------------------------------------------------


class _Part(BaseModel):
    """A part of a session's configuration. Fields that mean nothing here are passed over, and named in the answer."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Pcm(_Part):
    """Samples of 16 bits, little-endian, mono."""

    type: Literal["audio/pcm"]
    rate: Annotated[int, Field(ge=8_000, le=48_000)] = 24_000


class Telephone(_Part):
    """G.711 at 8 kHz, mono."""

    type: Literal["audio/pcmu", "audio/pcma"]


class Transcription(_Part):
    """What is known of the speech."""

    model: str | None = None
    language: str | None = None
    languages: list[str] = []
    prompt: str = ""
    keywords: list[str] = []
    delay: Literal["minimal", "low", "medium", "high", "xhigh"] | None = None


class NoiseReduction(_Part):
    """Taken, and without effect: the model hears through noise by itself."""

    type: Literal["near_field", "far_field"] = "near_field"
    strength: float | None = None


class ServerVad(_Part):
    """A turn ends after so much silence."""

    type: Literal["server_vad"]
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[int, Field(ge=0, le=30_000)] = 300
    silence_duration_ms: Annotated[int, Field(ge=0, le=30_000)] = 500

    @property
    def endpoints(self) -> EndpointPolicy:
        """How turns are found."""
        return EndpointPolicy.of_server_vad(
            threshold=self.threshold,
            prefix_padding_ms=self.prefix_padding_ms,
            silence_duration_ms=self.silence_duration_ms,
        )


class SemanticVad(_Part):
    """A turn ends when it sounds complete: here too that is silence, which may be shorter the longer the turn is."""

    type: Literal["semantic_vad"]
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"

    @property
    def endpoints(self) -> EndpointPolicy:
        """How turns are found."""
        silence = {"low": 2.0, "medium": None, "auto": None, "high": 0.5}[self.eagerness]
        return EndpointPolicy(silence_seconds=silence)


class AudioInput(_Part):
    """The audio, and what becomes of it."""

    format: Annotated[Pcm | Telephone, Field(discriminator="type")] = Pcm(type="audio/pcm")
    transcription: Transcription = Transcription()
    noise_reduction: NoiseReduction | None = None
    turn_detection: Annotated[ServerVad | SemanticVad | None, Field(discriminator="type")] = ServerVad(type="server_vad")


class Audio(_Part):
    """Audio comes in; none goes out."""

    input: AudioInput = AudioInput()


class SessionConfig(_Part):
    """A session's configuration, as `session.update` and `client_secrets` take it."""

    type: Literal["transcription"] = "transcription"
    include: list[Literal["item.input_audio_transcription.logprobs"]] = []
    audio: Audio = Audio()

    @property
    def raw_format(self) -> RawFormat:
        """How the samples lie."""
        form = self.audio.input.format
        if isinstance(form, Pcm):
            return RawFormat("s16le", form.rate, 1)
        return RawFormat("mulaw" if form.type == "audio/pcmu" else "alaw", 8_000, 1)

    @property
    def endpoints(self) -> EndpointPolicy | None:
        """How turns are found; None leaves it to the client."""
        detection = self.audio.input.turn_detection
        return detection.endpoints if detection else None

    @property
    def without_effect(self) -> list[str]:
        """Names of what is known and set, and changes nothing."""
        given, named = self.audio.input, []
        if given.noise_reduction is not None:
            named.append("audio.input.noise_reduction")
        if given.transcription.delay is not None:
            named.append("audio.input.transcription.delay")
        return named

    def options(self, model: str) -> Options:
        """How to transcribe; `model` is the default.

        Raises:
            InvalidInputError: if what is known of the speech does not fit together; `param` is the field's path.

        """
        known = self.audio.input.transcription
        try:
            form = TranscriptionForm.model_validate(
                {
                    "model": known.model or model,
                    "language": known.language or None,
                    "languages": known.languages,
                    "prompt": known.prompt,
                    "keywords": known.keywords,
                }
            )
        except InvalidInputError as error:
            raise InvalidInputError(
                error.message, param=f"session.audio.input.transcription.{error.param}", code=error.code
            ) from error
        return form.options("transcribe")

    def changed(self, given: Mapping[str, Any]) -> "SessionConfig":
        """Return this with the given fields, each of which may be a part of its object; null takes a field back.

        Only `turn_detection` has a meaning for null: the client commits.

        Raises:
            InvalidInputError: if a value cannot be taken; `param` is the field's path.

        """
        nested, flat = _nested(given)
        try:
            return SessionConfig.model_validate(_merged(self.model_dump(), nested))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"] if part not in _TAGS)
            for name in flat:
                place = place.replace(f"audio.input.{_BETA_FIELDS[name]}", name)
            reason = str(first.get("ctx", {}).get("error") or first["msg"])
            raise InvalidInputError(
                f"Invalid value for 'session.{place}': {reason}.", param=f"session.{place}", code="invalid_value"
            ) from error


def _unknown(given: Mapping[str, Any], part: str = "session", prefix: str = "") -> Iterator[str]:
    """Yield the names of fields that mean nothing here."""
    for name, value in given.items():
        if name not in _FIELDS[part]:
            yield prefix + name[:MAX_NAME]
        elif name in _FIELDS and isinstance(value, dict):
            yield from _unknown(value, name, f"{prefix}{name}.")


def _nested(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Put the beta's flat fields where they lie now; return the whole, and which they were."""
    flat = [name for name in _BETA_FIELDS if name in given]
    nested = {name: value for name, value in given.items() if name not in flat}
    if not flat:
        return nested, flat
    moved: dict[str, Any] = {}
    for name in flat:
        value = given[name]
        if name == "input_audio_format" and value is not None:
            if not isinstance(value, str) or value not in _BETA_FORMATS:
                raise InvalidInputError(
                    f"Invalid value for 'session.{name}': use one of {', '.join(map(repr, _BETA_FORMATS))}.",
                    param=f"session.{name}",
                    code="invalid_value",
                )
            value = {"type": _BETA_FORMATS[value]}
        moved[_BETA_FIELDS[name]] = value
    return _merged(nested, {"audio": {"input": moved}}), flat


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Merge objects; one of another type replaces the old one."""
    merged = dict(old)
    for name, value in new.items():
        before = merged.get(name)
        if value is None and name != "turn_detection":
            merged.pop(name, None)
        elif (
            isinstance(value, dict) and isinstance(before, dict) and value.get("type", before.get("type")) == before.get("type")
        ):
            merged[name] = _merged(before, value)
        else:
            merged[name] = value
    return merged


_FIELDS: dict[str, set[str]] = {
    "session": {*SessionConfig.model_fields, "id", "object", "expires_at"},  # a client may send back what it got
    "audio": set(Audio.model_fields),
    "input": set(AudioInput.model_fields),
    "transcription": set(Transcription.model_fields),
    "turn_detection": {*ServerVad.model_fields, *SemanticVad.model_fields},
}


# --- what a client says ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Append:
    """More audio, in the session's format."""

    audio: bytes
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """The turn is over."""

    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class Clear:
    """The open turn is taken back."""

    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """Some fields of the configuration change."""

    given: dict[str, Any]
    beta: bool
    event_id: str | None = None


Said = Append | Commit | Clear | Update


class ClientMistakeError(Exception):
    """A client's event cannot be taken. `event_id` is what the client called it."""

    def __init__(self, error: StenoError, event_id: str | None) -> None:
        super().__init__(error.message)
        self.error = error
        self.event_id = event_id


def read(message: str | bytes) -> Said:
    """Read a client's event. Pure, so that a long one may be read in a thread.

    Raises:
        ClientMistakeError: if it is none.

    """
    if isinstance(message, bytes):
        raise _mistake("Binary messages are not understood: send audio as base64, in input_audio_buffer.append.", None)
    try:
        event = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise _mistake("The message is no JSON.", None, code="invalid_json") from error
    if not isinstance(event, dict):
        raise _mistake("An event is a JSON object.", None)
    given_id = event.get("event_id")
    event_id = given_id if isinstance(given_id, str) else None
    if len(message) > MAX_EVENT_CHARACTERS and event.get("type") != "input_audio_buffer.append":
        raise _mistake(f"An event without audio is at most {MAX_EVENT_CHARACTERS >> 10} KiB long.", event_id)
    match event.get("type"):
        case "input_audio_buffer.append":
            return Append(_audio(event.get("audio"), event_id), event_id)
        case "input_audio_buffer.commit":
            return Commit(event_id)
        case "input_audio_buffer.clear":
            return Clear(event_id)
        case "session.update" | "transcription_session.update" as kind:
            return Update(_session(event.get("session"), event_id), kind != "session.update", event_id)
        case None:
            raise _mistake("Missing required parameter: 'type'.", event_id, param="type", code="missing_required_parameter")
        case str(kind) if kind.startswith(_ELSEWHERE):
            raise _mistake(f"{kind} is not available in a transcription session.", event_id, param="type")
        case kind:
            raise _mistake(f"Invalid value: {str(kind)[:100]!r} is no event.", event_id, param="type")


def _audio(value: object, event_id: str | None) -> bytes:
    if not isinstance(value, str):
        raise _mistake("Missing required parameter: 'audio'.", event_id, param="audio", code="missing_required_parameter")
    if len(value) > MAX_AUDIO_CHARACTERS:
        raise _mistake(
            f"The audio of an event is at most {MAX_AUDIO_CHARACTERS >> 20} MiB long; append more of them.",
            event_id,
            param="audio",
            code="string_above_max_length",
        )
    try:
        return b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _mistake("Invalid 'audio': this is no base64.", event_id, param="audio") from error


def _session(value: object, event_id: str | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _mistake("Missing required parameter: 'session'.", event_id, param="session", code="missing_required_parameter")
    if value.get("type", "transcription") != "transcription":
        raise _mistake(
            "This is a transcription session: its 'session.type' is 'transcription'.", event_id, param="session.type"
        )
    return value


def _mistake(
    message: str, event_id: str | None, *, param: str | None = None, code: str = "invalid_value"
) -> ClientMistakeError:
    return ClientMistakeError(InvalidInputError(message, param=param, code=code), event_id)


# --- the conversation -------------------------------------------------------------------------------------------------------


def new_id(kind: str) -> str:
    """Make an id, as `item_...`."""
    return f"{kind}_{secrets.token_urlsafe(15)}"


@dataclass(slots=True)
class _Item:
    id: str
    detected: bool  # by voice activity
    committed: bool = False
    seconds: float = 0.0
    opened_at: float = 0.0  # of its newest utterance
    text: str = ""  # all deltas
    texts: dict[int, str] = field(default_factory=dict)  # those of each utterance, or what it was changed to
    changed: bool = False
    languages: dict[str, None] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)
    error: StenoError | None = None


Event = dict[str, Any]


class Conversation:
    """What one client and one live session say to each other.

    Args:
        session_id: the session's id.
        expires_at: when it ends at the latest, in seconds since the epoch.
        model: the default model.
        check: raises if a model with these options is not served; the name of the model is its own, not the client's field.
        config: how it begins.
        beta: answer in the beta's shapes.
        make_id: makes ids of a kind.

    """

    def __init__(
        self,
        session_id: str,
        *,
        expires_at: int,
        model: str,
        check: Callable[[str, Options], None],
        config: SessionConfig | None = None,
        beta: bool = False,
        make_id: Callable[[str], str] = new_id,
    ) -> None:
        self._session_id, self._expires_at = session_id, expires_at
        self._model, self._check, self._make_id = model, check, make_id
        self._beta = beta
        self._unknown: list[str] = []  # fields of the last change
        self._appended = 0.0  # milliseconds since the last commit, where the client commits
        self._items: dict[int, _Item] = {}  # by utterance, until its text has all come
        self._open: _Item | None = None
        self._last_committed: str | None = None
        self.config = config or SessionConfig()
        self.options = self._checked(self.config)

    # --- the client's side --------------------------------------------------------------------------------------------

    def begin(self) -> Event:
        """Write the first event."""
        return self._event(f"{self._session_kind}.created", session=self.session())

    def update(self, said: Update) -> Event:
        """Take a change of the configuration, and write the answer. `config` and `options` are the new ones.

        Raises:
            ClientMistakeError: if it cannot be taken; then nothing has changed.

        """
        try:
            config = self.config.changed(said.given)
            options = self._checked(config)
        except StenoError as error:
            raise ClientMistakeError(error, said.event_id) from error
        self._beta = said.beta
        self._unknown = list(_unknown(_nested(said.given)[0]))[:MAX_NAMES]
        if (config.endpoints is None) != (self.config.endpoints is None):
            self._appended = 0.0
        self.config, self.options = config, options
        return self._event(f"{self._session_kind}.updated", session=self.session())

    def append(self, said: Append) -> None:
        """Count audio that came."""
        self._appended += 1000 * len(said.audio) / self.config.raw_format.bytes_per_second

    def commit(self, said: Commit, *, open_seconds: float) -> None:
        """End a turn; `open_seconds` of audio are in the one that voice activity has found.

        Raises:
            ClientMistakeError: if there is not enough audio in it.

        """
        have = 1000 * open_seconds if self.config.endpoints else self._appended
        if round(have, 2) < LEAST_COMMIT_MS:
            raise _mistake(
                f"Error committing input audio buffer: buffer too small. Expected at least {LEAST_COMMIT_MS}ms of audio, but "
                f"buffer only has {have:.2f}ms of audio.",
                said.event_id,
                code="input_audio_buffer_commit_empty",
            )
        self._appended = 0.0

    def clear(self) -> None:
        """Take the open turn back. The session tells when nothing more of it will come."""
        self._appended = 0.0

    def session(self) -> Event:
        """Write the configuration as it is, with what is set and has no effect here."""
        given = self.config.audio.input
        head = {"id": self._session_id, "object": "realtime.transcription_session", "expires_at": self._expires_at}
        idle = [*self.config.without_effect, *self._unknown]
        named = {"without_effect": idle} if idle else {}
        transcription = given.transcription.model_dump(exclude_defaults=True)
        transcription["model"] = given.transcription.model or self._model
        form = given.format.model_dump()
        noise = given.noise_reduction.model_dump(exclude_none=True) if given.noise_reduction else None
        turns = given.turn_detection.model_dump() if given.turn_detection else None
        include = list(self.config.include)
        if self._beta:
            names_of = {kind: name for name, kind in _BETA_FORMATS.items()}
            flat = {"input_audio_format": names_of[form["type"]], "input_audio_transcription": transcription}
            return head | flat | {"input_audio_noise_reduction": noise, "turn_detection": turns, "include": include} | named
        audio = {"format": form, "transcription": transcription, "noise_reduction": noise, "turn_detection": turns}
        return head | {"type": "transcription", "include": include, "audio": {"input": audio}} | named

    def refuse(self, mistake: ClientMistakeError) -> Event:
        """Write the answer to what a client got wrong."""
        return self.error(mistake.error, mistake.event_id)

    def error(self, error: StenoError, event_id: str | None = None) -> Event:
        """Write an error, of the client's event of that name or of the session."""
        return self._event("error", error=body_of(error)["error"] | {"event_id": event_id})

    # --- the session's side -------------------------------------------------------------------------------------------

    def tell(self, event: LiveEvent) -> Sequence[Event]:
        """Write what the live session tells."""
        told: Sequence[Event] = ()
        match event:
            case UtteranceOpened(utterance, start):
                told = self._opened(utterance, start)
            case UtteranceClosed(utterance, end, cut):
                told = self._closed(utterance, end, cut=cut)
            case UtteranceDropped(utterance):
                self._dropped(utterance)
            case AudioCleared():
                told = (self._event("input_audio_buffer.cleared"),)
            case LiveDelta(utterance, text, tokens) if (item := self._items.get(utterance)) is not None:
                told = self._delta(item, utterance, text, tokens)
            case UtteranceChanged(utterance, text) if (item := self._items.get(utterance)) is not None:
                item.texts[utterance], item.changed = text, True
            case UtteranceFinal(_, utterance, language) if (item := self._items.pop(utterance, None)) is not None:
                if language:
                    item.languages[language] = None
                told = self._ended(item)
            case UtteranceLost(utterance, error) if (item := self._items.pop(utterance, None)) is not None:
                item.error = error
                told = self._ended(item)
        return told

    @property
    def unfinished(self) -> int:
        """How many committed items have not got their text."""
        return len({item.id for item in self._items.values() if item.committed})

    def _opened(self, utterance: int, start: float) -> Sequence[Event]:
        item, goes_on = self._open, self._open is not None
        if item is None:
            item = self._open = _Item(self._make_id("item"), detected=self.config.endpoints is not None)
        item.opened_at = start
        self._items[utterance] = item
        if goes_on or not item.detected:
            return ()
        return (self._event("input_audio_buffer.speech_started", audio_start_ms=_ms(start), item_id=item.id),)

    def _closed(self, utterance: int, end: float, *, cut: bool) -> Sequence[Event]:
        item = self._items[utterance]
        item.seconds += end - item.opened_at
        if cut:
            return ()
        self._open, item.committed = None, True
        before, self._last_committed = self._last_committed, item.id
        events = []
        if item.detected:
            events.append(self._event("input_audio_buffer.speech_stopped", audio_end_ms=_ms(end), item_id=item.id))
        events.append(self._event("input_audio_buffer.committed", item_id=item.id, previous_item_id=before))
        message = {
            "id": item.id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_audio", "transcript": None}],
        }
        for kind in ("created",) if self._beta else ("added", "done"):
            events.append(self._event(f"conversation.item.{kind}", previous_item_id=before, item=message))
        return events

    def _dropped(self, utterance: int) -> None:
        dropped, self._open = self._items.pop(utterance), None
        self._items = {other: item for other, item in self._items.items() if item is not dropped}

    def _delta(self, item: _Item, utterance: int, text: str, tokens: tuple[Token, ...]) -> Sequence[Event]:
        text = text if item.text else text.lstrip()
        item.text += text
        item.texts[utterance] = item.texts.get(utterance, "") + text
        asked: Event = {}
        if LOGPROBS in self.config.include:
            asked["logprobs"] = _logprobs(tokens)
            item.tokens += tokens
        return (self._event(f"{_TRANSCRIPTION}.delta", item_id=item.id, content_index=0, delta=text, **asked),)

    def _ended(self, item: _Item) -> Sequence[Event]:
        """Write the end of an item whose last text has come."""
        if not item.committed or item in self._items.values():
            return ()
        where = {"item_id": item.id, "content_index": 0}
        if item.error is not None:
            error = body_of(item.error)["error"] | {"type": "transcription_error"}
            return (self._event(f"{_TRANSCRIPTION}.failed", **where, error=error),)
        asked = {"logprobs": _logprobs(item.tokens)} if LOGPROBS in self.config.include else {}
        return (
            self._event(
                f"{_TRANSCRIPTION}.completed",
                **where,
                transcript=_joined(item.texts) if item.changed else item.text,
                languages=[{"code": code} for code in item.languages],
                usage={"type": "duration", "seconds": round(item.seconds, 3)},
                **asked,
            ),
        )

    def lose_all(self, error: StenoError) -> Sequence[Event]:
        """Write that no committed item gets its text any more."""
        lost = {id(item): item for item in self._items.values() if item.committed}
        self._items = {}
        for item in lost.values():
            item.error = error
        return [event for item in lost.values() for event in self._ended(item)]

    # --- writing --------------------------------------------------------------------------------------------------------

    @property
    def _session_kind(self) -> str:
        return "transcription_session" if self._beta else "session"

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "event_id": self._make_id("event"), **fields}

    def _checked(self, config: SessionConfig) -> Options:
        options = config.options(self._model)
        where = "session.audio.input.transcription."
        try:
            self._check(config.audio.input.transcription.model or self._model, options)
        except InvalidInputError as error:
            raise InvalidInputError(error.message, param=f"{where}{error.param}", code=error.code) from error
        return options


def _joined(texts: Mapping[int, str]) -> str:
    joiner = TextJoiner()
    for utterance in sorted(texts):
        joiner.feed(texts[utterance])
        joiner.end_window()
    return joiner.text


def _logprobs(tokens: Sequence[Token]) -> list[Event]:
    return logprobs_of([token.spelling for token in tokens], [token.logprob for token in tokens])


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
