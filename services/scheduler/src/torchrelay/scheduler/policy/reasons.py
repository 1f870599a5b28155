"""The reason for a decision: a keyword and figures for programs, a sentence for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Figures = Mapping[str, str | int | float]


@dataclass(frozen=True)
class Reason:
    """``cause``: a keyword listed in ``docs/events.md``; ``figures`` accompany it in the history.

    ``by_tenant``: what each tenant sees instead of ``text`` if that counts the requests of several.
    """

    cause: str = ""
    text: str = ""
    figures: Figures = field(default_factory=dict)
    by_tenant: Mapping[str, str] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, str | int | float]:
        """Fields for the history; empty if the kind of the event is the whole reason."""
        return {**({"cause": self.cause} if self.cause else {}), **self.figures}


NO_REASON = Reason()
