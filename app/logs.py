"""What is logged, and how: lines for people, or JSON for machines. Each says to which request it belongs.

No key, no audio and no transcript is ever logged.
"""

import logging
import os
import sys
from contextvars import ContextVar
from typing import Literal

from pythonjsonlogger.json import JsonFormatter

LogFormat = Literal["console", "json"]

CONSOLE = "%(asctime)s %(levelname)-7s %(request_id)s %(name)s: %(message)s"
JSON = "%(levelname)s %(name)s %(request_id)s %(message)s"

request_id: ContextVar[str] = ContextVar("request_id", default="-")  # of the request on whose behalf something happens


def set_up(level: str, form: LogFormat = "console") -> None:
    """Log to the standard error output, from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_with_request_id)
    if form == "json":
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # vLLM's lines come here too, instead of on the standard output
        names = {"levelname": "level", "name": "logger"}
        handler.setFormatter(JsonFormatter(JSON, rename_fields=names, timestamp=True))
    else:
        handler.setFormatter(logging.Formatter(CONSOLE))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        for noisy in ("vllm", "asyncio", "httpx", "filelock", "multipart"):
            logging.getLogger(noisy).setLevel(logging.ERROR)


def _with_request_id(record: logging.LogRecord) -> bool:
    record.request_id = request_id.get()
    return True
