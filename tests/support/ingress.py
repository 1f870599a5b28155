"""HAProxy with the configuration of compose and chart, before a gateway on loopback."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.brokers import free_port, running
from tests.support.deploy import DEPLOY

CONFIGURATION = DEPLOY / "chart" / "files" / "haproxy.cfg"
_TLS = 'ssl crt "${INGRESS_CERTIFICATE}" alpn h2,http/1.1'


@contextmanager
def running_ingress(
    endpoints: Mapping[str, str], folder: Path, limits: Mapping[str, int], certificate: Path | None = None
) -> Iterator[int]:
    """An ingress before ``http`` and ``grpc`` of ``endpoints``; yields its port. Without a certificate it serves both
    versions of HTTP in plain text, which a client's first bytes tell apart.

    ``limits``: numbers of the configuration, each by the words before it, in place of what a test cannot reach.
    """
    program = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    assert program is not None, "haproxy is not installed: `make test` installs it"
    text = CONFIGURATION.read_text()
    for words, number in limits.items():
        text, count = re.subn(rf"({words} )\d+", rf"\g<1>{number}", text)
        assert count == 1, words
    if certificate is None:
        assert text.count(_TLS) == 1
        text = text.replace(_TLS, "")
    configuration = folder / "haproxy.cfg"
    configuration.write_text(text)
    port = free_port()
    variables = {
        "INGRESS_CERTIFICATE": str(certificate),
        "INGRESS_PORT": str(port),
        "GATEWAY_REST": urlsplit(endpoints["http"]).netloc,
        "GATEWAY_GRPC": endpoints["grpc"],
    }
    with pytest.MonkeyPatch.context() as environment:
        for name, value in variables.items():
            environment.setenv(name, value)
        with running([program, "-f", str(configuration)], folder / "haproxy.log", port):
            yield port
