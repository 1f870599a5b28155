from __future__ import annotations

import pytest

from torchrelay.common.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NotFound,
    QueueFull,
    TorchrelayError,
    Unauthenticated,
    Unavailable,
    UploadRefused,
)
from torchrelay.gateway.core import RequestRate
from torchrelay.gateway.limits.limiter import RequestRateExceeded
from torchrelay.gateway.openai.errors import error_body, error_headers


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (InvalidRequest("no", field="n"), "invalid_request_error", "invalid_request"),
        (ContextLengthExceeded("no", field="n"), "invalid_request_error", "context_length_exceeded"),
        (UploadRefused("no", field="n"), "invalid_request_error", "upload_refused"),
        (NotFound("no", field="n"), "not_found_error", "not_found"),
        (QueueFull("no", field="n"), "rate_limit_error", "queue_full"),
        (TorchrelayError("no", field="n"), "api_error", "internal"),
    ],
)
def test_errors_have_openais_shape(error: TorchrelayError, kind: str, code: str) -> None:
    assert error_body(error) == {"error": {"message": "no", "type": kind, "param": "n", "code": code}}


def test_exceeded_rate_has_openais_headers() -> None:
    error = RequestRateExceeded(RequestRate(per_minute=30, num_left=0.25), retry_after_s=1.5)
    assert error_body(error)["error"]["code"] == "rate_limited"
    assert error_headers(error) == {
        "retry-after": "2",
        "x-ratelimit-limit-requests": "30",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "59.500s",
    }


def test_errors_have_retry_and_authenticate_headers() -> None:
    assert error_headers(QueueFull("no", retry_after_s=1.2)) == {"retry-after": "2"}
    assert error_headers(QueueFull("no", retry_after_s=0)) == {"retry-after": "1"}
    assert error_headers(Unavailable("no", retry_after_s=9.5)) == {"retry-after": "10"}
    assert error_headers(Unavailable("no")) == {}
    assert error_headers(Unauthenticated("no")) == {"www-authenticate": "Bearer"}
    assert error_headers(NotFound("no")) == {}
