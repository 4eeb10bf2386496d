"""POST /v1/audio/transcriptions and /v1/audio/translations: OpenAI's requests, responses and events.

Work begins when the file does, if the fields that say how came before it; text may flow while the rest still arrives.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.admission import Permit
from app.errors import InvalidInputError, StenoError
from app.services import Services
from app.speech.reader import SpeechReader
from app.transcript import Progress, TextDelta, Transcript
from engine.prompts import Task
from routers import formats
from routers.clients import unless_client_leaves
from routers.dependencies import ReadyServices, RequestId
from routers.forms import TranscriptionForm, TranslationForm, read_fields, request_schema
from routers.live import transcribe_live
from routers.media import is_audio, raw_format
from routers.schemas import Transcription, Translation, errors, transcripts
from routers.sse import event_stream
from routers.uploads import Upload

MAX_HEADER_CHARACTERS = 1000
FIRST_SECONDS = 10.0  # of a stream's first window, so that its text comes soon
EARLY_CHARACTERS = 32_000  # of text, sent to a client that still uploads and so may not read yet

REFUSALS = errors(400, 404, 408, 413, 500, 503)

router = APIRouter(prefix="/v1/audio", tags=["audio"])


@router.post(
    "/transcriptions",
    response_model=None,
    openapi_extra=request_schema(TranscriptionForm),
    responses=transcripts(Transcription, streams=True) | REFUSALS,
)
async def create_transcription(request: Request, services: ReadyServices, request_id: RequestId) -> Response:
    """Transcribe an audio file in the language that is spoken.

    The body may also be the audio itself, and the fields the query's: with `stream=true` text comes while it is being sent.
    """
    if is_audio(request.headers.get("content-type", "")):
        form = read_fields(TranscriptionForm, request.query_params.multi_items())
        if form.streams:
            return with_ignored_fields(await transcribe_live(request, services, request_id, form, "transcribe"), form)
    return await _answer(request, services, request_id, TranscriptionForm, "transcribe")


@router.post(
    "/translations",
    response_model=None,
    openapi_extra=request_schema(TranslationForm),
    responses=transcripts(Translation, streams=False) | REFUSALS,
)
async def create_translation(request: Request, services: ReadyServices, request_id: RequestId) -> Response:
    """Transcribe an audio file into English, whatever is spoken."""
    return await _answer(request, services, request_id, TranslationForm, "translate")


async def _answer(request: Request, services: Services, request_id: str, kind: type[TranslationForm], task: Task) -> Response:
    async with AsyncExitStack() as holding:
        permit = holding.enter_context(await services.admission.admit(request.state.client))
        upload = Upload(
            request,
            services.transcriber.arriving_file(),
            max_file_bytes=services.settings.max_upload_mb << 20,
            fetcher=services.fetcher,
        )
        await holding.enter_async_context(upload)
        work = _Transcription(upload, services, permit, kind=kind, task=task, request_id=request_id)
        holding.callback(work.close)
        holding.callback(lambda: permit.spend(work.seconds))
        await unless_client_leaves(upload.client_left, work.begin())
        if work.form.streams:
            events = _in_dialect(_events(work, upload), work, request_id)
            response: Response = event_stream(events, client_left=upload.client_left, holding=holding.pop_all())
        else:
            transcript = await unless_client_leaves(upload.client_left, _last(work.items()))
            if work.form.streams:  # said after the file
                events = _in_dialect(_events_of(transcript, work), work, request_id)
                response = event_stream(events, client_left=upload.client_left, holding=holding.pop_all())
            else:
                response = formats.respond(transcript, work.form, task)
            response.headers["Server-Timing"] = formats.server_timing(work.stages(transcript))
    return with_ignored_fields(response, work.form)


def with_ignored_fields(response: Response, form: TranslationForm) -> Response:
    """Name the fields that meant nothing in the response's header."""
    if form.ignored:
        response.headers["x-steno-ignored-fields"] = ", ".join(map(quote, form.ignored))[:MAX_HEADER_CHARACTERS]
    return response


class _Transcription:
    """The transcription of an upload.

    It begins with the fields that came before the file, if the model is among them, and begins again when a field that comes
    after it changes what is to be done.
    """

    form: TranslationForm

    def __init__(
        self,
        upload: Upload,
        services: Services,
        permit: Permit,
        *,
        kind: type[TranslationForm],
        task: Task,
        request_id: str,
    ) -> None:
        self.task = task
        self._upload, self._services, self._permit = upload, services, permit
        self._kind, self._request_id = kind, request_id
        self._began = time.monotonic()
        self._speech: SpeechReader | None = None
        self._fields_read = 0

    async def begin(self) -> None:
        """Open the file as soon as it begins. An error waits for the end: a client that still writes would not read it.

        Raises:
            StenoError: if the request cannot be served.
            ClientDisconnect: if the client left.

        """
        await self._upload.file_began()
        if not self._upload.has("model"):
            await self._upload.ended()
        try:
            await self._open()
        except StenoError:
            await self._upload.ended()
            if self._upload.field_count == self._fields_read:
                raise
            await self._open()

    async def _open(self) -> None:
        self.close()
        self._fields_read = self._upload.field_count
        self.form = self._upload.form(self._kind)
        self._services.model(self.form.model)
        self._services.transcriber.check(self.form.options(self.task))
        self._upload.file.rewind()
        raw = raw_format(self._upload.content_type)
        policy = replace(self.form.policy, first_limit_seconds=FIRST_SECONDS) if self.form.streams else self.form.policy
        self._speech = await self._services.transcriber.open(self._permit, self._upload.file, policy, raw)

    async def items(self) -> AsyncGenerator[TextDelta | Progress | Transcript, None]:
        """Transcribe: what the use case yields.

        Raises:
            StenoError: as the use case does; or if text was yielded that a late field would have changed.

        """
        shown = False
        while True:
            assert self._speech is not None
            run = self._services.transcriber.run(
                self._permit,
                self._speech,
                self.form.options(self.task),
                request_id=self._request_id,
                stream=self.form.streams,
            )
            async with aclosing(run):
                async for item in run:
                    if isinstance(item, Transcript):
                        await self._upload.ended()
                    if self._has_changed():
                        break
                    shown = True
                    yield item
                else:
                    return
            if shown:
                raise InvalidInputError("A field came after the file, when text was on its way. Send fields before the file.")
            await self._upload.ended()
            await self._open()

    def _has_changed(self) -> bool:
        """Read the fields again if more have come, and say whether the work at hand is not what they ask for."""
        if self._upload.field_count == self._fields_read:
            return False
        self._fields_read = self._upload.field_count
        before, self.form = self.form, self._upload.form(self._kind)
        self._services.model(self.form.model)
        return (before.options(self.task), before.policy) != (self.form.options(self.task), self.form.policy)

    def stages(self, transcript: Transcript) -> dict[str, float]:
        """Say where the time went, in milliseconds, once all has been done."""
        receive = self._upload.ended_at - self._began
        return formats.stages_of(transcript, receive=receive, total=time.monotonic() - self._began)

    @property
    def seconds(self) -> float:
        """How much audio has been read."""
        return self._speech.seconds if self._speech is not None else 0.0

    def close(self) -> None:
        """Let go of the file."""
        if self._speech is not None:
            self._speech.close()


async def _last(items: AsyncGenerator[TextDelta | Progress | Transcript, None]) -> Transcript:
    async with aclosing(items):
        async for item in items:
            if isinstance(item, Transcript):
                return item
    raise AssertionError("a transcription ends with its transcript")


async def _events(work: _Transcription, upload: Upload) -> AsyncGenerator[dict[str, Any], None]:
    sent = 0
    async with aclosing(work.items()) as items:
        async for item in items:
            if isinstance(item, TextDelta):
                sent += len(item.text)
                if sent > EARLY_CHARACTERS:
                    await upload.ended()
                yield formats.delta_event(item, work.form)
            elif isinstance(item, Transcript):
                yield _done(item, work)
            elif work.form.wants_progress:
                yield formats.progress_event(item)


async def _events_of(transcript: Transcript, work: _Transcription) -> AsyncGenerator[dict[str, Any], None]:
    if transcript.text:
        yield formats.delta_event(TextDelta(transcript.text), work.form)
    yield _done(transcript, work)


def _done(transcript: Transcript, work: _Transcription) -> dict[str, Any]:
    return formats.done_event(transcript, work.form, work.task, lambda: work.stages(transcript))


async def _in_dialect(
    events: AsyncGenerator[dict[str, Any], None], work: _Transcription, request_id: str
) -> AsyncGenerator[dict[str, Any], None]:
    """Send OpenAI's events as they are, or as the chunks that a client of vLLM asked for."""
    created = int(time.time())
    async with aclosing(events):
        async for event in events:
            if not work.form.wants_chunks:
                yield event
                continue
            for chunk in formats.chunk_events(event, request_id=request_id, created=created, model=work.form.model):
                yield chunk
