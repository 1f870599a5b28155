"""A backup of a running platform, taken as docs/recovery.md says, has the same keys, prices, models and bill when it
starts: with its embedded ledger and packs, and with PostgreSQL and an object store.
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import from_url

from tests.e2e.tenants import ONE_WORKER, SMALL
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete
from tests.support.platform import Platform, running_platform
from tests.support.s3_server import make_bucket, s3_server
from tests.unit.gateway.postgres_server import postgres_program, postgres_server
from torchrelay.cli.api.client import GatewayClient

pytestmark = pytest.mark.e2e
OPTIONS = (*SMALL, *ONE_WORKER)
SECRETS = ("admin.key", "cluster.key")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "dummy", "AWS_SECRET_ACCESS_KEY": "dummy", "AWS_REGION": "us-east-1"}
PACKS, REPLICA = "s3://packs/torchrelay", "s3://replica/torchrelay"


@dataclass(frozen=True, slots=True)
class Payer:
    """A tenant with a model at a price of its own, and its answer."""

    key: str
    model: str
    tokens: list[int]


def answer(platform: Platform, key: str, model: str) -> list[int]:
    reply = complete(platform, key, model, [5, 6, 7], max_tokens=8)
    tokens: list[int] = reply["choices"][0]["token_ids"]
    return tokens


def payer(platform: Platform, folder: Path) -> Payer:
    key = platform.tenant("acme")
    model = platform.upload(key, make_checkpoint(folder / "checkpoint", "llama"), "tiny")
    price = {"model": model, "prompt_nano": 100, "cached_nano": 25, "output_nano": 400}
    with platform.admin() as admin:
        admin.call("PUT", "/v1/prices", json=price)
    return Payer(key, model, answer(platform, key, model))


def contents(platform: Platform, key: str) -> dict[str, Any]:
    """What a backup keeps, as the operator and the tenant see it."""
    with platform.admin() as admin, GatewayClient(platform.http, key) as client:
        seen = {path: client.call("GET", path) for path in ("/v1/usage?group_by=model", "/v1/keys", "/v1/prices")}
        return seen | {"models": [each["id"] for each in admin.call("GET", "/v1/models")["data"]]}


def check_restored(restored: Platform, tenant: Payer, before: dict[str, Any]) -> None:
    assert before["models"] == [tenant.model]
    assert before["/v1/usage?group_by=model"]["total"]["cost_nano"] > 0
    assert contents(restored, tenant.key) == before
    assert answer(restored, tenant.key, tenant.model) == tenant.tokens
    with restored.admin() as admin:
        assert admin.call("GET", "/v1/reconcile")["ok"]


def copy_secrets(home: Path, backup: Path) -> None:
    for name in SECRETS:
        shutil.copy2(home / name, backup / name)


def back_up(home: Path, backup: Path) -> None:
    backup.mkdir()
    with closing(sqlite3.connect(home / "ledger.db")) as ledger, closing(sqlite3.connect(backup / "ledger.db")) as copy:
        ledger.backup(copy)
    shutil.copytree(home / "remote", backup / "remote")
    copy_secrets(home, backup)


def test_backup_becomes_a_platform_with_the_same_keys_models_and_bill(tmp_path: Path) -> None:
    with running_platform(tmp_path / "home", OPTIONS) as platform:
        tenant = payer(platform, tmp_path)
        before = contents(platform, tenant.key)
        back_up(platform.home.path, tmp_path / "backup")
        platform.upload(tenant.key, make_checkpoint(tmp_path / "later", "qwen2"), "later")
    with running_platform(tmp_path / "backup", OPTIONS) as restored:
        check_restored(restored, tenant, before)


def run(program: str, *arguments: str) -> None:
    subprocess.run([postgres_program(program), *arguments], check=True, timeout=60)


def replicate(source: str, target: str, endpoint: str) -> None:
    """Copies all objects, as the replication of an object store does."""
    config = {"endpoint": endpoint, **{name.lower(): value for name, value in CREDENTIALS.items()}}
    stores = [from_url(url, config=config, client_options={"allow_http": True}) for url in (source, target)]  # type: ignore[call-overload]
    for objects in obstore.list(stores[0]):
        for each in objects:
            obstore.put(stores[1], each["path"], obstore.get(stores[0], each["path"]).bytes())


def test_backup_of_postgresql_and_object_store_becomes_such_a_platform(tmp_path: Path) -> None:
    """The database of the backup is that of another server, and the packs come from another bucket."""
    backup = tmp_path / "backup"
    backup.mkdir()
    dump = str(tmp_path / "ledger.dump")
    with s3_server(tmp_path) as endpoint:
        for bucket in ("packs", "replica"):
            make_bucket(endpoint, bucket)
        env = {**CREDENTIALS, "TORCHRELAY_REMOTE_ENDPOINT": endpoint}
        with postgres_server() as url:
            env |= {"TORCHRELAY_DATABASE_URL": url}
            with running_platform(tmp_path / "home", (*OPTIONS, "--remote", PACKS), env) as platform:
                tenant = payer(platform, tmp_path)
                before = contents(platform, tenant.key)
                run("pg_dump", "--format=custom", f"--dbname={url}", f"--file={dump}")
                replicate(PACKS, REPLICA, endpoint)
                copy_secrets(platform.home.path, backup)
                platform.upload(tenant.key, make_checkpoint(tmp_path / "later", "qwen2"), "later")
        with postgres_server() as url:
            run("pg_restore", "--exit-on-error", f"--dbname={url}", dump)
            env |= {"TORCHRELAY_DATABASE_URL": url}
            with running_platform(backup, (*OPTIONS, "--remote", REPLICA), env) as restored:
                check_restored(restored, tenant, before)
