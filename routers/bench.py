"""/bench: measure this gateway from outside, follow the run, read what was found."""

import html
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from app.benchmarks import BenchOrder, BenchRun
from app.errors import ForbiddenError, InvalidInputError
from app.services import Services
from routers.bodies import read_json
from routers.clients import disconnected
from routers.dependencies import AnyServices, GivenKey, ReadyServices, know_admin
from routers.schemas import Responses, errors
from routers.sse import last_number, numbered_stream

MAX_REQUEST_BYTES = 64 << 10
LEVELS = (1, 4, 8)
SLO = r"^$|^[a-z_]+_p[0-9.]+=[0-9.]+(,[a-z_]+_p[0-9.]+=[0-9.]+)*$"

router = APIRouter(prefix="/bench", tags=["bench"])


class BenchRequest(BaseModel):
    """What to measure."""

    model_config = ConfigDict(extra="forbid")

    workload: Literal["file", "stream", "live", "realtime"] = "stream"
    levels: list[int] = Field([], max_length=10, description="Requests at once, each a level; with `slo` none: search.")
    n: int = Field(50, ge=1, le=2000, description="Requests of each level.")
    slo: str = Field("", max_length=500, pattern=SLO, description="Limits, as final_p95=1500,first_text_p95=1000.")
    clip_seconds: float = Field(0, ge=0, le=600, description="Join clips until they are so long.")
    seed: int = 0

    def order(self, most: int) -> BenchOrder:
        """Return it as the bench's order.

        Raises:
            InvalidInputError: if it asks for more at once than the gateway admits: that would measure its refusals.

        """
        if not all(1 <= level <= most for level in self.levels):
            raise InvalidInputError(f"A level is from 1 to {most}.", param="levels", code="invalid_value")
        levels = tuple(sorted(set(self.levels))) or (() if self.slo else LEVELS)
        return BenchOrder(self.workload, levels, self.n, self.slo, self.clip_seconds, self.seed)


class RunBody(BaseModel):
    """A run of the bench."""

    id: str
    object: Literal["bench.run"]
    created: int
    ended: int | None
    status: Literal["running", "done", "failed", "cancelled"]
    detail: str = Field(description="Why it failed, if it did.")
    exit_status: int | None = Field(description="Of `steno bench`: 0 if the service level was kept.")
    order: dict[str, Any]
    events_url: str


class RunWithResult(RunBody):
    """A run of the bench, and what it measured."""

    result: dict[str, Any] | None = Field(description="As `steno bench schema` describes it; null while there is none.")


class RunList(BaseModel):
    """Runs of the bench, the newest first."""

    object: Literal["list"]
    data: list[RunBody]


class DeletedRun(BaseModel):
    """A run that is no more."""

    id: str
    object: Literal["bench.run"]
    deleted: Literal[True]


def _answers(kind: type[BaseModel] | None, media_type: str, *statuses: int) -> Responses:
    """Describe an answer that is JSON of a kind, or text of a media type; and the errors."""
    ok: Responses = {200: {"content": {media_type: {"schema": {"type": "string"}}}} | ({"model": kind} if kind else {})}
    return ok | errors(*statuses)


def _may_measure(request: Request, services: AnyServices, given: GivenKey) -> Services:
    """Let only who has the admin key start loads; where there is none, who sits at this machine, and no other site's page."""
    if request.method != "GET" and request.headers.get("sec-fetch-site", "none") not in {"same-origin", "none"}:
        raise ForbiddenError("A page of another site may not use the bench.")
    if not services.settings.admin_key.get_secret_value() and not services.settings.on_loopback:
        raise ForbiddenError("Without an admin key the bench is only open on a gateway that listens on the loopback.")
    know_admin(services, given)
    return services


Measurable = Annotated[Services, Depends(_may_measure)]


@router.post(
    "",
    status_code=201,
    response_model=None,
    responses=errors(400, 401, 403, 409, 413, 503) | {201: {"model": RunBody}},
    openapi_extra={
        "requestBody": {"required": True, "content": {"application/json": {"schema": BenchRequest.model_json_schema()}}}
    },
)
async def start(request: Request, services: Measurable, ready: ReadyServices) -> JSONResponse:
    """Start a run against this gateway. One runs at a time; it goes on when its client leaves."""
    wanted = await read_json(request, BenchRequest, max_bytes=MAX_REQUEST_BYTES)
    run = services.benchmarks.start(wanted.order(services.admission.most), _own_address(request))
    return JSONResponse(_described(run), 201, {"Location": f"/bench/{run.id}"})


@router.get("", response_model=None, responses=_answers(RunList, "text/html", 401, 403))
async def list_runs(services: Measurable, accept: Annotated[str, Header()] = "") -> Response:
    """List all runs, the newest first: JSON, or a page for a browser."""
    if _wants_page(accept):
        return HTMLResponse(_list_page(services.benchmarks.runs))
    return JSONResponse({"object": "list", "data": [_described(run) for run in services.benchmarks.runs]})


@router.get("/{run_id}", response_model=None, responses=_answers(RunWithResult, "text/html", 401, 403, 404))
async def retrieve(run_id: str, services: Measurable, accept: Annotated[str, Header()] = "") -> Response:
    """Describe a run with its result: JSON, or the report for a browser."""
    run = services.benchmarks.find(run_id)
    if not _wants_page(accept):
        return JSONResponse(_described(run) | {"result": run.result()})
    if run.page.is_file():
        return FileResponse(run.page, media_type="text/html")
    return HTMLResponse(_run_page(run))


@router.get(
    "/{run_id}/events",
    response_class=Response,
    responses=_answers(None, "text/event-stream", 401, 403, 404) | {204: {"description": "All has been told."}},
)
async def events(
    request: Request, run_id: str, services: Measurable, last_event_id: Annotated[str | None, Header()] = None
) -> Response:
    """Follow a run: its events so far, and those that come, until it ends."""
    run = services.benchmarks.find(run_id)
    after = last_number(last_event_id)
    if run.status != "running" and after is not None and run.events and after >= run.events[-1][0]:
        return Response(status_code=204)  # an EventSource comes back after the end, unless told not to
    return numbered_stream(services.benchmarks.follow(run, after), client_left=lambda: disconnected(request))


@router.delete("/{run_id}", responses=errors(401, 403, 404))
async def delete(run_id: str, services: Measurable) -> DeletedRun:
    """End a run if it is in progress, and forget it with its files."""
    run = services.benchmarks.find(run_id)
    await services.benchmarks.delete(run)
    return DeletedRun(id=run_id, object="bench.run", deleted=True)


def _own_address(request: Request) -> str:
    """Return where this request came in: not what its `Host` says, which the client chooses."""
    scheme, (host, port) = request.scope["scheme"], request.scope["server"]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _described(run: BenchRun) -> dict[str, Any]:
    return run.summary() | {"events_url": f"/bench/{run.id}/events"}


def _wants_page(accept: str) -> bool:
    return "text/html" in accept


# --- pages ----------------------------------------------------------------------------------------------------------

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>{refresh}<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse }} td, th {{ padding: .3rem .8rem; text-align: left; border-bottom: 1px solid #8884 }}
</style></head><body><h1>{title}</h1>{body}</body></html>"""


def _list_page(runs: list[BenchRun]) -> str:
    def row(run: BenchRun) -> str:
        levels = ", ".join(map(str, run.order.concurrency)) or run.order.slo
        cells = (run.order.workload, levels, run.status)
        link = f'<td><a href="/bench/{html.escape(run.id)}">{html.escape(run.id)}</a></td>'
        return f"<tr>{link}{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"

    rows = "".join(map(row, runs))
    table = f"<table><tr><th>run</th><th>workload</th><th>at once</th><th>status</th></tr>{rows}</table>"
    none = "<p>No run yet. Start one:</p><pre>curl -X POST -d '{}' .../bench</pre>"
    return _PAGE.format(title="Runs of the bench", refresh="", body=table if runs else none)


def _run_page(run: BenchRun) -> str:
    lately = [event for _, event in run.events if event["type"] == "bench.progress"]
    body = f"<p>It is {run.status}. {html.escape(run.detail)}</p>"
    if lately:
        last = lately[-1]
        body += f"<p>{last['phase']} at {last['load']:g}: {last['done']} of {last['total']}</p>"
    refresh = '<meta http-equiv="refresh" content="2">' if run.status == "running" else ""
    return _PAGE.format(title=html.escape(run.id), refresh=refresh, body=body)
