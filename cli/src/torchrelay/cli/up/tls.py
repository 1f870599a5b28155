"""TLS files for the services of an install, if they use TLS."""

from __future__ import annotations

from torchrelay.cli.environment import environment_settings
from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home
from torchrelay.cli.up.plan import UpOptions, callers_of
from torchrelay.common.identity.tls import TlsFiles


def tls_of_install(home: Home, options: UpOptions) -> dict[str, TlsFiles]:
    """The files of each child, and of the commands, by name; empty: no TLS.

    TORCHRELAY_TLS_* name them for all processes; otherwise, with ``--tls``, they are the install's own, created if
    needed. Raises ``CliError`` when the files cannot be used or written.
    """
    nodes = callers_of(options)
    configured = environment_settings().tls_files
    if configured is not None:
        return dict.fromkeys(nodes, configured)
    if not options.tls:
        return {}
    from torchrelay.cli.up.certificates import ensure_certificates  # imports cryptography: slow

    try:
        return ensure_certificates(home.path / "tls", nodes)
    except OSError as error:
        raise CliError(f"{home.path / 'tls'} cannot be written: {error.strerror}", "fix its permissions") from error
