"""Errors in Anthropic's format."""

from __future__ import annotations

from typing import Any

from torchrelay.common.errors import ContextLengthExceeded, TorchrelayError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: TorchrelayError, request_id: str) -> dict[str, Any]:
    """The JSON body of ``error``, also used as the last event of a broken stream."""
    default = "invalid_request_error" if error.http_status < 500 else "api_error"
    kind = _TYPES.get(error.http_status, default)
    # Clients that shorten conversations by themselves know Anthropic's words for this error, and no more.
    message = error.message.partition(";")[0] if isinstance(error, ContextLengthExceeded) else error.message
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
