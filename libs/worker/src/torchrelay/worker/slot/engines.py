"""The installed engines. A package registers its engine as an entry point of the group ``torchrelay.engines``."""

from __future__ import annotations

from importlib.metadata import entry_points

from torchrelay.common.errors import InvalidRequest
from torchrelay.worker.settings import ROLES, WorkerSettings
from torchrelay.worker.slot.engine import Engine
from torchrelay.worker.slot.relay_engine import RelayEngine


def load_engine(settings: WorkerSettings) -> Engine:
    """The engine that the settings name. Raises ``InvalidRequest``, naming the package to install, or the roles or
    devices that the engine needs.
    """
    name = settings.engine
    if name == "torchrelay":
        _check_devices(RelayEngine, settings)
        return RelayEngine(settings)
    for point in entry_points(group="torchrelay.engines", name=name):
        kind: type[Engine] = point.load()
        _check_devices(kind, settings)
        engine = kind(settings)
        if not engine.capabilities.kv_handover and len(settings.role_names) < len(ROLES):
            raise InvalidRequest(f"engine {name!r} hands no KV over: its worker plays both roles", field="roles")
        return engine
    raise InvalidRequest(
        f"engine {name!r} is not installed: install torchrelay-{name} with {name} beside it, as docs/{name}.md says",
        field="engine",
    )


def _check_devices(kind: type[Engine], settings: WorkerSettings) -> None:
    if settings.devices > 1 and not kind.splits_models:
        raise InvalidRequest(
            f"engine {settings.engine!r} computes a model on one device, and this slot has {settings.devices};"
            " vllm splits models",
            field="devices",
        )
