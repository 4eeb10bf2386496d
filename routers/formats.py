"""A transcript in each of OpenAI's response formats. Pure.

`json` and `text` say what was said; `verbose_json`, `srt` and `vtt` also when.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse, PlainTextResponse, Response

from app.captions import srt, vtt
from app.languages import name_of
from app.transcript import Progress, Segment, TextDelta, Transcript
from engine.base import Usage
from engine.prompts import Task
from routers.forms import TranscriptionForm, TranslationForm

FRAMES_PER_SECOND = 100  # of the log-mel spectrogram, in which `seek` counts


def respond(transcript: Transcript, form: TranslationForm, task: Task) -> Response:
    """Write the whole response."""
    match form.response_format:
        case "text":
            return PlainTextResponse(transcript.text + "\n")
        case "srt":
            return PlainTextResponse(srt(transcript.segments))
        case "vtt":
            return PlainTextResponse(vtt(transcript.segments))
        case "verbose_json":
            return JSONResponse(_timed(transcript, form, task) | {"usage": _duration(transcript)})
        case _:
            return JSONResponse(_plain(transcript, form))


def done_event(
    transcript: Transcript, form: TranslationForm, task: Task, profile: Callable[[], Mapping[str, Any]]
) -> dict[str, Any]:
    """Write the `transcript.text.done` event; a format with times adds its fields, and `profile` tells where the time went."""
    timed = _timed(transcript, form, task) if form.response_format == "verbose_json" else {}
    asked = {"profile": profile()} if form.wants_profile else {}
    return {"type": "transcript.text.done", **timed, **_plain(transcript, form), **asked}


def delta_event(delta: TextDelta, form: TranslationForm) -> dict[str, Any]:
    """Write a `transcript.text.delta` event."""
    event: dict[str, Any] = {"type": "transcript.text.delta", "delta": delta.text}
    if form.wants_logprobs:
        event["logprobs"] = logprobs_of(delta.spelling, delta.logprobs)
    return event


def progress_event(progress: Progress) -> dict[str, Any]:
    """Write an event that OpenAI does not have: how many seconds of the audio are transcribed."""
    return {"type": "transcript.progress", "seconds": round(progress.seconds, 3)}


def chunk_events(event: dict[str, Any], *, request_id: str, created: int, model: str) -> list[dict[str, Any]]:
    """Write an event as vLLM's own server does: chunks like those of a chat, of which the last has the usage."""
    chunk = {"id": request_id, "object": "transcription.chunk", "created": created, "model": model}
    match event:
        case {"type": "transcript.text.delta", "delta": text}:
            return [chunk | {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}]
        case {"type": "transcript.text.done", "usage": spent}:
            usage = {
                "prompt_tokens": spent["input_tokens"],
                "completion_tokens": spent["output_tokens"],
                "total_tokens": spent["total_tokens"],
            }
            last = {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]}
            return [chunk | last, chunk | {"choices": [], "usage": usage}]
        case _:
            return []


def stages_of(transcript: Transcript, *, receive: float, total: float) -> dict[str, float]:
    """Say where the time of a request went, in milliseconds.

    Args:
        transcript: has the stages of the work.
        receive: seconds until the upload was complete.
        total: seconds until now.

    """
    stages = transcript.stages
    seconds = {
        "receive": receive,
        "decode": stages.decode,
        "vad": stages.vad,
        "queue": stages.queue,
        "engine": stages.engine,
        "total": total,
    }
    return {name: round(value * 1000, 1) for name, value in seconds.items()}


def server_timing(stages: dict[str, float]) -> str:
    """Write the header `Server-Timing` (W3C)."""
    return ", ".join(f"{name};dur={ms:.1f}" for name, ms in stages.items())


def _plain(transcript: Transcript, form: TranslationForm) -> dict[str, Any]:
    """Write the fields of `json`, which the last event has too."""
    plain: dict[str, Any] = {"text": transcript.text}
    if isinstance(form, TranscriptionForm):
        plain["languages"] = [{"code": code} for code in transcript.languages]
    if form.wants_logprobs:
        segments = transcript.segments
        plain["logprobs"] = [entry for s in segments for entry in logprobs_of(s.spelling, s.logprobs)]
    return plain | {"usage": _tokens(transcript.usage)}


def _timed(transcript: Transcript, form: TranslationForm, task: Task) -> dict[str, Any]:
    timed = {
        "task": task,
        "language": "english" if task == "translate" else name_of(transcript.language or "en"),
        "duration": round(transcript.seconds, 3),
        "text": transcript.text,
    }
    if "segment" in form.granularities:
        timed["segments"] = [_segment(i, segment) for i, segment in enumerate(transcript.segments)]
    if "word" in form.granularities:
        words = [word for segment in transcript.segments for word in segment.words]
        timed["words"] = [{"word": w.text, "start": round(w.start, 3), "end": round(w.end, 3)} for w in words]
    return timed


def logprobs_of(spelling: Sequence[bytes], logprobs: Sequence[float]) -> list[dict[str, Any]]:
    """Write tokens' log-probabilities."""
    return [
        {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}
        for piece, logprob in zip(spelling, logprobs, strict=True)
    ]


def _duration(transcript: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(transcript.seconds)}


def _tokens(spent: Usage) -> dict[str, Any]:
    return {
        "type": "tokens",
        "input_tokens": spent.audio_tokens + spent.prompt_tokens,
        "input_token_details": {"text_tokens": spent.prompt_tokens, "audio_tokens": spent.audio_tokens},
        "output_tokens": spent.output_tokens,
        "total_tokens": spent.audio_tokens + spent.prompt_tokens + spent.output_tokens,
    }


def _segment(number: int, segment: Segment) -> dict[str, Any]:
    return {
        "id": number,
        "seek": round(segment.window_start * FRAMES_PER_SECOND),
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }
