"""A transcript in each of OpenAI's response formats. Pure.

`json` and `text` say what was said; `verbose_json`, `srt` and `vtt` also when.
"""

import math
from typing import Any

from fastapi.responses import JSONResponse, PlainTextResponse, Response

from app.captions import srt, vtt
from app.languages import name_of
from app.transcript import Options, Segment, Transcript
from engine.base import Usage

FRAMES_PER_SECOND = 100  # of the log-mel spectrogram, in which `seek` counts


def respond(transcript: Transcript, response_format: str, options: Options) -> Response:
    """Write the whole response."""
    match response_format:
        case "text":
            return PlainTextResponse(transcript.text + "\n")
        case "srt":
            return PlainTextResponse(srt(transcript.segments))
        case "vtt":
            return PlainTextResponse(vtt(transcript.segments))
        case _:
            return JSONResponse(body(transcript, response_format, options))


def body(transcript: Transcript, response_format: str, options: Options) -> dict[str, Any]:
    """Write the JSON object of `json` or `verbose_json`."""
    if response_format == "verbose_json":
        return {
            "task": options.task,
            "language": name_of(transcript.language or "en") if options.task == "transcribe" else "english",
            "duration": round(transcript.seconds, 3),
            "text": transcript.text,
            "segments": [_segment(i, segment) for i, segment in enumerate(transcript.segments)],
            "usage": {"type": "duration", "seconds": math.ceil(transcript.seconds)},
        }
    return {"text": transcript.text, "usage": usage(transcript.usage)}


def usage(spent: Usage) -> dict[str, Any]:
    """Write the usage in tokens."""
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


def event(transcript: Transcript, response_format: str, options: Options) -> dict[str, Any]:
    """Write the `transcript.text.done` event; a format with times adds its fields."""
    done = {"type": "transcript.text.done", "text": transcript.text, "usage": usage(transcript.usage)}
    if response_format == "verbose_json":
        verbose = body(transcript, response_format, options)
        done |= {key: verbose[key] for key in ("task", "language", "duration", "segments")}
    return done
