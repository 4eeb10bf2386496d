"""Everything that can go wrong with a request, as the gateway's own words.

    StenoError
    |- InvalidInputError       the client can mend it
    |  |- UnsupportedValueError    understood, but not served
    |  |- AudioError               the file is not audio, or too long
    |  |- UploadTooLargeError
    |  |- UploadStalledError
    |  |- UploadBrokenError
    |  |- SequenceGapError
    |  |- BenchRunningError
    |  |- UnknownBenchError
    |  |- ForbiddenError
    |  |- InvalidKeyError
    |  |- UnknownSessionError
    |  `- UnknownModelError
    |- RateLimitError          its key has all that it may have; `retry_after` says when to come back
    |- UnavailableError        we cannot take it now; `retry_after` says when to come back
    `- TranscriptionFailedError    accepted, and then lost

Each border translates the errors below it once; `routers.errors` maps these to the wire in one table.
"""


class StenoError(Exception):
    """Base of the gateway's errors. `param` names the field of the request, `code` is OpenAI's word for the kind."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidInputError(StenoError):
    """The client sent something that cannot be served as it is."""


class UnsupportedValueError(InvalidInputError):
    """A value that is understood and not served."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message, param=param, code="unsupported_value")


class AudioError(InvalidInputError):
    """The file is not audio that can be decoded, or is longer than allowed."""

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message, param="file", code=code)


class UploadTooLargeError(InvalidInputError):
    """The upload has more bytes than allowed."""

    def __init__(self, limit: int, size: int | None = None, *, param: str = "file") -> None:
        seen = f" ({size} bytes)" if size is not None else ""
        super().__init__(f"Maximum content size limit ({limit}) exceeded{seen}.", param=param, code="request_too_large")


class UploadStalledError(InvalidInputError):
    """The client stopped sending in the middle of its upload."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The upload stood still for {seconds:g} seconds.", code="request_timeout")


class UploadBrokenError(InvalidInputError):
    """The upload ended in its middle, or nobody waits for the rest of it."""

    def __init__(self) -> None:
        super().__init__("The upload broke off.", param="file")


class UnknownModelError(InvalidInputError):
    """No such model is served here."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model `{model}` does not exist or you do not have access to it.",
            param="model",
            code="model_not_found",
        )


class UnknownSessionError(InvalidInputError):
    """There is no such session, or no longer."""

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"There is no session `{session_id[:64]}`, or it is over.", param="session_id", code="session_not_found"
        )


class SequenceGapError(InvalidInputError):
    """A piece of audio came before one that must come first."""

    def __init__(self, sequence: int, expected: int) -> None:
        super().__init__(
            f"Audio with sequence {sequence} came, and {expected} is expected.", param="sequence", code="sequence_gap"
        )


class UnknownBenchError(InvalidInputError):
    """There is no such run of the bench."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"There is no run `{run_id[:64]}`.", param="run_id", code="bench_not_found")


class BenchRunningError(InvalidInputError):
    """A run of the bench is in progress, and two at once would measure each other."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"The run `{run_id}` is in progress: wait for its end, or delete it.", code="bench_running")


class ForbiddenError(InvalidInputError):
    """This client may not do that here."""


class InvalidKeyError(InvalidInputError):
    """The client has no key, or a wrong one."""

    def __init__(self, *, given: bool = True) -> None:
        missing = "You didn't provide an API key. Send it in the header, as Authorization: Bearer YOUR_KEY."
        super().__init__("Incorrect API key provided." if given else missing, code="invalid_api_key")


class RateLimitError(StenoError):
    """The client has all that its key may have. `retry_after` is in seconds, 1 to 120."""

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message, code="rate_limit_exceeded")
        self.retry_after = min(max(1, retry_after), 120)


class UnavailableError(StenoError):
    """The gateway cannot take the request now. `retry_after` is in seconds, 1 to 120."""

    def __init__(self, message: str, *, retry_after: int, code: str = "server_is_overloaded") -> None:
        super().__init__(message, code=code)
        self.retry_after = min(max(1, retry_after), 120)


class TranscriptionFailedError(StenoError):
    """The engine lost a request that had been accepted."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="transcription_failed")
