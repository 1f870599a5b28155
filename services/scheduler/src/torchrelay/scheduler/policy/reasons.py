"""Why something is done: a word and figures for programs, a sentence for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Figures = Mapping[str, str | int | float]


@dataclass(frozen=True)
class Reason:
    """``cause`` is one of the words that ``docs/events.md`` lists; ``figures`` are told beside it in the history.

    ``of_tenants``: what each tenant is told in the place of ``text``, where that counts requests of several.
    """

    cause: str = ""
    text: str = ""
    figures: Figures = field(default_factory=dict)
    by_tenant: Mapping[str, str] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, str | int | float]:
        """For the history; empty where the kind of the event says it all."""
        return {**({"cause": self.cause} if self.cause else {}), **self.figures}


NO_REASON = Reason()
