"""Compare Steno with a peer on this machine: `python bench/peers/compare.py vllm [--model tiny.en] [-- flags of steno bench]`.

Both run at once, and the bench gives them the same requests in turn, so that what the machine does meanwhile meets both. An
idle server costs the other one nothing but memory.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
STENO_PORT, PEER_PORT = 8711, 8712
START_SECONDS = 1800
PACKAGES = ("faster-whisper==1.2.1", "fastapi", "uvicorn", "python-multipart")


def main() -> int:
    """Start both, measure, stop both. Returns the bench's exit status."""
    own, flags = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(description="Compare Steno with a peer on this machine.")
    parser.add_argument("peer", choices=["vllm", "sync-batch", "faster-whisper"])
    parser.add_argument("--model", default="tiny.en", help="a name of the shelf")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--steno", default="", help="more flags of `steno serve`")
    parser.add_argument("--peer-flags", default="", help="more flags of the peer")
    given = parser.parse_args(own)
    if any(word == "--url" or word.startswith("--against") for word in flags):
        parser.error("the servers' addresses are chosen here")
    environment = os.environ | {"OMP_NUM_THREADS": str(given.threads), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    steno = [_beside("steno"), "serve", "--port", str(STENO_PORT), "--model", given.model, *given.steno.split()]
    with _running(steno, STENO_PORT, environment, "steno"):
        peer = _peer(given.peer, given.model, given.threads) + given.peer_flags.split()
        with _running(peer, PEER_PORT, environment, given.peer):
            urls = ["--url", f"http://127.0.0.1:{STENO_PORT}", "--against", f"{given.peer}=http://127.0.0.1:{PEER_PORT}"]
            return subprocess.run([_beside("steno"), "bench", *urls, *flags], check=False).returncode


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _peer(name: str, model: str, threads: int) -> list[str]:
    """Return the command that starts a peer."""
    if name == "sync-batch":
        return [_beside("steno"), "serve", "--port", str(PEER_PORT), "--model", model, "--engine", "sync-batch"]
    if name == "vllm":
        served = ["--host", "127.0.0.1", "--port", str(PEER_PORT), "--served-model-name", "whisper-1"]
        small = ["--dtype", "bfloat16", "--enforce-eager", "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(1 << 30)]
        folder = _checkpoint(model)
        return [sys.executable, str(HERE / "vllm_serve.py"), "serve", str(folder), *served, *small]
    python = _faster_whisper_environment()
    program = str(HERE / "faster_whisper_server.py")
    return [python, program, str(_ct2_folder(model)), "--port", str(PEER_PORT), "--threads", str(threads)]


def _beside(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _checkpoint(model: str) -> Path:
    """Find the weights in the layout that vLLM reads: Steno has converted them when it started."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "steno" / "checkpoints"
    found = sorted(path for path in cache.glob(f"{model}-*") if path.is_dir())
    if not found:
        raise SystemExit(f"there is no converted {model} in {cache}")
    return found[-1]


def _ct2_folder(model: str) -> Path:
    """Lay the shelf's own files out as faster-whisper wants them."""
    code = "import sys; from engine.checkpoints import SHELF; print(*SHELF[sys.argv[1]].files(), sep='\\n')"
    listed = subprocess.run([sys.executable, "-c", code, model], check=True, capture_output=True, text=True).stdout.split()
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"steno-peer-{model}"
    folder.mkdir(exist_ok=True)
    with (folder / "model.bin").open("wb") as whole:
        for part in listed:
            whole.write(Path(part).read_bytes())
    for beside in Path(listed[0]).parent.glob("*.*"):
        if beside.suffix in (".json", ".txt"):
            (folder / beside.name).write_bytes(beside.read_bytes())
    return folder


def _faster_whisper_environment() -> str:
    """Make an environment for it beside ours, which its packages would disturb; return its Python."""
    folder = HERE.parents[1] / ".venv-faster-whisper"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES], check=True)
    return str(python)


@contextlib.contextmanager
def _running(command: list[str], port: int, environment: dict[str, str], name: str) -> Iterator[None]:
    """Run a server until left, from when it answers that it is ready."""
    print(f"starting {name} ...", file=sys.stderr, flush=True)
    log = Path(os.environ.get("TMPDIR", "/tmp")) / f"steno-peer-{name}.log"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        try:
            began = time.monotonic()
            while not (_answers(port, "/health/ready") or _answers(port, "/v1/models", steno=False)):
                if process.poll() is not None or time.monotonic() - began > START_SECONDS:
                    raise SystemExit(f"{name} did not start: {log}")
                time.sleep(1)
            print(f"{name} is ready after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            yield
        finally:
            process.terminate()


def _answers(port: int, path: str, *, steno: bool = True) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return bool(response.status == 200) and (steno or not _answers(port, "/health/live"))
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
