"""The tree of errors that cross service boundaries.

    TorchrelayError
    |-- InvalidRequest            the caller can fix it; names the field
    |   |-- ContextLengthExceeded
    |   `-- UploadRefused         names the file
    |-- Unauthenticated           no key, unknown key, revoked key
    |-- PermissionDenied          a valid key, but not for this
    |-- CallerUnknown             between services: no token of this cluster
    |-- CallerRefused             between services: a call that is another's to make
    |-- NotFound                  or another tenant's, indistinguishable
    |   `-- ModelNotFound
    |-- Conflict                  the state does not allow it (wrong offset, stale epoch, slot taken)
    |   `-- StaleEpoch
    |-- QuotaExceeded             storage, budget
    |-- Overloaded                try again later; says when
    |   |-- QueueFull
    |   |-- RateLimited
    |   `-- AtCapacity            all callers together; not the fault of this one
    |-- Unavailable               a part of the platform is down; try again; may say when
    |   `-- DiskFull              a disk of the platform is full; names the folder
    |-- DeadlineExceeded          the deadline passed first
    `-- DataCorrupted             bytes did not match their digest

``message`` is one sentence for the user, ``field`` the JSON field, setting or file at fault. ``retry_after_s``: when to
try again, where that is known. ``code`` is the stable name used over gRPC
(trailing metadata) and REST (OpenAI's error shape).
"""

from __future__ import annotations

from typing import ClassVar


class TorchrelayError(Exception):
    """An error with a code, a message for the user, and its gRPC and HTTP statuses."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"  # name in grpc.StatusCode; gRPC may not be installed

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidRequest(TorchrelayError):
    code = "invalid_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class UploadRefused(InvalidRequest):
    """A model folder that cannot be published; ``field`` is the file."""

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


class CallerUnknown(TorchrelayError):
    """A fault of the cluster's set-up, never of a tenant."""

    code = "caller_unknown"
    grpc_status = "UNAUTHENTICATED"


class CallerRefused(TorchrelayError):
    code = "caller_refused"
    grpc_status = "PERMISSION_DENIED"


class NotFound(TorchrelayError):
    code = "not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class ModelNotFound(NotFound):
    """OpenAI's clients look for this code."""

    code = "model_not_found"


class Conflict(TorchrelayError):
    code = "conflict"
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class StaleEpoch(Conflict):
    """A command from a scheduler that is no longer active."""

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
    retry_after_s: float

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_s)


class QueueFull(Overloaded):
    code = "queue_full"


class RateLimited(Overloaded):
    code = "rate_limited"


class AtCapacity(Overloaded):
    code = "at_capacity"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class Unavailable(TorchrelayError):
    code = "unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class DiskFull(Unavailable):
    """A disk of the platform is full; only its operator can free space."""

    code = "disk_full"
    http_status = 507
    grpc_status = "RESOURCE_EXHAUSTED"


class DeadlineExceeded(TorchrelayError):
    code = "deadline_exceeded"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class DataCorrupted(TorchrelayError):
    code = "data_corrupted"
    grpc_status = "DATA_LOSS"


def error_class(code: str) -> type[TorchrelayError]:
    """The class with this ``code``; ``TorchrelayError`` for an unknown one."""
    classes = [TorchrelayError]
    for known in classes:  # the list grows by the subclasses
        classes += known.__subclasses__()
    return next((known for known in classes if known.code == code), TorchrelayError)
