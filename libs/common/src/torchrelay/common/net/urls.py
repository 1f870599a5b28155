"""URLs that contain credentials: for display without them, and taken apart."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

_SECRET = re.compile(r"((?:password|token|secret|key)=)[^&#]*", re.IGNORECASE)  # in a query


class NatsServers(NamedTuple):
    """Where to connect, and as whom; ``user`` None: without credentials."""

    urls: list[str]
    user: str | None
    password: str | None  # None with a user: the user is a token


def without_password(url: str) -> str:
    """The URL for display. It may be malformed, so anything before an @ counts as user and password."""
    scheme, slashes, rest = url.rpartition("://")
    user, at, host = rest.rpartition("@")
    name, colon, _ = user.partition(":")
    masked = f"{name}{colon}{'***' if colon else ''}{at}{host}"
    return _SECRET.sub(r"\1***", f"{scheme}{slashes}{masked}")


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
