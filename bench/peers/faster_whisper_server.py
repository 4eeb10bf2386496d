"""OpenAI's transcription API around faster-whisper, as one would write it in an afternoon.

The model decodes one window after the other in worker threads; so many at once as `--workers` says, each with `--threads`.
"""

import argparse
import io
import json
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI, Form, UploadFile
from fastapi.responses import JSONResponse, Response, StreamingResponse
from faster_whisper import WhisperModel


def build(folder: str, *, threads: int, workers: int) -> FastAPI:
    """Load the model, int8, and serve it."""
    model = WhisperModel(folder, device="cpu", compute_type="int8", cpu_threads=threads, num_workers=workers)
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": "whisper-1", "object": "model"}]}

    @app.post("/v1/audio/transcriptions")
    def transcribe(file: UploadFile, stream: bool = Form(False), language: str | None = Form(None)) -> Response:
        # As Steno decodes: greedy at first, with whisper's fallbacks, and each window for itself.
        segments, _ = model.transcribe(
            io.BytesIO(file.file.read()), language=language, beam_size=1, best_of=1, condition_on_previous_text=False
        )
        if not stream:
            return JSONResponse({"text": "".join(segment.text for segment in segments).strip()})

        def events() -> Iterator[str]:
            text = ""
            for segment in segments:
                text += segment.text
                yield _event({"type": "transcript.text.delta", "delta": segment.text})
            yield _event({"type": "transcript.text.done", "text": text.strip()})

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def _event(value: dict[str, str]) -> str:
    return f"data: {json.dumps(value)}\n\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="a CTranslate2 folder")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    served = build(given.folder, threads=given.threads, workers=given.workers)
    uvicorn.run(served, host="127.0.0.1", port=given.port, log_level="warning")
