"""URLs that contain credentials: for display without them, and taken apart."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

_SECRET = re.compile(r"((?:password|token|secret|key)=)[^&#]*", re.IGNORECASE)  # in a query
_SCHEME = re.compile(r"[a-z][\w+.-]*://", re.IGNORECASE)
_NEXT_URL = re.compile(r"(?<=[,\s])(?=[a-z][\w+.-]*://)", re.IGNORECASE)  # not at each comma: a password may have one
_TOKEN_SCHEMES = ("", "nats://", "tls://", "ws://", "wss://")  # of NATS, where a user without a password is a token


class NatsServers(NamedTuple):
    """Servers to connect to, and the credentials; ``user`` None: without credentials."""

    urls: list[str]
    user: str | None
    password: str | None  # None with a user: the user is a token


def without_password(url: str) -> str:
    """The URL, or the comma-separated list of them, for display.

    It may be malformed, so anything before an @ counts as user and password.
    """
    return _SECRET.sub(r"\1***", "".join(_without_password(part) for part in _NEXT_URL.split(url)))


def _without_password(url: str) -> str:
    scheme = _SCHEME.match(url)
    begin = scheme[0] if scheme else ""
    user, at, host = url[len(begin) :].rpartition("@")
    name, colon, _ = user.partition(":")
    if user and not colon and begin.lower() in _TOKEN_SCHEMES:
        name = "***"
    return f"{begin}{name}{colon}{'***' if colon else ''}{at}{host}"


def with_credentials(url: str, user: str, password: str) -> str:
    """``url`` for this user."""
    scheme, slashes, rest = url.partition("://")
    return f"{scheme}{slashes}{quote(user, safe='')}:{quote(password, safe='')}@{rest}"


def nats_servers(url: str) -> NatsServers:
    """The servers of a comma-separated list, and the credentials, which one of them has to name."""
    urls, user, password = [], None, None
    for seed in (part.strip() for part in url.split(",")):
        parts = urlsplit(seed if "://" in seed else f"nats://{seed}")
        if parts.username is not None:
            user = unquote(parts.username)
            password = None if parts.password is None else unquote(parts.password)
        urls.append(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
    return NatsServers(urls, user, password)
