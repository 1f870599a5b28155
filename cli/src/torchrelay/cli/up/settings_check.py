"""The settings that `up` gives to all services, in variables and the settings file, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from torchrelay.cli.errors import CliError
from torchrelay.common.process.settings import (
    CONFIG_VARIABLE,
    ConfigFile,
    ConfigUnusable,
    ServiceSettings,
    ignored_variables,
)


def variables_without_effect(own: Collection[str]) -> list[str]:
    """Sentences about variables that no service reads. ``own``: the settings of `up`."""
    services = _services()
    known = set(own).union(*(settings.model_fields for settings in services))
    return ignored_variables(known, {name: why for settings in services for name, why in settings.ended.items()})


def check_config_file() -> None:
    """Raises ``CliError`` where a service would refuse the file: its worker would say so seconds after the others."""
    try:
        if path := os.environ.get(CONFIG_VARIABLE):
            for settings in _services():
                ConfigFile(settings, Path(path))
    except ConfigUnusable as error:
        raise CliError(str(error), "fix the file, or unset the variable") from error


def _services() -> tuple[type[ServiceSettings], ...]:
    # Only for this: each costs milliseconds.
    from torchrelay.gateway.settings import GatewaySettings
    from torchrelay.param_store.settings import StoreSettings
    from torchrelay.scheduler.settings import SchedulerSettings
    from torchrelay.worker.settings import WorkerSettings

    return GatewaySettings, SchedulerSettings, StoreSettings, WorkerSettings
