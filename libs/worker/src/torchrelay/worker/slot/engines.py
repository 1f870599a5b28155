"""The installed engines. A package registers its engine as an entry point of the group ``torchrelay.engines``."""

from __future__ import annotations

from importlib.metadata import entry_points

from torchrelay.common.errors import InvalidRequest
from torchrelay.worker.settings import ROLES, WorkerSettings
from torchrelay.worker.slot.engine import Engine
from torchrelay.worker.slot.relay_engine import RelayEngine


def load_engine(settings: WorkerSettings) -> Engine:
    """The engine that the settings name. Raises ``InvalidRequest``, naming the package to install, or the roles that
    the engine needs.
    """
    name = settings.engine
    if name == "torchrelay":
        return RelayEngine(settings)
    for point in entry_points(group="torchrelay.engines", name=name):
        engine: Engine = point.load()(settings)
        if not engine.capabilities.kv_handover and len(settings.role_names) < len(ROLES):
            raise InvalidRequest(f"engine {name!r} hands no KV over: its worker plays both roles", field="roles")
        return engine
    raise InvalidRequest(f"engine {name!r} is not installed: pip install torchrelay-{name}", field="engine")
