"""A result for people: a table on the terminal, Markdown, and one HTML page with plots that needs nothing else."""

import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.compare import Ratio
from bench.metrics import BY_NAME, MAIN, METRICS
from bench.record import Record, write_rows
from bench.results import Distribution, Level, Result
from bench.statistics import least_n

WIDEST_TABLE = 160  # characters; a narrow terminal breaks the lines rather than hide figures
COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2")
INK = "#123456"  # stands for the page's own text colour until the plot is drawn


def save(result: Result, records: Sequence[Record], path: Path) -> list[Path]:
    """Write the result as JSON, its rows as JSON lines, and as Markdown and HTML beside it."""
    result.save(path)
    rows, text, page = (path.with_suffix(suffix) for suffix in (".jsonl", ".md", ".html"))
    write_rows(rows, records)
    text.write_text(markdown(result), encoding="utf-8")
    page.write_text(page_of(result, records), encoding="utf-8")
    return [path, rows, text, page]


# --- tables ---------------------------------------------------------------------------------------------------------


def table_of(result: Result) -> tuple[list[str], list[list[str]]]:
    """Return the headings, with units, and a row for each level."""
    main = MAIN[result.workload]
    rate = "arrivals/s" if result.load_kind == "open" else "at once"
    headings = [rate, "ok", f"{main} p50 ms", f"{main} p95 ms", f"{main} p99 ms"]
    first = {"stream": "ttft", "live": "first_text"}.get(result.workload)
    if first:
        headings += [f"{first} p50 ms", f"{first} p95 ms"]
    if result.workload == "stream":
        headings.append("tpot p50 ms")
    if result.workload == "live":
        headings += ["lag p95 ms", "partials", "flicker"]
    headings += ["RTFx", "req/s"]
    headings += ["tok/s"] * any(level.tokens_per_second is not None for level in result.levels)
    headings += ["WER"] * any(level.wer is not None for level in result.levels)
    headings += ["cost/audio h"] * any(level.cost_per_audio_hour is not None for level in result.levels)
    rows = []
    for level in result.levels:
        metrics = level.metrics
        row = [
            f"{level.load:g}",
            f"{level.ok}/{level.sent}",
            *(_figure(getattr(metrics[main], p)) for p in ("p50", "p95", "p99")),
        ]
        if first:
            row += [_figure(metrics[first].p50), _figure(metrics[first].p95)]
        if result.workload == "stream":
            row.append(_figure(metrics["tpot"].p50, 1))
        if result.workload == "live":
            row += [_figure(metrics["lag"].p95), _figure(metrics["partials"].mean, 1), _figure(metrics["flicker"].mean, 1)]
        row += [_figure(level.rtfx, 2), _figure(level.requests_per_second, 2)]
        row += [_figure(level.tokens_per_second, 1)] * ("tok/s" in headings)
        row += [_percent(level.wer)] * ("WER" in headings)
        row += [_figure(level.cost_per_audio_hour, 4)] * ("cost/audio h" in headings)
        rows.append(row)
    return headings, rows


def detail_of(level: Level) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of all that was measured at a level."""
    headings = ["", "n", "mean", "p50", "p95", "p99", "max", "95% of p50", "95% of p95"]

    def row(name: str, d: Distribution, digits: int) -> list[str]:
        figures = [_figure(value, digits) for value in (d.mean, d.p50, d.p95, d.p99, d.max)]
        bounds = [d.intervals.get("p50"), d.intervals.get("p95")]
        spans = [f"{_figure(b.low, digits)} to {_figure(b.high, digits)}" if b else f"n={d.n} is too few" for b in bounds]
        return [name, str(d.n), *figures, *spans]

    rows = []
    for name, found in level.metrics.items():
        metric = BY_NAME.get(name)
        unit = f" ({metric.unit})" if metric and metric.unit else ""
        rows.append(row(name + unit, found, 0 if unit == " (ms)" and name != "tpot" else 1))
    rows += [row(f"server: {name}", found, 1) for name, found in level.server.items()]
    return headings, rows


def notes_of(result: Result, *, with_answer: bool = True) -> list[str]:
    """Return what must be said beside the table."""
    notes = list(result.reading)
    if result.slo and with_answer:
        cost = next((level.cost_per_audio_hour for level in result.levels if level.load == result.slo.last_passing), None)
        notes.insert(0, result.slo.words + ("" if cost is None else f" An hour of audio costs {cost:.4f} there."))
    elif not result.slo and any(level.slo for level in result.levels):
        for level in result.levels:
            verdicts = ", ".join(f"{name} {verdict}" for name, verdict in level.slo.items())
            notes.append(f"At {level.load:g}: service level {'kept' if level.slo_holds else 'not kept'} ({verdicts}).")
    short = [level for level in result.levels if 0 < level.ok < least_n(0.95)]
    if short:
        names = ", ".join(f"{level.load:g}" for level in short)
        notes.append(
            f"At {names} there are too few requests to bound a p95 (59) or a p99 (299): those figures may lie far off."
        )
    return notes


def show(result: Result, console: Console) -> None:
    """Print the table, and what it says."""
    headings, rows = table_of(result)
    _print_table(f"{result.label}: {result.workload}, {result.target}", headings, rows, console)
    for note in notes_of(result):
        console.print(f"  {note}", markup=False, highlight=False)


def markdown(result: Result) -> str:
    """Write the result as Markdown."""
    headings, rows = table_of(result)
    lines = [f"# {result.workload} against {result.label}", "", f"`{result.command}`", "", _machine_line(result), ""]
    lines += _markdown_table(headings, rows)
    lines += ["", *(f"- {note}" for note in notes_of(result)), ""]
    for level in result.levels:
        lines += [
            f"## {_level_title(result, level)}",
            "",
            *_markdown_table(*detail_of(level)),
            "",
            f"{_health_line(level)}",
            "",
        ]
    lines += ["## Formulas", "", *(f"- `{name}`: {formula}" for name, formula in formulas(result.workload)), ""]
    return "\n".join(lines)


def _markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---:"] * len(headings), *rows)]


def formulas(workload: str) -> list[tuple[str, str]]:
    """Return each metric of a workload with its unit and formula."""
    own = [(m.name, f"{m.formula}{f' ({m.unit})' if m.unit else ''}") for m in METRICS if workload in m.workloads]
    return [
        *own,
        ("RTFx", "seconds of audio of requests that succeeded / wall seconds"),
        ("WER", "word error rate, without case and punctuation"),
    ]


def show_ratios(ratios: Sequence[Ratio], a: str, b: str, console: Console) -> None:
    """Print a comparison."""
    _print_table(f"{a} / {b}", *ratio_rows(ratios, a, b), console)


def _print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], console: Console) -> None:
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    Console(file=console.file, width=max(console.width, WIDEST_TABLE)).print(table)


def ratio_rows(ratios: Sequence[Ratio], a: str, b: str) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of a comparison."""
    rows = [
        [
            f"{r.load:g}",
            r.what,
            _figure(r.a, 2 if r.better == "more" else 1),
            _figure(r.b, 2 if r.better == "more" else 1),
            _figure(r.ratio, 3),
            "-" if r.low is None else f"{r.low:.3f} to {r.high:.3f}",
            r.better,
        ]
        for r in ratios
    ]
    return ["at once", "figure", a, b, "ratio", "95%", "better"], rows


def ratios_markdown(ratios: Sequence[Ratio], a: Result, b: Result, notes: Sequence[str]) -> str:
    """Write a comparison as Markdown."""
    lines = [f"# {a.label} / {b.label}, {a.workload}", "", f"`{a.command}`", "", _machine_line(a), ""]
    lines += _markdown_table(*ratio_rows(ratios, a.label, b.label))
    return "\n".join([*lines, "", *(f"- {note}" for note in notes), ""])


def _machine_line(result: Result) -> str:
    m = result.machine
    memory = f", {m.memory_gib:g} GiB" if m.memory_gib else ""
    served = ", ".join(f"{name} {value}" for name, value in result.server.items())
    packages = ", ".join(f"{name} {value}" for name, value in result.versions.items())
    where = f"{result.created}; {m.cpu}, {m.cores} cores{memory}; {served}; {packages}; Python {m.python}"
    return f"{where}; seed {result.settings.get('seed')}"


def _level_title(result: Result, level: Level) -> str:
    return f"{level.load:g} {'arrivals a second' if result.load_kind == 'open' else 'at once'}"


def _health_line(level: Level) -> str:
    client, flight = level.client, level.in_flight
    said = (
        f"{level.sent} requests in {level.wall_seconds:.1f} s; "
        f"in flight {flight.mean:.2f} on average, {flight.min} to {flight.max}; "
        f"{level.unique_audio_seconds:.0f} s of different audio; client: {client.cpu_share:.0%} of a core"
    )
    if client.loop_lag_ms_p99 is not None:
        said += f", loop lag p99 {client.loop_lag_ms_p99:.1f} ms"
    if client.send_late_ms_p99 is not None:
        said += f", packets late p99 {client.send_late_ms_p99:.1f} ms"
    return said + "." if client.valid else f"{said}. INVALID: {client.why}."


def _figure(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


# --- the page -------------------------------------------------------------------------------------------------------

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --mark: #2563eb;
  --ink: #1f2937; --soft: #6b7280; --line: #e5e7eb; --page: #fff; --card: #f9fafb; }}
@media (prefers-color-scheme: dark) {{ :root {{ --mark: #60a5fa;
  --ink: #e5e7eb; --soft: #9ca3af; --line: #374151; --page: #111827; --card: #1f2937; }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; margin: 0 0 .25rem; }} h2 {{ font-size: 1.2rem; margin: 2rem 0 .5rem; }}
.soft {{ color: var(--soft); font-size: .875rem; overflow-wrap: anywhere; }}
.answer {{ font-size: 1.25rem; border-left: 4px solid var(--mark); padding: .5rem 1rem; background: var(--card); }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(28rem, 100%), 1fr)); gap: 1rem; }}
figure {{ margin: 0; padding: .75rem; background: var(--card); border-radius: .5rem; }}
figure svg {{ width: 100%; height: auto; color: var(--ink); }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .75rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }} code {{ font-size: .875em; overflow-wrap: anywhere; }}
details {{ margin: .5rem 0; }} summary {{ cursor: pointer; }}
</style></head><body>
<h1>{heading}</h1>
<p class="soft"><code>{command}</code><br>{machine}</p>
{answer}
<div class="wide">{table}</div>
<ul>{notes}</ul>
<div class="plots">{plots}</div>
<h2>Every figure</h2>
{details}
<h2>Formulas</h2>
<ul>{formulas}</ul>
</body></html>
"""


def page_of(result: Result, records: Sequence[Record]) -> str:
    """Write the result as one HTML page."""
    e = html.escape
    details = []
    for level in result.levels:
        headings, rows = detail_of(level)
        details.append(
            f"<details><summary>{e(_level_title(result, level))}</summary><div class=wide>{_html_table(headings, rows)}</div>"
            f"<p class=soft>{e(_health_line(level))}</p></details>"
        )
    return _PAGE.format(
        title=e(f"Steno bench: {result.workload} against {result.label}"),
        heading=e(f"{result.workload.capitalize()} load against {result.label}"),
        command=e(result.command),
        machine=e(_machine_line(result)),
        answer=f'<p class="answer">{e(result.slo.words)}</p>' if result.slo else "",
        table=_html_table(*table_of(result)),
        notes="".join(f"<li>{e(note)}</li>" for note in notes_of(result, with_answer=False)),
        plots="".join(f"<figure>{plot}</figure>" for plot in _plots(result, records)),
        details="".join(details),
        formulas="".join(f"<li><code>{e(name)}</code>: {e(formula)}</li>" for name, formula in formulas(result.workload)),
    )


def _html_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _plots(result: Result, records: Sequence[Record]) -> list[str]:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes

    style: Any = {
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    }
    unit = "arrivals a second" if result.load_kind == "open" else "requests at once"
    main = MAIN[result.workload]
    levels = [level for level in result.levels if level.ok]
    loads = [level.load for level in levels]

    def latency(axes: Axes) -> None:
        names = [main] + [n for n in ("ttft", "first_text") if n in BY_NAME and result.workload in BY_NAME[n].workloads]
        for name, colour in zip(names, COLOURS, strict=False):
            for which, dash in (("p50", "-"), ("p95", "--")):
                points = [getattr(level.metrics[name], which) for level in levels]
                axes.plot(loads, points, dash, marker="o", color=colour, label=f"{name} {which}")
                bounds = [level.metrics[name].intervals.get(which) for level in levels]
                for load, bound in zip(loads, bounds, strict=True):
                    if bound:
                        axes.plot([load, load], [bound.low, bound.high], color=colour, alpha=0.4, linewidth=4)
        axes.set(title="Latency", xlabel=unit, ylabel="ms", xticks=loads, ylim=(0, None))
        axes.legend()

    def throughput(axes: Axes) -> None:
        axes.plot(loads, [level.rtfx for level in levels], marker="o", color=COLOURS[0])
        axes.set(title="Throughput", xlabel=unit, ylabel="seconds of audio a second", xticks=loads, ylim=(0, None))

    def spread(axes: Axes) -> None:
        name = {"stream": "ttft", "live": "first_text"}.get(result.workload, main)
        for level, colour in zip(levels, COLOURS * len(levels), strict=False):
            values = sorted(
                value for r in records if r.level == level.load and r.ok and (value := BY_NAME[name].of(r)) is not None
            )
            share = [100 * (i + 1) / len(values) for i in range(len(values))]
            axes.step(values, share, where="post", color=colour, label=f"{level.load:g}")
        axes.set(
            title=f"Distribution of {name}", xlabel="ms", ylabel="% of requests at or below", xlim=(0, None), ylim=(0, 101)
        )
        axes.legend(title=unit)

    def timeline(axes: Axes) -> None:
        record = next(r for r in records if r.ok and r.timeline)
        for kind, colour in (("partial", COLOURS[1]), ("confirmed", COLOURS[0])):
            points = [(at, count) for at, kind_at, count in record.timeline if kind_at == kind]
            if points:
                axes.plot([at for at, _ in points], [count for _, count in points], ".", color=colour, label=f"words, {kind}")
        axes.axvline(record.audio_seconds, color=INK, linestyle=":", label="end of speech")
        if record.ended is not None:
            axes.axvline(record.ended - record.sent, color=COLOURS[2], linestyle="-", label="final text")
        axes.set(title="One live session", xlabel="seconds since its speaker began", ylabel="words shown", ylim=(0, None))
        axes.legend()

    wanted = [latency, throughput, spread] if levels else []
    if any(r.ok and r.timeline for r in records):
        wanted.append(timeline)
    drawn = []
    with mpl.rc_context(style):
        for draw in wanted:
            figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
            draw(axes)
            axes.grid(alpha=0.25)
            out = io.StringIO()
            figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
            plt.close(figure)
            drawn.append(out.getvalue()[out.getvalue().index("<svg") :].replace(INK, "currentColor"))
    return drawn
