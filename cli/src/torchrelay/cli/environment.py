"""The settings of all services, by the variables of this shell."""

from __future__ import annotations

from pydantic import ValidationError

from torchrelay.cli.errors import CliError
from torchrelay.common.process.settings import ConfigUnusable, ServiceSettings, setting_errors


def environment_settings() -> ServiceSettings:
    """The settings of every service by the TORCHRELAY_* variables, for a remote platform too. Raises ``CliError``."""
    try:
        return ServiceSettings()
    except ConfigUnusable as error:
        raise CliError(str(error), "fix the file, or unset the variable") from error
    except ValidationError as error:
        raise CliError(setting_errors(error)[0], "fix or unset the TORCHRELAY_* variables in this shell") from error
