"""Transcribe a file, and print its text as it comes: `python examples/stream.py speech.mp3`. Needs `pip install openai`."""

import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("STENO_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("STENO_API_KEY", "none"),
)
with open(sys.argv[1], "rb") as file:
    for event in client.audio.transcriptions.create(model="whisper-1", file=file, stream=True):
        if event.type == "transcript.text.delta":
            print(event.delta, end="", flush=True)
print()
