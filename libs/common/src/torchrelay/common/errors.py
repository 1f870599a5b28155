"""The tree of errors that cross a service's border.

    TorchrelayError
    |-- InvalidRequest            the caller can mend it; names the field
    |   |-- ContextLengthExceeded
    |   `-- UploadRefused         names the file
    |-- Unauthenticated           no key, unknown key, revoked key
    |-- PermissionDenied          a good key, but not for this
    |-- NotFound                  or another tenant's: nobody can tell which
    |-- Conflict                  the state does not allow it (wrong offset, stale epoch, slot taken)
    |   `-- StaleEpoch
    |-- QuotaExceeded             storage, budget
    |-- Overloaded                try again later; says when
    |   |-- QueueFull
    |   `-- RateLimited
    |-- Unavailable               a part of the platform is away; try again
    |-- DeadlineExceeded          the request's time was over before it was done
    `-- DataCorrupted             bytes did not match their digest

Each carries one sentence for the user in ``message`` and, where it applies, the ``field`` (JSON field, setting or file)
it is about. ``code`` is the stable name that travels over gRPC (trailing metadata) and REST (OpenAI's error shape).
"""

from __future__ import annotations

from typing import ClassVar


class TorchrelayError(Exception):
    """An error with a name, one sentence for the user, and its place in gRPC and HTTP."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"  # the name in grpc.StatusCode: this module is read where there is no gRPC

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidRequest(TorchrelayError):
    code = "invalid_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class UploadRefused(InvalidRequest):
    """A model folder that cannot be published; ``field`` is the file, ``message`` names what in it is wrong."""

    code = "upload_refused"
    http_status = 422


class Unauthenticated(TorchrelayError):
    code = "invalid_api_key"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class PermissionDenied(TorchrelayError):
    code = "permission_denied"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class NotFound(TorchrelayError):
    code = "not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class Conflict(TorchrelayError):
    code = "conflict"
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class StaleEpoch(Conflict):
    """A command of a scheduler that is no longer the active one."""

    code = "stale_epoch"


class QuotaExceeded(TorchrelayError):
    code = "quota_exceeded"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class Overloaded(TorchrelayError):
    """Try again after ``retry_after_s`` seconds."""

    code = "overloaded"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, field=field)
        self.retry_after_s = retry_after_s


class QueueFull(Overloaded):
    code = "queue_full"


class RateLimited(Overloaded):
    code = "rate_limited"


class Unavailable(TorchrelayError):
    code = "unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class DeadlineExceeded(TorchrelayError):
    code = "deadline_exceeded"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class DataCorrupted(TorchrelayError):
    code = "data_corrupted"
    grpc_status = "DATA_LOSS"


def _tree(root: type[TorchrelayError]) -> dict[str, type[TorchrelayError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def error_class(code: str) -> type[TorchrelayError]:
    """The class whose ``code`` this is; ``TorchrelayError`` itself for a code this version does not know."""
    return _tree(TorchrelayError).get(code, TorchrelayError)
