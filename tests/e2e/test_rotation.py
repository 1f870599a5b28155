"""Keys and certificates are replaced as docs/recovery.md says: under load without a failed call, where it claims so."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from tests.e2e.tenants import ONE_WORKER, SMALL
from tests.e2e.test_tls import shows_issued
from tests.support.checkpoints import make_checkpoint
from tests.support.clients import Clients
from tests.support.completions import complete, headers
from tests.support.http import http
from tests.support.parts import Parts, parts_of
from tests.support.platform import Platform, running_platform
from tests.support.wait import eventually
from tests.unit.gateway.postgres_server import postgres_server
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.up.certificates import ensure_certificates
from torchrelay.cli.up.plan import UpOptions, callers_of
from torchrelay.common.identity.tls import LOOK_EVERY_S, Tls, TlsFiles
from torchrelay.common.net.rpc.channels import open_blocking_channel
from torchrelay.control.v1 import scheduler_pb2, scheduler_pb2_grpc

pytestmark = pytest.mark.e2e
OPTIONS = UpOptions(
    num_prefill_workers=0,
    num_decode_workers=0,
    num_both_workers=1,
    arena_bytes=256 << 20,
    kv_pool_bytes=32 << 20,
    threads=1,
    idle_timeout_s=600.0,
    tls=True,
)
GATEWAYS = ("gateway-0", "gateway-1")
SERVERS = ("scheduler", "param-store", "worker-0")
NUM_CLIENTS = 2


@pytest.fixture(scope="module")
def database_url() -> Iterator[str]:
    with postgres_server() as url:
        yield url


def status(platform: Platform, key: str, path: str) -> int:
    return http.get(f"{platform.http}{path}", headers=headers(key)).status_code


async def answers(clients: Clients) -> None:
    """Until each client has certainly asked anew."""
    before = clients.num_answers()

    def has_each() -> bool:
        pairs = zip(clients.num_answers(), before, strict=True)
        return all(now >= then + 2 for now, then in pairs)  # the first of the two may have begun before

    await eventually(lambda: clients.outcomes.errors or has_each(), "answers of each client")
    assert clients.outcomes.errors == []


async def rotate_tenant_key(gateway: Platform, first: str, clients: Clients) -> None:
    with GatewayClient(gateway.http, first) as client:
        shown = await asyncio.to_thread(client.call, "GET", "/v1/keys")
        second = await asyncio.to_thread(client.call, "POST", "/v1/keys", json={"name": "second"})
    clients.change_key(second["key"])
    await eventually(lambda: not clients.uses(first), "clients with the second key")
    with GatewayClient(gateway.http, second["key"]) as client:
        await asyncio.to_thread(client.call, "DELETE", f"/v1/keys/{shown['data'][0]['id']}")
    await eventually(partial(is_refused, gateway, first), "the refusal of the first key")


async def is_refused(gateway: Platform, key: str) -> bool:
    return await asyncio.to_thread(status, gateway, key, "/v1/models") == 401


def replace(path: Path, content: bytes) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(content)
    draft.chmod(0o600)
    draft.replace(path)


async def rotate_certificates(parts: Parts, folder: Path, clients: Clients) -> None:
    """Those of all processes, and their CA."""
    used = parts.home.path / "tls"
    await asyncio.to_thread(shutil.copytree, used, folder / "old")
    files = await asyncio.to_thread(ensure_certificates, folder / "new", callers_of(OPTIONS))
    old_ca, new_ca = ((folder / name / "ca.crt").read_bytes() for name in ("old", "new"))
    replace(used / "ca.crt", old_ca + new_ca)
    await asyncio.sleep(LOOK_EVERY_S)  # the documented second
    for name, new in files.items():
        replace(used / f"{name}.key", new.key.read_bytes())
        replace(used / f"{name}.crt", new.cert.read_bytes())
    ports = {name: json.loads((parts.home.run / f"{name}.json").read_text()) for name in SERVERS}
    for name in SERVERS:
        for address in (ports[name][kind] for kind in ("grpc", "data") if kind in ports[name]):
            shown = partial(asyncio.to_thread, shows_issued, address, used, name)
            await eventually(shown, f"the certificate at {address} of {name}")
    await answers(clients)
    replace(used / "ca.crt", new_ca)
    await asyncio.sleep(LOOK_EVERY_S)
    old = TlsFiles(folder / "old" / "ca.crt", folder / "old" / "cli.crt", folder / "old" / "cli.key")
    trusting = TlsFiles(folder / "new" / "ca.crt", old.cert, old.key)  # it would accept the server's new certificate
    new = TlsFiles(trusting.ca, files["cli"].cert, files["cli"].key)
    scheduler = ports["scheduler"]["grpc"]
    assert await asyncio.to_thread(refusal, scheduler, new) != grpc.StatusCode.UNAVAILABLE  # the scheduler's own answer
    assert await asyncio.to_thread(refusal, scheduler, trusting) == grpc.StatusCode.UNAVAILABLE


def refusal(scheduler: str, files: TlsFiles) -> grpc.StatusCode:
    """Of a question about a request that does not exist."""
    with open_blocking_channel(scheduler, Tls(files)) as channel, pytest.raises(grpc.RpcError) as refused:
        scheduler_pb2_grpc.SchedulerStub(channel).Explain(scheduler_pb2.ExplainRequest(request_id="none"), timeout=10)
    assert isinstance(refused.value, grpc.Call)
    return refused.value.code()


async def rotate_admin_key(parts: Parts, gateways: list[Platform], clients: Clients) -> None:
    """The gateways get it one after another."""
    first, second = parts.home.admin_key(), f"tra-{secrets.token_hex(32)}"
    for name, gateway in zip(GATEWAYS, gateways, strict=True):
        parts.set(name, ADMIN_KEY=second)
        await parts.leave(name)
        await parts.start(name)
        assert await asyncio.to_thread(status, gateway, second, "/v1/tenants") == 200
        assert await asyncio.to_thread(status, gateway, first, "/v1/tenants") == 401
        await answers(clients)


async def test_no_call_fails_while_keys_and_certificates_are_replaced(tmp_path: Path, database_url: str) -> None:
    async with parts_of(tmp_path / "home", OPTIONS, {"GRACE_S": "15"}) as parts:
        parts.set("gateway", DATABASE_URL=database_url)
        parts.copy("gateway-0", "gateway")
        parts.copy("gateway-1", "gateway", "HTTP_PORT", "GRPC_PORT")
        await parts.start("scheduler", "param-store", "worker-0", *GATEWAYS)
        gateways = [parts.platform(name) for name in GATEWAYS]
        key = await asyncio.to_thread(gateways[0].tenant, "acme")
        checkpoint = await asyncio.to_thread(make_checkpoint, tmp_path / "checkpoint", "llama")
        model = await asyncio.to_thread(gateways[0].upload, key, checkpoint, "tiny")
        clients = await asyncio.to_thread(Clients, gateways, key, model, NUM_CLIENTS)
        with clients.asking():
            await answers(clients)
            await rotate_tenant_key(gateways[1], key, clients)
            await rotate_certificates(parts, tmp_path, clients)
            await answers(clients)
            await rotate_admin_key(parts, gateways, clients)  # the new processes connect with the new certificates
        assert clients.outcomes.errors == []
        assert clients.outcomes.num_wrong == 0


def test_tenants_keys_and_models_outlive_the_admin_and_the_cluster_key(tmp_path: Path) -> None:
    """The platform is stopped meanwhile, as docs/recovery.md says."""
    prompt = [5, 6, 7]
    with running_platform(tmp_path / "home", (*SMALL, *ONE_WORKER)) as platform:
        key = platform.tenant("acme")
        model = platform.upload(key, make_checkpoint(tmp_path / "checkpoint", "llama"), "tiny")
        expected = complete(platform, key, model, prompt, max_tokens=8)["choices"]
        admin_key = platform.home.admin_key()
        cluster_key = platform.home.cluster_key()
    for name in ("admin.key", "cluster.key"):
        (platform.home.path / name).unlink()
    with running_platform(tmp_path / "home", (*SMALL, *ONE_WORKER)) as platform:
        assert platform.home.cluster_key() != cluster_key
        assert complete(platform, key, model, prompt, max_tokens=8)["choices"] == expected
        assert status(platform, admin_key, "/v1/tenants") == 401
        assert status(platform, platform.home.admin_key(), "/v1/tenants") == 200
