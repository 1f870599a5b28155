"""The settings file, read before anything starts: `up` gives the same one to all services."""

from __future__ import annotations

import os
from pathlib import Path

from torchrelay.cli.errors import CliError
from torchrelay.common.process.settings import CONFIG_VARIABLE, ConfigFile, ConfigUnusable


def check_config_file() -> None:
    """Raises ``CliError`` where a service would refuse the file: its worker would say so seconds after the others."""
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        return
    # Only for this: each costs milliseconds.
    from torchrelay.gateway.settings import GatewaySettings
    from torchrelay.param_store.settings import StoreSettings
    from torchrelay.scheduler.settings import SchedulerSettings
    from torchrelay.worker.settings import WorkerSettings

    try:
        for settings in (GatewaySettings, SchedulerSettings, StoreSettings, WorkerSettings):
            ConfigFile(settings, Path(path))
    except ConfigUnusable as error:
        raise CliError(str(error), "fix the file, or unset the variable") from error
