"""The location of an embedded install's published packs: its home, another folder, or an object store."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from torchrelay.cli.errors import CliError

_OBJECT_STORES = ("s3", "gs", "az")


def remote_url(given: str, default: Path) -> str:
    """The URL for ``given``, a URL or a folder; ``default`` if it is empty. Raises ``CliError``."""
    if not given:
        return default.absolute().as_uri()
    if ":" not in given.partition("/")[0]:  # else the typo s3:/BUCKET would be a local folder
        return Path(given).expanduser().absolute().as_uri()
    try:
        parts = urlsplit(given)
    except ValueError as error:
        raise CliError(f"{given!r} is not a valid pack location: {error}", "use a folder or an s3:// URL") from error
    if parts.scheme in _OBJECT_STORES and parts.netloc:
        return given
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return given
    raise CliError(f"{given!r} is not a valid pack location", "use a folder, s3://BUCKET/PREFIX, gs://... or az://...")
