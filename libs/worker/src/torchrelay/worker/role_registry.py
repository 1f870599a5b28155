"""The installed roles, found by entry point."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

from torchrelay.common.errors import InvalidRequest
from torchrelay.worker.role import RoleContext, WorkerRole


def load_roles(names: Sequence[str], context: RoleContext) -> list[WorkerRole]:
    """The installed roles of these names. Raises ``InvalidRequest`` naming the package to install."""
    installed = {point.name: point for point in entry_points(group="torchrelay.roles")}
    for name in names:
        if name not in installed:
            raise InvalidRequest(f"role {name!r} is not installed: pip install torchrelay-{name}", field="roles")
    return [installed[name].load()(context) for name in names]
