"""Whether the services of an install speak TLS, and with which files."""

from __future__ import annotations

from pydantic import ValidationError

from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home
from torchrelay.cli.up.options import UpOptions
from torchrelay.common.process.settings import ServiceSettings, setting_errors
from torchrelay.common.tls import TlsFiles


def tls_of_install(home: Home, options: UpOptions) -> TlsFiles | None:
    """The files that TORCHRELAY_TLS_* name, as for any service; else, with ``--tls``, the install's own, made now.

    None: the services speak plainly. Raises ``Problem`` when the files cannot be used or written.
    """
    try:
        named = ServiceSettings().tls_files
    except ValidationError as error:
        raise CliError(
            setting_errors(error)[0], "mend the TORCHRELAY_ variables of this shell, or unset them"
        ) from error
    if named is not None or not options.tls:
        return named
    from torchrelay.cli.up.certificates import ensure_certificates  # imports cryptography: only who needs it pays

    try:
        return ensure_certificates(home.path / "tls")
    except OSError as error:
        raise CliError(f"{home.path / 'tls'} cannot be written: {error.strerror}", "mend its rights") from error
