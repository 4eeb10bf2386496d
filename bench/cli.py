"""`steno bench`: measure, compare, report."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from bench import compare as comparing
from bench import report as reports
from bench import selftest as selftesting
from bench.clients import Door
from bench.corpus import CorpusError, load_corpus
from bench.metrics import METRICS
from bench.reading import read_levels
from bench.results import Result
from bench.search import parse_slos
from bench.sweep import LEVELS, Measured, Plan, Progress, Sweep, Target, TargetError

OUT = Path("bench/out")
KEPT, NOT_KEPT, USAGE, UNDECIDED, INTERRUPTED = 0, 1, 2, 3, 130

out, err = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True, highlight=False)

_FORMULAS = "\n\n".join(
    f"{m.name}{f' [{m.unit}]' if m.unit else ''} = {m.formula} ({', '.join(sorted(m.workloads))})" for m in METRICS
)
_EPILOG = (
    f"Formulas:\n\n{_FORMULAS}\n\nRTFx = seconds of audio of requests that succeeded / wall seconds\n\n"
    "Percentiles interpolate linearly. Exit status: 0, also if the service level is kept; 1 if it is not, or nothing "
    "succeeded; 2 for a wrong command; 3 if it cannot be told."
)

app = typer.Typer(
    invoke_without_command=True, add_completion=False, help="Measure how many requests and live streams a server carries."
)


@app.callback(epilog=_EPILOG)
def bench(
    context: typer.Context,
    *,
    workload: Annotated[
        Literal["file", "stream", "live", "realtime"],
        typer.Option(
            help="`file`: upload, JSON; `stream`: upload, events; `live`: paced in real time; `realtime`: so over a WebSocket."
        ),
    ] = "stream",
    concurrency: Annotated[
        str | None, typer.Option(help=f"Requests at once, each a level. [default: {','.join(map(str, LEVELS))}]")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Instead: arrivals a second, at random times (an open load), each a level.")
    ] = None,
    n: Annotated[int, typer.Option(min=1, help="Requests of each level.")] = 50,
    slo: Annotated[
        str | None,
        typer.Option(
            help="Limits, as first_text_p95=1000,final_p95=1500. Without --concurrency: find the most that keep them."
        ),
    ] = None,
    most: Annotated[int, typer.Option("--max-concurrency", min=1, help="A search goes no further.")] = 256,
    url: Annotated[str, typer.Option(help="The server, as http://host:port.")] = "http://127.0.0.1:8000",
    label: Annotated[str, typer.Option(help="Its name in the report.")] = "steno",
    against: Annotated[
        str | None,
        typer.Option(
            help="A second server, as name=http://host:port: both in turn, and their ratios. With live, a ws://host:port is "
            "spoken to over a WebSocket."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="With --against: turns of each server within a level.")] = 2,
    corpus: Annotated[
        Path | None, typer.Option(exists=True, help="A folder (x.wav, x.txt) or a JSONL manifest; else built-in speech.")
    ] = None,
    clip_seconds: Annotated[
        float, typer.Option(min=0, help="Join clips until they are so long. [default: 15 for live, else 0]")
    ] = 0.0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before each level that are not counted.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the order of clips, and of random arrivals.")] = 0,
    model: Annotated[str, typer.Option(help="What to ask for. [default: the first that the server lists]")] = "",
    language: Annotated[str, typer.Option(help="Of the speech; else the server detects it.")] = "",
    api_key: Annotated[str, typer.Option(envvar="STENO_BENCH_API_KEY", help="The server's key.")] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Take any certificate of an https server.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds until a request has failed; live sessions have their length beside it.")
    ] = 300.0,
    packet_ms: Annotated[float, typer.Option(min=1, help="Audio that a live sender sends at a time.")] = 100.0,
    door: Annotated[
        Door, typer.Option(help="For live: one `duplex` request, a `session` resource, or a `realtime` WebSocket.")
    ] = "duplex",
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Of the machine; gives the cost of an hour of audio.")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where results are written.")] = OUT,
    name: Annotated[
        str | None, typer.Option(help="Of the files. [default: loadtest-concurrency, loadtest-rate, or slo]")
    ] = None,
    progress: Annotated[str, typer.Option(help="`bars`, `json` (a line for each change, on stdout), or `none`.")] = "bars",
) -> None:
    """Measure how many requests and live streams a server carries."""
    if context.invoked_subcommand is not None:
        return
    with _usage_errors():
        if concurrency and rate:
            raise ValueError("--concurrency and --rate exclude each other")
        loads = _loads(rate, float) if rate else _loads(concurrency, int) if concurrency else () if slo else LEVELS
        if not loads and against:
            raise ValueError("a search measures one server; name the levels of a comparison with --concurrency")
        if progress not in ("bars", "json", "none"):
            raise ValueError(f"--progress is bars, json or none, and not {progress!r}")
        if workload == "realtime":
            workload, door = "live", "realtime"
        plan = Plan(
            workload=workload,
            loads=loads,
            is_open=bool(rate),
            n=n,
            warmup=warmup,
            rounds=rounds,
            seed=seed,
            clip_seconds=clip_seconds,
            slos=parse_slos(slo, workload) if slo else (),
            most=most,
            price_per_hour=price_per_hour,
            api_key=api_key,
            model=model,
            language=language,
            insecure=insecure,
            timeout=timeout,
            packet_seconds=packet_ms / 1000,
            door=door,
        )
        targets = [Target(label, url)]
        if against:
            other, _, other_url = against.partition("=")
            if not other_url.startswith(("http", "ws")) or other == label:
                raise ValueError("--against takes another name and an address, as sync=http://127.0.0.1:8001")
            targets.append(Target(other, other_url))
        clips = load_corpus(corpus)
    name = name or ("loadtest-rate" if rate else "loadtest-concurrency" if loads else "slo")
    with _shown(progress) as show:
        try:
            measured = asyncio.run(Sweep(plan, targets, clips, on_progress=show).run())
        except TargetError as error:
            err.print(f"steno bench: {error}", markup=False)
            raise typer.Exit(NOT_KEPT) from error
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    _finish(measured, folder, name, quiet=progress == "json")


def _finish(measured: list[Measured], folder: Path, name: str, *, quiet: bool) -> None:
    """Write and show what was measured, and leave with its exit status."""
    console = err if quiet else out
    folder.mkdir(parents=True, exist_ok=True)
    for i, one in enumerate(measured):
        path = folder / (f"{name}.json" if i == 0 else f"{name}.{one.result.label}.json")
        written = reports.save(one.result, one.records, path)
        reports.show(one.result, console)
        console.print(f"  {', '.join(str(p) for p in written)}\n", markup=False, highlight=False)
    if len(measured) > 1:
        (a, b) = measured
        _compare((a.result, a.records), (b.result, b.records), folder / f"{name}.compare.md", console)
    raise typer.Exit(exit_status(measured[0].result))


def exit_status(result: Result) -> int:
    """Say in a number whether the service level was kept."""
    levels = result.levels
    if not any(level.ok for level in levels):
        return NOT_KEPT
    if not all(level.client.valid for level in levels):
        return UNDECIDED
    if result.slo is not None:
        if not result.slo.conclusive:
            return UNDECIDED
        return KEPT if result.slo.last_passing is not None else NOT_KEPT
    verdicts = [verdict for level in levels for verdict in level.slo.values()]
    if "fails" in verdicts:
        return NOT_KEPT
    return UNDECIDED if "open" in verdicts else KEPT


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A result.")],
    b: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Another; its rows lie beside it.")],
    file: Annotated[Path | None, typer.Option("--out", help="Write the table here too, as Markdown.")] = None,
) -> None:
    """Compare two results: ratios A / B with intervals."""
    with _usage_errors():
        _compare(comparing.load_run(a), comparing.load_run(b), file, out)


def _compare(a: comparing.Run, b: comparing.Run, file: Path | None, console: Console) -> None:
    ratios = comparing.compare(a, b)
    notes = comparing.unmatched(a[0], b[0])
    reports.show_ratios(ratios, a[0].label, b[0].label, console)
    for note in notes:
        console.print(f"  {note}", markup=False, highlight=False)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(reports.ratios_markdown(ratios, a[0], b[0], notes), encoding="utf-8")
        console.print(f"  {file}", markup=False, highlight=False)


@app.command()
def report(
    result: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A result; its rows lie beside it.")] = OUT
    / "loadtest-concurrency.json",
) -> None:
    """Show a result again, and write its Markdown and its page anew."""
    with _usage_errors():
        found, records = comparing.load_run(result)
        found.reading = read_levels(found)
    written = reports.save(found, records, result)
    reports.show(found, out)
    out.print(f"  {', '.join(map(str, written))}", markup=False, highlight=False)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a result."""
    print(json.dumps(Result.model_json_schema(), indent=2))


@app.command()
def selftest(
    sessions: Annotated[int, typer.Option(min=1, help="Live sessions at once.")] = 200,
    seconds: Annotated[float, typer.Option(min=1, help="Their length.")] = 10.0,
) -> None:
    """Measure the client itself: are its times right, and how many speakers does it carry on this machine?"""
    checks = asyncio.run(selftesting.run(sessions, seconds))
    for check in checks:
        out.print(f"{'ok  ' if check.good else 'POOR'}  {check.name}: {check.found}", style=None if check.good else "bold red")
    raise typer.Exit(KEPT if all(check.good for check in checks) else NOT_KEPT)


# --- arguments and progress -----------------------------------------------------------------------------------------


@contextmanager
def _usage_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, CorpusError, OSError) as error:
        err.print(f"steno bench: {error}", markup=False)
        raise typer.Exit(USAGE) from error


def _loads(text: str, kind: Callable[[str], float]) -> tuple[float, ...]:
    try:
        loads = tuple(sorted({kind(part) for part in text.split(",")}))
    except ValueError as error:
        raise ValueError(f"{text!r} is no list of numbers, as 1,4,8") from error
    if loads[0] <= 0:
        raise ValueError("a level is greater than 0")
    return loads


@contextmanager
def _shown(how: str) -> Iterator[Callable[[Progress], None]]:
    if how == "bars":
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[live]}"),
        )
        with Bars(*columns, console=err, refresh_per_second=4) as bars:
            yield _BarsOf(bars).show
    elif how == "json":
        yield lambda progress: print(json.dumps({"type": "progress", **asdict(progress)}), flush=True)
    else:
        yield lambda progress: None


class _BarsOf:
    """A bar for each level of each server."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[tuple[str, float, bool], TaskID] = {}

    def show(self, progress: Progress) -> None:
        sustained = progress.phase == "sustaining"
        if progress.phase == "warm-up" and (progress.target, progress.load, False) in self._tasks:
            return
        key = (progress.target, progress.load, sustained)
        if key not in self._tasks:
            title = f"{progress.target} {progress.load:g}{' sustained' if sustained else ''}"
            self._tasks[key] = self._bars.add_task(title, total=progress.total, live="warming up")
        live = f"in flight {progress.in_flight}  RTFx {progress.rtfx:.2f}"
        if progress.p50_ms is not None and progress.p95_ms is not None:
            live += f"  p50 {progress.p50_ms:,.0f} ms  p95 {progress.p95_ms:,.0f} ms"
        if progress.failed:
            live += f"  failed {progress.failed}"
        if progress.phase == "warm-up":
            live = "warming up"
        self._bars.update(self._tasks[key], completed=progress.done, total=progress.total, live=live)
