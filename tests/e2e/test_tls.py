"""An install with TLS between its services answers like a plain one, and serves nobody without a certificate."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from cryptography import x509

from tests.e2e.tenants import SMALL, Tenant, reference
from tests.support.completions import complete, headers, stream
from tests.support.platform import SCRIPTS, Platform, running_platform
from tests.support.wait import wait_until
from torchrelay.cli.up.certificates import ensure_certificates
from torchrelay.common.identity.callers import Caller
from torchrelay.common.identity.tls import Tls, TlsFiles
from torchrelay.common.net.rpc.channels import open_blocking_channel
from torchrelay.control.v1 import scheduler_pb2, scheduler_pb2_grpc

pytestmark = pytest.mark.e2e
SERVICES = {
    "scheduler": Caller.SCHEDULER,
    "param-store": Caller.STORE,
    "prefill-0": Caller.WORKER,
    "decode-0": Caller.WORKER,
}
QUESTION = [{"role": "user", "content": "Which torch is handed on?"}]


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform with TLS between its services."""
    with running_platform(tmp_path_factory.mktemp("sealed"), (*SMALL, "--tls")) as running:
        yield running


@pytest.fixture(scope="module")
def sealed_tenant(sealed: Platform, tmp_path_factory: pytest.TempPathFactory) -> Tenant:
    return Tenant(sealed, "acme", sealed.tenant("acme"), tmp_path_factory.mktemp("checkpoints"))


def chat(where: Tenant) -> dict[str, Any]:
    body = {"model": where.model("llama"), "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    response = httpx.post(
        f"{where.platform.http}/v1/chat/completions",
        json={**body, "ignore_eos": True, "return_token_ids": True},
        headers=headers(where.key),
        timeout=60,
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_tokens_over_tls_equal_those_of_transformers(sealed_tenant: Tenant) -> None:
    """Through admission, store, prefill, KV hand-over and decode."""
    prompt, where = list(range(30, 60)), sealed_tenant
    answer = complete(where.platform, where.key, where.model(), prompt, max_tokens=24, ignore_eos=True)
    assert answer["choices"][0]["token_ids"] == reference(where.checkpoint("llama"), prompt, 24)


def test_commands_reach_services_over_tls(sealed: Platform, sealed_tenant: Tenant) -> None:
    request_id = chat(sealed_tenant)["id"]
    for words in (("top", "--once"), ("explain", request_id)):
        said = subprocess.run(
            [str(SCRIPTS / "torchrelay"), *words, "--home", str(sealed.home.path)],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "COLUMNS": "200"},
        )
        assert said.returncode == 0, said.stderr
        assert "prefill-0" in said.stdout


def test_client_without_a_certificate_is_refused(sealed: Platform) -> None:
    with grpc.insecure_channel(sealed.endpoints["scheduler"]) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Explain(scheduler_pb2.ExplainRequest(request_id="req-none"), timeout=10)
    assert isinstance(refused.value, grpc.Call) and refused.value.code() == grpc.StatusCode.UNAVAILABLE
    nameless = ssl.create_default_context(cafile=sealed.endpoints["tls_ca_file"])
    for child in ("param-store", "prefill-0", "decode-0"):
        host, port = json.loads((sealed.home.run / f"{child}.json").read_text())["data"].split(":")
        with (
            socket.create_connection((host, int(port)), timeout=10) as plain,
            nameless.wrap_socket(plain, server_hostname="torchrelay.internal") as end,
            pytest.raises(ssl.SSLError, match="certificate required"),
        ):
            end.recv(1)


@pytest.mark.parametrize("name", ["decode-0", "param-store"])
def test_certificate_of_another_service_is_refused(sealed: Platform, name: str) -> None:
    folder = sealed.home.path / "tls"
    tls = Tls(TlsFiles(folder / "ca.crt", folder / f"{name}.crt", folder / f"{name}.key"))
    with open_blocking_channel(sealed.endpoints["scheduler"], tls) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Explain(scheduler_pb2.ExplainRequest(request_id="req-none"), timeout=10)
    assert isinstance(refused.value, grpc.Call) and refused.value.code() == grpc.StatusCode.PERMISSION_DENIED


def test_private_keys_are_readable_by_their_owner_alone(sealed: Platform) -> None:
    keys = sorted((sealed.home.path / "tls").glob("*.key"))
    nodes = ("ca", "cli", "decode-0", "gateway", "param-store", "prefill-0", "scheduler")
    assert [path.name for path in keys] == [f"{name}.key" for name in nodes]
    assert all(path.stat().st_mode & 0o077 == 0 for path in keys)


def serial_at(address: str, folder: Path) -> int:
    """The serial number of the certificate that a new connection to a service sees."""
    context = Tls(TlsFiles(folder / "ca.crt", folder / "cli.crt", folder / "cli.key")).identity.client_context
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="torchrelay.internal") as end,
    ):
        certificate = end.getpeercert(binary_form=True)
    assert certificate is not None
    return x509.load_der_x509_certificate(certificate).serial_number


def shows_issued(address: str, folder: Path, name: str) -> bool:
    issued = x509.load_pem_x509_certificate((folder / f"{name}.crt").read_bytes())
    return serial_at(address, folder) == issued.serial_number


def test_replaced_certificates_are_used_without_restart(sealed: Platform, sealed_tenant: Tenant) -> None:
    """By new connections at every port, while a stream goes on; then a killed worker comes back among the others."""
    folder = sealed.home.path / "tls"
    ports = {name: json.loads((sealed.home.run / f"{name}.json").read_text()) for name in SERVICES}
    expected = chat(sealed_tenant)["choices"][0]["token_ids"]
    prompt, options = list(range(40, 70)), {"max_tokens": 400, "ignore_eos": True}
    states = stream(sealed, sealed_tenant.key, sealed_tenant.model("llama"), prompt, **options)
    state = next(state for state in states if state.token_ids)
    for path in folder.glob("*.crt"):
        if path.stem != "ca":
            path.unlink()
    ensure_certificates(folder, {**SERVICES, "gateway": Caller.GATEWAY, "cli": Caller.CLI})
    for name in SERVICES:
        for address in (ports[name][kind] for kind in ("grpc", "data") if kind in ports[name]):
            wait_until(partial(shows_issued, address, folder, name), f"the certificate at {address} of {name}")
    *_, state = states
    assert (state.error, state.done, len(state.token_ids)) == (None, True, 400)
    os.kill(ports["decode-0"]["pid"], signal.SIGKILL)
    assert chat(sealed_tenant)["choices"][0]["token_ids"] == expected
    ready_file = sealed.home.run / "decode-0.json"
    wait_until(
        lambda: ready_file.exists() and json.loads(ready_file.read_text())["pid"] != ports["decode-0"]["pid"],
        "another worker",
    )
    assert chat(sealed_tenant)["choices"][0]["token_ids"] == expected
