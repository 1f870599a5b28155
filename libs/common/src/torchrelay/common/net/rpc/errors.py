"""Errors on the wire: a ``TorchrelayError`` becomes its gRPC status, with its code, field and retry time in the
trailing metadata, and is restored from them on the client.
"""

from __future__ import annotations

from typing import TypeAlias

import grpc

from torchrelay.common.errors import TorchrelayError, Unavailable, error_class

_CODE, _FIELD, _RETRY = "torchrelay-code", "torchrelay-field", "torchrelay-retry-after-s"
_BINARY_FIELD = "torchrelay-field-bin"  # of a field that is not ASCII; gRPC carries binary metadata under such names
# Metadata above 8 KiB ends a call without its cause. Both are cut where a tenant's names make them longer.
_MAX_FIELD_BYTES, _MAX_MESSAGE_CHARS, _MAX_MESSAGE_BYTES = 1024, 1024, 6144

Status: TypeAlias = tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]


def error_from_rpc(error: grpc.aio.AioRpcError) -> TorchrelayError:
    """The error raised by the server, or ``Unavailable`` when it could not be reached.

    gRPC's own text for the latter names addresses, and messages of errors reach tenants: ``logged_cause`` has it.
    """
    trailing = {str(key): value for key, value in (error.trailing_metadata() or ())}
    code, field = trailing.get(_CODE), trailing.get(_FIELD) or trailing.get(_BINARY_FIELD)
    if code is None and error.code() == grpc.StatusCode.UNAVAILABLE:
        return Unavailable("the peer cannot be reached")
    message = error.details() or "the call failed without a message"
    if code is None:
        return TorchrelayError(message)
    kind = error_class(str(code))
    if (retry_after_s := trailing.get(_RETRY)) is not None:
        return kind(message, field=text_of(field), retry_after_s=float(str(retry_after_s)))
    return kind(message, field=text_of(field))


def is_from_peer(error: grpc.aio.AioRpcError) -> bool:
    """Whether the peer itself raised the error; otherwise the call broke off."""
    return any(key == _CODE for key, _ in error.trailing_metadata() or ())


def logged_cause(error: TorchrelayError) -> str:
    """The message for logs only: includes gRPC's own text, which may name addresses, if gRPC raised the cause."""
    cause = error.__cause__
    details = cause.details() if isinstance(cause, grpc.aio.AioRpcError) else None
    return f"{error.message}: {details}" if details and details != error.message else error.message


def text_of(value: str | bytes | None) -> str | None:
    return value.decode(errors="ignore") if isinstance(value, bytes) else value


def status_of(error: TorchrelayError) -> Status:
    """The arguments of ``abort``, which is called when the error is gone: gRPC keeps what abort raises, and with it the
    error's frames and the request in them, until the next collection of garbage.
    """
    trailing: list[tuple[str, str | bytes]] = [(_CODE, error.code)]
    if error.field:
        field = error.field.encode(errors="replace")[:_MAX_FIELD_BYTES]
        is_plain = error.field.isascii() and error.field.isprintable()
        trailing.append((_FIELD, field.decode()) if is_plain else (_BINARY_FIELD, field))
    if error.retry_after_s is not None:
        trailing.append((_RETRY, str(error.retry_after_s)))
    return grpc.StatusCode[error.grpc_status], _cut(error.message), tuple(trailing)


def _cut(message: str) -> str:
    """The beginning of a message that fits. gRPC sends what is not printable ASCII as ``%C3%A9``: 12 bytes an emoji."""
    num_bytes = 0
    for place, character in enumerate(message[:_MAX_MESSAGE_CHARS]):
        is_plain = " " <= character <= "~" and character != "%"
        num_bytes += 1 if is_plain else 3 * len(character.encode(errors="replace"))
        if num_bytes > _MAX_MESSAGE_BYTES:
            return message[:place]
    return message[:_MAX_MESSAGE_CHARS]
