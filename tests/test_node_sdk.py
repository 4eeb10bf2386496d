"""OpenAI's SDK for Node as a judge: it writes forms in another way than Python's, the file first and in chunks."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.fake import FakeEngine
from tests import speech
from tests.certificates import certificates
from tests.gateway import Gateway
from tests.test_wire import ready_gateway

SDK, WS = "openai@6.49.0", "ws@8.18.3"
SAID = "1.00 seconds of audio."
SCRIPT = """
import fs from "node:fs";
import OpenAI, { toFile, APIError } from "openai";

const [, , url, path] = process.argv;
const client = new OpenAI({ apiKey: "none", baseURL: url + "/v1", maxRetries: 0 });
const create = (more) => client.audio.transcriptions.create({ file: fs.createReadStream(path), model: "whisper-1", ...more });
const answers = {};

answers.json = await create({});
answers.text = await create({ response_format: "text" });
answers.srt = await create({ response_format: "srt" });
answers.vtt = await create({ response_format: "vtt" });
answers.verbose = await create({ response_format: "verbose_json", timestamp_granularities: ["word", "segment"] });
answers.logprobs = await create({ include: ["logprobs"] });
answers.chunked = await create({ chunking_strategy: { type: "server_vad", silence_duration_ms: 500 } });
const bytes = await toFile(fs.readFileSync(path), "a.wav");
answers.bytes = await create({ file: bytes, keywords: ["Steno"], languages: ["en", "de"] });
answers.events = [];
for await (const event of await create({ stream: true })) answers.events.push(event);
answers.translation = await client.audio.translations.create({ file: fs.createReadStream(path), model: "whisper-1" });
answers.models = [];
for await (const model of client.models.list()) answers.models.push(model.id);
answers.errors = [];
for (const more of [{ model: "whisper-9" }, { language: "qq" }, { response_format: "diarized_json" }]) {
  try {
    await create(more);
  } catch (error) {
    const known = error instanceof APIError;
    answers.errors.push([known, error.status, error.param, error.code, typeof error.requestID]);
  }
}
console.log(JSON.stringify(answers));
"""


REALTIME = """
import fs from "node:fs";
import OpenAI from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";

const [, , url, path] = process.argv;
const client = new OpenAI({ apiKey: "none", baseURL: url + "/v1" });
const audio = fs.readFileSync(path).subarray(44);
const told = [];
const talk = new OpenAIRealtimeWS({ model: "gpt-4o-transcribe" }, client);
talk.on("event", (event) => told.push(event));
talk.on("error", (error) => told.push({ type: "thrown", code: error.error?.code, message: error.message }));
talk.on("session.created", () => {
  const input = { transcription: { model: "gpt-4o-transcribe", language: "en" }, turn_detection: null };
  talk.send({ type: "session.update", session: { type: "transcription", audio: { input } } });
});
talk.on("session.updated", () => {
  talk.send({ type: "input_audio_buffer.commit", event_id: "early" });
  for (let at = 0; at < audio.length; at += 4800)
    talk.send({ type: "input_audio_buffer.append", audio: audio.subarray(at, at + 4800).toString("base64") });
  talk.send({ type: "input_audio_buffer.commit" });
});
talk.on("conversation.item.input_audio_transcription.completed", () => talk.close());
talk.socket.on("close", () => console.log(JSON.stringify({ told })));
"""


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with ready_gateway(FakeEngine, vad=False) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the SDK, and return where."""
    npm = shutil.which("npm")
    if shutil.which("node") is None or npm is None:
        pytest.skip("Node is not installed")
    folder: Path = tmp_path_factory.mktemp("node")
    install = [npm, "install", "--no-fund", "--no-audit", "--ignore-scripts", SDK, WS]
    if subprocess.run(install, cwd=folder, capture_output=True, timeout=300, check=False).returncode:
        pytest.skip(f"npm cannot install {SDK} here")
    return folder


def run(folder: Path, script: str, *arguments: str, **environment: str) -> dict:
    """Run a script with the SDK, and return what it printed."""
    (folder / "judge.mjs").write_text(script)
    command = [shutil.which("node") or "node", "judge.mjs", *arguments]
    ran = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=os.environ | environment
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def answers(gateway: Gateway, sdk: Path) -> dict:
    (sdk / "a.wav").write_bytes(speech.wav(speech.tone(1.0)))
    return run(sdk, SCRIPT, gateway.url, "a.wav")


def test_json_has_its_fields(answers: dict):
    for kind in ("json", "chunked", "bytes", "translation"):
        assert answers[kind]["text"] == SAID
        assert answers[kind]["usage"]["type"] == "tokens"
    assert answers["bytes"]["languages"] == [{"code": "en"}]
    assert [set(entry) for entry in answers["logprobs"]["logprobs"]] == [{"token", "logprob", "bytes"}] * 4


def test_formats_of_text_are_strings(answers: dict):
    assert answers["text"] == SAID + "\n"
    assert answers["srt"] == f"1\n00:00:00,000 --> 00:00:01,000\n{SAID}\n\n"
    assert answers["vtt"] == f"WEBVTT\n\n00:00:00.000 --> 00:00:01.000\n{SAID}\n\n"


def test_verbose_json_has_its_segments_and_words(answers: dict):
    verbose = answers["verbose"]
    assert (verbose["language"], verbose["duration"], verbose["text"]) == ("english", 1.0, SAID)
    assert [segment["id"] for segment in verbose["segments"]] == [0]
    assert [word["word"] for word in verbose["words"]] == SAID.split()


def test_events_join_to_the_text(answers: dict):
    *deltas, done = answers["events"]
    assert {event["type"] for event in deltas} == {"transcript.text.delta"}
    assert "".join(event["delta"] for event in deltas) == done["text"] == SAID
    assert done["type"] == "transcript.text.done"


def test_models_are_listed(answers: dict):
    assert answers["models"][:2] == ["base", "whisper-1"]


def test_errors_are_the_sdks_own(answers: dict):
    assert answers["errors"] == [
        [True, 404, "model", "model_not_found", "string"],
        [True, 400, "language", "invalid_value", "string"],
        [True, 400, "response_format", "unsupported_value", "string"],
    ]


def test_its_realtime_client_talks_over_tls(sdk: Path, tmp_path: Path):
    """It knows no other way than wss."""
    cert, key, authority = certificates(tmp_path)
    (sdk / "b.wav").write_bytes(speech.wav(speech.tone(2.5, rate=24_000), rate=24_000))
    with ready_gateway(FakeEngine, vad=False, tls_cert=cert, tls_key=key) as secure:
        url = secure.url.replace("http://127.0.0.1", "https://localhost")
        told = run(sdk, REALTIME, url, "b.wav", NODE_EXTRA_CA_CERTS=str(authority))["told"]
    kinds = [event["type"] for event in told]
    assert kinds[:2] == ["session.created", "session.updated"]
    assert [event["code"] for event in told if event["type"] == "thrown"] == ["input_audio_buffer_commit_empty"]
    (completed,) = (event for event in told if event["type"].endswith("transcription.completed"))
    deltas = [event["delta"] for event in told if event["type"].endswith("transcription.delta")]
    assert "".join(deltas) == completed["transcript"] == "2.50 seconds of audio."
    assert completed["item_id"] == next(e["item_id"] for e in told if e["type"].endswith("committed"))
