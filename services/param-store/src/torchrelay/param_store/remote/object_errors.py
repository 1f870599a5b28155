"""Maps errors of obstore to errors of the platform, and decides whether a retry may help."""

from __future__ import annotations

import re

from obstore.exceptions import BaseError, InvalidPathError, PermissionDeniedError, UnauthenticatedError

from torchrelay.common.errors import DataCorrupted, InvalidRequest, NotFound, TorchrelayError, Unavailable

OBJECT_ERRORS = (BaseError, FileNotFoundError)
_STATUS = re.compile(r"status code: (\d{3})")
_QUERY = re.compile(r"\?\S*")  # contains Azure's tokens
_REPLY = re.compile(r": ?<.*", re.DOTALL)  # the server's XML
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the machine's role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or the machine's service account",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or the machine's identity",
}
_TOO_SLOW, _TOO_MANY, _NO_SUCH_RANGE = 408, 429, 416


def is_transient(error: Exception) -> bool:
    """Whether a retry may help: the server is overloaded, broken or unreachable, or the reply was cut off."""
    if isinstance(error, FileNotFoundError | PermissionDeniedError | UnauthenticatedError | InvalidPathError):
        return False
    status = _status(error)
    return status is None or status >= 500 or status in (_TOO_SLOW, _TOO_MANY)


def platform_error(error: Exception, key: str, scheme: str) -> TorchrelayError:
    """The platform's error for one of ``OBJECT_ERRORS`` about the object of this key."""
    detail = _detail(error)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return Unavailable(
            f"the remote store denies access to {key}; check remote_url and the credentials "
            f"({_CREDENTIALS[scheme]}): {detail}",
            field="remote_url",
        )
    if "NoSuchBucket" in str(error):
        return Unavailable("the bucket that remote_url names does not exist", field="remote_url")
    if isinstance(error, FileNotFoundError):
        return NotFound(f"the remote store has no {key}")
    if isinstance(error, InvalidPathError):
        return InvalidRequest(f"{key!r} is not a valid key", field="key")
    if _status(error) == _NO_SUCH_RANGE:
        return DataCorrupted(f"{key} of the remote store is shorter than its manifest says")
    if is_transient(error):
        return Unavailable(f"the remote store does not serve {key}: {detail}")
    return Unavailable(f"the remote store refuses {key}: {detail}", field="remote_url")


def _status(error: Exception) -> int | None:
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def _detail(error: Exception) -> str:
    """The first line of obstore's message, without the server's reply and the URL's query."""
    first = str(error).partition("\n")[0]
    return _QUERY.sub("", _REPLY.sub("", first)).rstrip(" :")
