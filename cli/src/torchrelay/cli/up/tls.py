"""TLS files for the services of an install, if they use TLS."""

from __future__ import annotations

from torchrelay.cli.api.scheduler_client import environment_settings
from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home
from torchrelay.cli.up.plan import UpOptions
from torchrelay.common.tls import TlsFiles


def tls_of_install(home: Home, options: UpOptions) -> TlsFiles | None:
    """The files that TORCHRELAY_TLS_* name; else, with ``--tls``, the install's own, created if needed.

    None: no TLS. Raises ``CliError`` when the files cannot be used or written.
    """
    configured = environment_settings().tls_files
    if configured is not None or not options.tls:
        return configured
    from torchrelay.cli.up.certificates import ensure_certificates  # imports cryptography: slow

    try:
        return ensure_certificates(home.path / "tls")
    except OSError as error:
        raise CliError(f"{home.path / 'tls'} cannot be written: {error.strerror}", "fix its permissions") from error
