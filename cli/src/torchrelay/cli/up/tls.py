"""TLS files for the services of an install, if they use TLS."""

from __future__ import annotations

from pydantic import ValidationError

from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home
from torchrelay.cli.up.plan import UpOptions
from torchrelay.common.process.settings import ServiceSettings, setting_errors
from torchrelay.common.tls import TlsFiles


def tls_of_install(home: Home, options: UpOptions) -> TlsFiles | None:
    """The files that TORCHRELAY_TLS_* name; else, with ``--tls``, the install's own, created if needed.

    None: no TLS. Raises ``CliError`` when the files cannot be used or written.
    """
    try:
        configured = ServiceSettings().tls_files
    except ValidationError as error:
        raise CliError(setting_errors(error)[0], "fix or unset the TORCHRELAY_* variables in this shell") from error
    if configured is not None or not options.tls:
        return configured
    from torchrelay.cli.up.certificates import ensure_certificates  # imports cryptography: slow

    try:
        return ensure_certificates(home.path / "tls")
    except OSError as error:
        raise CliError(f"{home.path / 'tls'} cannot be written: {error.strerror}", "fix its permissions") from error
