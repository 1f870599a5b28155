"""The children of an embedded install, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchrelay.cli.up.children.child import ChildSpec


@dataclass(frozen=True, slots=True)
class Stack:
    """The children in groups, each used by the groups after it: brokers, store, scheduler, workers, gateway.

    Brokers start first, then all services at once (they wait for each other). Groups are stopped in reverse order.
    """

    groups: tuple[tuple[ChildSpec, ...], ...]
    endpoints: dict[str, str]
    home: Path = Path()
    traces: Path | None = None  # the children append to it
    arena: Path | None = None  # shared memory to remove at the end
    http_port: int = 0
    taken_http_port: int = 0  # the preferred one, if it was taken
    elastic: frozenset[str] = frozenset()  # children that a launcher starts and stops

    @property
    def waves(self) -> tuple[tuple[ChildSpec, ...], ...]:
        """Groups that start together; each wave starts when the previous one is ready."""
        brokers, *services = self.groups
        return (brokers, tuple(spec for group in services for spec in group if spec.name not in self.elastic))

    @property
    def specs(self) -> tuple[ChildSpec, ...]:
        return tuple(spec for group in self.groups for spec in group)
