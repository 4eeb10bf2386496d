"""GET /: the page for people. Files as they lie here, no build; nothing is fetched from elsewhere."""

from importlib.metadata import version
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from app.languages import name_of
from engine.base import EngineUnavailableError
from routers.dependencies import AnyServices

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {path.name: path for path in STATIC.iterdir() if path.suffix in TYPES}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Permissions-Policy": "microphone=(self)",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


class LanguageChoice(BaseModel):
    """A language that the model knows."""

    code: str
    name: str


class Options(BaseModel):
    """What the page offers."""

    version: str
    models: list[str] = Field(description="The served model, then its aliases.")
    languages: list[LanguageChoice] = Field(description="None while the engine starts.")
    needs_key: bool = Field(description="Nothing works without one.")
    takes_key: bool = Field(description="Something does not.")
    max_upload_mb: int
    max_audio_minutes: float


@router.get("/")
async def index() -> Response:
    """The page."""
    return _file("index.html")


@router.get("/page/options.json")
async def options(services: AnyServices) -> Options:
    """Say what there is to choose from."""
    settings = services.settings
    try:
        codes = services.engine.limits.languages
    except EngineUnavailableError:
        codes = ()
    languages = [LanguageChoice(code=code, name=name_of(code).capitalize()) for code in codes]
    return Options(
        version=version("steno-gateway"),
        models=[model.id for model in services.models],
        languages=sorted(languages, key=lambda language: language.name),
        needs_key=bool(services.keys),
        takes_key=bool(services.keys) or not services.is_admin(""),
        max_upload_mb=settings.max_upload_mb,
        max_audio_minutes=settings.max_audio_minutes,
    )


@router.get("/page/{name}")
async def file(name: str) -> Response:
    """One of the page's files."""
    if name not in FILES:
        raise HTTPException(404)
    return _file(name)


def _file(name: str) -> Response:
    return FileResponse(FILES[name], media_type=TYPES[FILES[name].suffix], headers=HEADERS)
