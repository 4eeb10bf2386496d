"""A transcript in each of OpenAI's response formats. Pure.

`json` and `text` say what was said; `verbose_json`, `srt` and `vtt` also when.
"""

import math
from typing import Any

from fastapi.responses import JSONResponse, PlainTextResponse, Response

from app.captions import srt, vtt
from app.languages import name_of
from app.transcript import Segment, Transcript
from engine.base import Usage
from engine.prompts import Task
from routers.forms import TranslationForm

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
            return JSONResponse({"text": transcript.text, **_logprobs(transcript, form), "usage": _tokens(transcript.usage)})


def done_event(transcript: Transcript, form: TranslationForm, task: Task) -> dict[str, Any]:
    """Write the `transcript.text.done` event; a format with times adds its fields."""
    timed = _timed(transcript, form, task) if form.response_format == "verbose_json" else {}
    return timed | {
        "type": "transcript.text.done",
        "text": transcript.text,
        **_logprobs(transcript, form),
        "usage": _tokens(transcript.usage),
    }


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


def _logprobs(transcript: Transcript, form: TranslationForm) -> dict[str, Any]:
    if not form.wants_logprobs:
        return {}
    entries = [
        {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}
        for segment in transcript.segments
        for piece, logprob in zip(segment.spelling, segment.logprobs, strict=True)
    ]
    return {"logprobs": entries}


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
