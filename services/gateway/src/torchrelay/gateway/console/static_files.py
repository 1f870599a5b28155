"""The console's static files, read once; they name no tenant and need no key."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

_TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
_POLICY = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

Headers = list[tuple[bytes, bytes]]


@cache
def static_files() -> dict[str, tuple[bytes, Headers]]:
    """Content and headers by path; the page itself is at ``/console``."""
    root = files("torchrelay.gateway.console") / "static"
    served = _below(root, "/console/")
    return served | {"/console": served["/console/index.html"]}


def _below(folder: Traversable, prefix: str) -> dict[str, tuple[bytes, Headers]]:
    served: dict[str, tuple[bytes, Headers]] = {}
    for entry in folder.iterdir():
        media_type = _TYPES.get(entry.name.rpartition(".")[2])
        if entry.is_dir():
            served |= _below(entry, f"{prefix}{entry.name}/")
        elif media_type is not None:
            content = entry.read_bytes()
            served[prefix + entry.name] = content, _headers(media_type, len(content))
    return served


def _headers(media_type: str, num_bytes: int) -> Headers:
    return [
        (b"content-type", media_type.encode()),
        (b"content-length", str(num_bytes).encode()),
        (b"content-security-policy", _POLICY.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-cache"),
    ]
