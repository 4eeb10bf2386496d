"""The command `steno`, as a process: what it prints, how it refuses, how it ends."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from app.cli import app
from tests import speech
from tests.test_live_wire import Duplex

STENO = [sys.executable, "-m", "app.cli"]


def steno(*arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STENO_")} | {"NO_COLOR": "1", "COLUMNS": "200"}
    root = str(Path(__file__).parents[1])
    environment |= {"PYTHONPATH": root} | (env or {})
    command = [*STENO, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=environment, cwd=cwd)


def told(*arguments: str, env: dict[str, str] | None = None) -> Result:
    """Run a command that ends at once, in this process."""
    return CliRunner().invoke(app, arguments, env={"NO_COLOR": "1", "COLUMNS": "200"} | (env or {}))


def test_help_lists_the_commands_and_version_prints_one():
    assert {"serve", "transcribe", "models"} <= set(told("--help").stdout.split())
    assert told("--version").stdout.startswith("steno 0.")


def test_models_lists_the_shelf(tmp_path: Path):
    listed = told("models", "--cache-dir", str(tmp_path)).stdout
    assert "tiny.en" in listed
    assert "base" in listed
    assert "MIT" in listed
    assert "at first use" in listed


@pytest.mark.parametrize(
    ("arguments", "env", "names"),
    [
        (["--model", "nonsense"], {}, "nonsense"),
        (["--port", "70000"], {}, "--port"),
        (["--max-upload-mb", "0"], {}, "STENO_MAX_UPLOAD_MB"),
        ([], {"STENO_DTYPE": "int3"}, "STENO_DTYPE"),
    ],
)
def test_a_wrong_setting_ends_with_a_line_that_names_it(arguments: list[str], env: dict[str, str], names: str):
    ended = told("serve", *arguments, env=env)
    assert ended.exit_code == 2
    assert names in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_taken_port_ends_with_a_line_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = steno("serve", "--engine", "fake", "--port", str(port))
    assert ended.returncode == 1
    assert str(port) in ended.stderr
    assert "Traceback" not in ended.stderr


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    """See to it that a failed test does not wait for its server."""
    try:
        yield
    finally:
        process.kill()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_serve_says_where_and_how_and_leaves_in_order(sent: signal.Signals, tmp_path: Path):
    (tmp_path / ".env").write_text("STENO_ENGINE=fake\nSTENO_MAX_UPLOAD_MB=3\nSTENO_PORT=1\nSTENO_VAD=false\n")
    command = [*STENO, "serve", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "STENO_MODEL": "tiny.en", "NO_COLOR": "1"}
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as process,
        ending(process),
    ):
        url = process.stderr.readline().split()[-1]
        lines = iter(process.stderr.readline, "")
        assert next(line for line in lines if line.startswith("Ready: tiny.en"))
        curl = next(lines).split()
        assert curl[:2] == ["curl", f"{url}/v1/audio/transcriptions"]
        assert "model=tiny.en" in curl
        answer = httpx.post(curl[1], data={"model": "tiny.en"}, files={"file": speech.wav(speech.tone(1.0))})
        assert answer.json()["text"] == "1.00 seconds of audio."
        speaking = Duplex(url, **{"include[]": "partials"})
        speaking.send(bytes(2 * 16_000))
        speaking.read_until(b"transcript.text.partial")
        process.send_signal(sent)
        *_, done, end = speaking.events()  # though its own end was not sent
        assert (done["type"], end) == ("transcript.text.done", "[DONE]")
        assert done["text"].endswith("seconds of audio.")
        assert process.wait(timeout=60) == 0
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(("form", "printed"), [("text", "2.00 seconds of audio.\n"), ("json", '"duration": 2.0')])
def test_transcribe_prints_the_text_of_a_file(form: str, printed: str, tmp_path: Path):
    (tmp_path / "a.mp3").write_bytes(speech.wav(speech.tone(2.0)))
    done = steno("transcribe", str(tmp_path / "a.mp3"), "--engine", "fake", "--no-vad", "--format", form)
    assert done.returncode == 0
    assert printed in done.stdout


def test_transcribe_says_what_is_wrong_with_a_file(tmp_path: Path):
    (tmp_path / "a.wav").write_text("no audio")
    failed = steno("transcribe", str(tmp_path / "a.wav"), "--engine", "fake")
    assert failed.returncode == 1
    assert "Invalid file format" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert told("transcribe", str(tmp_path / "absent.wav")).exit_code == 2
