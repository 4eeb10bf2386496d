"""POST /v1/audio/transcriptions: OpenAI's request, response and events."""

from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from app.transcript import Options, TextDelta, Transcript
from engine.base import Usage
from routers.clients import unless_client_leaves
from routers.dependencies import ReadyServices, RequestId
from routers.forms import TranscriptionForm, read_form
from routers.sse import event_stream

router = APIRouter(prefix="/v1/audio", tags=["audio"])


def _request_schema() -> dict[str, Any]:
    schema = TranscriptionForm.model_json_schema()
    schema["properties"]["file"] = {"type": "string", "format": "binary", "description": "The audio, in any format."}
    schema["required"] = ["file", *schema["required"]]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


@router.post("/transcriptions", response_model=None, openapi_extra=_request_schema())
async def create_transcription(request: Request, services: ReadyServices, request_id: RequestId) -> Response:
    """Transcribe an audio file: as JSON, as plain text, or with `stream` as server-sent events."""
    with ExitStack() as holding:
        permit = holding.enter_context(services.admission.admit())
        async with read_form(request, max_file_bytes=services.settings.max_upload_mb << 20) as (file, form):
            services.model(form.model)
            options = Options(language=form.language, prompt=form.prompt, temperature=form.temperature)
            services.transcriber.check(options)
            audio = await unless_client_leaves(request, services.transcriber.open(permit, file))
        run = services.transcriber.run(permit, audio, options, request_id=request_id, deltas=form.stream)
        if form.stream:
            return event_stream(_events(run), holding=holding.pop_all())
        transcript = await unless_client_leaves(request, _last(run))
    if form.response_format == "text":
        return PlainTextResponse(transcript.text + "\n")
    return JSONResponse({"text": transcript.text, "usage": _usage(transcript.usage)})


async def _last(run: AsyncGenerator[TextDelta | Transcript, None]) -> Transcript:
    async with aclosing(run):
        async for item in run:
            if isinstance(item, Transcript):
                return item
    raise AssertionError("a transcription ends with its transcript")


async def _events(run: AsyncGenerator[TextDelta | Transcript, None]) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(run):
        async for item in run:
            if isinstance(item, TextDelta):
                yield {"type": "transcript.text.delta", "delta": item.text}
            else:
                yield {"type": "transcript.text.done", "text": item.text, "usage": _usage(item.usage)}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "type": "tokens",
        "input_tokens": usage.audio_tokens + usage.prompt_tokens,
        "input_token_details": {"text_tokens": usage.prompt_tokens, "audio_tokens": usage.audio_tokens},
        "output_tokens": usage.output_tokens,
        "total_tokens": usage.audio_tokens + usage.prompt_tokens + usage.output_tokens,
    }
