"""What a body's media type says of its audio."""

from email.message import Message

from app.audio.decode import RawFormat
from app.errors import InvalidInputError

MIN_RATE, MAX_RATE = 8_000, 192_000
MAX_CHANNELS = 8
MAX_TYPE_CHARACTERS = 256
MAX_DIGITS = 9
_ENCODINGS = {
    "s16le": "s16le",
    "pcm_s16le": "s16le",
    "f32le": "f32le",
    "pcm_f32le": "f32le",
    "mulaw": "mulaw",
    "alaw": "alaw",
}
_TYPES = {
    "audio/pcm": "s16le",
    "audio/raw": "s16le",
    "audio/l16": "s16be",  # RFC 2586: network byte order
    "audio/basic": "mulaw",
    "audio/pcmu": "mulaw",
    "audio/pcma": "alaw",
}
_TELEPHONE = {"audio/basic", "audio/pcmu", "audio/pcma"}  # 8 kHz unless they say otherwise


def is_audio(content_type: str) -> bool:
    """Say whether a body of this type is audio itself, and not a form."""
    return content_type.lower().startswith(("audio/", "video/", "application/octet-stream", "application/ogg"))


def raw_format(content_type: str) -> RawFormat | None:
    """Read how samples without a header lie: `audio/pcm;rate=16000;channels=2;encoding=f32le`. None is a container.

    Raises:
        InvalidInputError: if the type does not say all, or what cannot be decoded.

    """
    if len(content_type) > MAX_TYPE_CHARACTERS:
        raise _refusal("it is too long")
    message = Message()
    message["content-type"] = content_type
    kind = message.get_content_type()
    if kind not in _TYPES:
        return None
    encoding = str(message.get_param("encoding", _TYPES[kind])).lower()
    if encoding not in (*_ENCODINGS, _TYPES[kind]):
        raise _refusal(f"encoding {encoding!r} is unknown; {', '.join(dict.fromkeys(_ENCODINGS.values()))} are known")
    rate = _number(message, "rate", 8_000 if kind in _TELEPHONE else None)
    channels = _number(message, "channels", 1)
    if not MIN_RATE <= rate <= MAX_RATE:
        raise _refusal(f"rate must be between {MIN_RATE} and {MAX_RATE}")
    if not 1 <= channels <= MAX_CHANNELS:
        raise _refusal(f"channels must be between 1 and {MAX_CHANNELS}")
    return RawFormat(_ENCODINGS.get(encoding, "s16be"), rate, channels)  # type: ignore[arg-type]


def _number(message: Message, name: str, default: int | None) -> int:
    value = message.get_param(name)
    if value is None and default is not None:
        return default
    if not str(value).isdecimal() or len(str(value)) > MAX_DIGITS:
        raise _refusal(f"{name} must be given as a number, as in audio/pcm;rate=16000")
    return int(str(value))


def _refusal(reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"The content type of the audio cannot be used: {reason}.", param="content-type", code="invalid_value"
    )
