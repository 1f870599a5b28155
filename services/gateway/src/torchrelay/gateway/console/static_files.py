"""The console's static files, read once; they name no tenant and need no key."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.responses import Response

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@cache
def static_files() -> dict[str, Response]:
    """Answers by path; the page itself is at ``/console``."""
    root = Path(__file__).with_name("static")
    served = {
        f"/console/{file.relative_to(root).as_posix()}": Response(file.read_bytes(), 200, _HEADERS, _TYPES[file.suffix])
        for file in root.rglob("*")
        if file.suffix in _TYPES
    }
    return served | {"/console": served["/console/index.html"]}
