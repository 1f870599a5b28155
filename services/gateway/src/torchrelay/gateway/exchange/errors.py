"""Errors in OpenAI's format, on all paths whose dialect has none of its own: status, body and headers of a
``TorchrelayError``; rate limits.
"""

from __future__ import annotations

import math
from typing import TypedDict

from starlette.responses import JSONResponse

from torchrelay.common.errors import TorchrelayError, Unauthenticated
from torchrelay.gateway.core import RateLeft, RatesLeft
from torchrelay.gateway.limits.refusals import RateExceeded

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= dict.fromkeys((405, 408, 413, 414, 415, 422, 431), "invalid_request_error")
_TYPES |= {409: "conflict_error", 429: "rate_limit_error"}


class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorObject


def error_body(error: TorchrelayError) -> ErrorBody:
    """The JSON body of ``error``, also used as the last event of a broken stream."""
    return body(error.http_status, error.message, param=error.field, code=error.code)


def body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> ErrorBody:
    """The JSON body of an error without a ``TorchrelayError`` (an unknown path, a wrong method)."""
    return {"error": {"message": message, "type": _TYPES.get(status, "api_error"), "param": param, "code": code}}


def rate_headers(rates: RatesLeft) -> dict[str, str]:
    """OpenAI's headers about requests and tokens per minute; ``reset``: in how long all of them are left again."""
    named: list[tuple[str, RateLeft | None]] = [("requests", rates.requests), ("tokens", rates.tokens)]
    headers = {}
    for name, rate in named:
        if rate is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(rate.per_minute)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, int(rate.num_left)))
            headers[f"x-ratelimit-reset-{name}"] = f"{rate.full_in_s:.3f}s"
    return headers


def error_headers(error: TorchrelayError) -> dict[str, str]:
    """Headers of the error: Retry-After, WWW-Authenticate, those of rates."""
    if error.retry_after_s is not None:
        retry = {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
        return retry | (rate_headers(error.rates) if isinstance(error, RateExceeded) else {})
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    return {}


def refusal(error: TorchrelayError) -> JSONResponse:
    """The whole answer to a request, with the error's body and headers."""
    return JSONResponse(error_body(error), error.http_status, error_headers(error))
