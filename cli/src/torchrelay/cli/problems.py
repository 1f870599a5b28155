"""What the CLI tells a person when something is wrong: one sentence, and the mend."""

from __future__ import annotations


class Problem(Exception):
    """``message`` says what is wrong, ``mend`` what to do about it. Printed without a traceback; exit status 1."""

    def __init__(self, message: str, mend: str = "") -> None:
        super().__init__(message)
        self.message, self.mend = message, mend
