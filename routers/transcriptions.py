"""POST /v1/audio/transcriptions and /v1/audio/translations: OpenAI's requests, responses and events."""

from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.services import Services
from app.transcript import Options, TextDelta, Transcript
from engine.prompts import Task
from routers import formats
from routers.clients import unless_client_leaves
from routers.dependencies import ReadyServices, RequestId
from routers.forms import TranscriptionForm, TranslationForm, read_form, request_schema
from routers.sse import event_stream

router = APIRouter(prefix="/v1/audio", tags=["audio"])


@router.post("/transcriptions", response_model=None, openapi_extra=request_schema(TranscriptionForm))
async def create_transcription(request: Request, services: ReadyServices, request_id: RequestId) -> Response:
    """Transcribe an audio file in the language that is spoken."""
    return await _answer(request, services, request_id, TranscriptionForm, "transcribe")


@router.post("/translations", response_model=None, openapi_extra=request_schema(TranslationForm))
async def create_translation(request: Request, services: ReadyServices, request_id: RequestId) -> Response:
    """Transcribe an audio file into English, whatever is spoken."""
    return await _answer(request, services, request_id, TranslationForm, "translate")


async def _answer(request: Request, services: Services, request_id: str, kind: type[TranslationForm], task: Task) -> Response:
    with ExitStack() as holding:
        permit = holding.enter_context(services.admission.admit())
        file, form = await read_form(request, kind, max_file_bytes=services.settings.max_upload_mb << 20)
        holding.callback(file.close)
        services.model(form.model)
        options = Options(form.spoken_language, form.context, form.temperature, task, words="word" in form.granularities)
        services.transcriber.check(options)
        speech = await unless_client_leaves(request, services.transcriber.open(permit, file, form.policy))
        holding.callback(speech.close)
        run = services.transcriber.run(permit, speech, options, request_id=request_id, stream=form.streams)
        if form.streams:
            response: Response = event_stream(_events(run, form, task), holding=holding.pop_all())
        else:
            transcript = await unless_client_leaves(request, _last(run))
            response = formats.respond(transcript, form, task)
    if form.ignored:
        response.headers["x-steno-ignored-fields"] = ", ".join(map(quote, form.ignored))
    return response


async def _last(run: AsyncGenerator[TextDelta | Transcript, None]) -> Transcript:
    async with aclosing(run):
        async for item in run:
            if isinstance(item, Transcript):
                return item
    raise AssertionError("a transcription ends with its transcript")


async def _events(
    run: AsyncGenerator[TextDelta | Transcript, None], form: TranslationForm, task: Task
) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(run):
        async for item in run:
            if isinstance(item, TextDelta):
                yield {"type": "transcript.text.delta", "delta": item.text}
            else:
                yield formats.done_event(item, form, task)
