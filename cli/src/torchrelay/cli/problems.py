"""What the CLI tells a person when something is wrong: one sentence, and the mend."""

from __future__ import annotations

import json

_MENDS = {
    401: "give a valid key with --key or TORCHRELAY_API_KEY, or make one: torchrelay key create --tenant NAME",
    409: "try again",
    429: "try again later",
    503: "try again in a moment; `torchrelay top` shows which part is away",
}


class Problem(Exception):
    """``message`` says what is wrong, ``mend`` what to do about it. Printed without a traceback; exit status 1."""

    def __init__(self, message: str, mend: str = "") -> None:
        super().__init__(message)
        self.message, self.mend = message, mend


class Unreachable(Problem):
    """The gateway does not answer, or the connection broke."""


class Refused(Problem):
    """The gateway answered with an error; ``status`` is HTTP's, ``code`` the platform's name for it."""

    def __init__(self, message: str, mend: str = "", *, status: int, code: str = "") -> None:
        super().__init__(message, mend)
        self.status, self.code = status, code


def refused(content: bytes, status: int) -> Refused:
    """An error body of the gateway as a ``Problem``: its sentence, and what to do about it."""
    try:
        error = json.loads(content)["error"]
        message, param, code = error["message"], error.get("param"), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        return Refused(f"the gateway answered {status}: {content[:200]!r}", _MENDS.get(status, ""), status=status)
    named = f" ({param})" if param and str(param) not in str(message) else ""
    return Refused(f"{message}{named}", _MENDS.get(status, ""), status=status, code=str(code or ""))
