"""Errors of the CLI: one sentence on what is wrong, and a hint on what to do."""

from __future__ import annotations

import json
import re

_HINTS = {
    401: "pass a valid key with --key or TORCHRELAY_API_KEY, or create one: torchrelay key create --tenant NAME",
    409: "try again",
    429: "try again later",
    507: "ask the platform's operator to free space on that disk",
    503: "try again in a moment; `torchrelay top` shows what is down",
}
# Where the names and ids are listed that a field may have.
_WHERE = {
    "model": "see: torchrelay models",
    "request_id": "the id is printed below an answer of `torchrelay chat`; REST: x-request-id",
}


# REST fields and the options that set them.
_OPTIONS = {
    **{
        field: f"--{field.replace('_', '-')}"
        for field in (
            *("max_tokens", "temperature", "from", "to", "base", "requests_per_minute", "service_class"),
            *("tokens_per_minute", "concurrent_requests", "budget_period"),
            *("idle_timeout_s", "max_instances", "engine", "min_instances", "schedule"),
            *("max_concurrency", "threads", "kv_share", "hosts"),
            *("interactive_ttft_s", "standard_ttft_s", "batch_ttft_s", "tbt_target_s"),
        )
    },
    **{"period": "--month", "storage_quota_bytes": "--storage-quota-gb", "budget_nano": "--budget"},
    **{"prompt_nano": "--prompt", "cached_nano": "--cached", "output_nano": "--output"},
    **{"valid_from": "--from", "group_by": "--by", "models": "--model", "expires_at": "--expires"},
    **{"may_manage_keys": "--manages-keys"},
}
_FIELDS = re.compile(rf"\b({'|'.join(field for field in _OPTIONS if '_' in field)})\b")  # others are words of a message


# REST fields that users of commands do not know; the messages quote their values.
_UNNAMED = {"key_id", "name", "request_id", "upload_id"}


class CliError(Exception):
    """``message`` says what is wrong, ``hint`` what to do about it. Printed without a traceback. ``refuses_file``: a
    file of the model is refused as it is, so that a copy of it is of no use.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "", *, refuses_file: bool = False) -> None:
        super().__init__(message)
        self.message, self.hint, self.refuses_file = message, hint, refuses_file


class Unreachable(CliError):
    """The server does not answer, or the connection broke."""


class ApiError(CliError):
    """The gateway answered with an error; ``status`` is HTTP's, ``code`` the platform's name for it, ``field`` what it
    is about.
    """

    def __init__(self, message: str, hint: str = "", *, status: int, code: str = "", field: str = "") -> None:
        super().__init__(message, hint, refuses_file=code == "upload_refused")
        self.status, self.code, self.field = status, code, field
        if status in (400, 422) and field in _OPTIONS:
            self.exit_code = 2  # as for an option that this program refuses itself


def api_error(content: bytes, status: int) -> ApiError:
    """The error in a response body of the gateway."""
    try:
        error = json.loads(content)["error"]
        message, param, code = error["message"], error.get("param"), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        return ApiError(f"the gateway answered {status}: {content[:200]!r}", _HINTS.get(status, ""), status=status)
    hint = _WHERE.get(str(param), "") if status == 404 else _HINTS.get(status, "")
    field = str(param or "")
    return ApiError(_with_option(str(message), field), hint, status=status, code=str(code or ""), field=field)


def _with_option(message: str, field: str) -> str:
    """The message with options in place of fields; with the field's name if no option sets it."""
    if option := _OPTIONS.get(field):
        rest = message.removeprefix(field)
        text = f"{option}{rest}" if rest.startswith((" ", ":")) else f"{option}: {message}"
        return _FIELDS.sub(lambda named: _OPTIONS[named[0]], text)
    return f"{message} ({field})" if field and field not in message and field not in _UNNAMED else message
