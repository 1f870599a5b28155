"""A backup of a running platform, taken as docs/recovery.md says, has the same keys, models and bill when it starts."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import SMALL
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete
from tests.support.platform import Platform, running_platform
from torchrelay.cli.api.client import GatewayClient

pytestmark = pytest.mark.e2e


def bill(platform: Platform, key: str) -> Any:
    with GatewayClient(platform.http, key) as client:
        return client.call("GET", "/v1/usage?group_by=model")


def back_up(home: Path, backup: Path) -> None:
    backup.mkdir()
    with closing(sqlite3.connect(home / "ledger.db")) as ledger, closing(sqlite3.connect(backup / "ledger.db")) as copy:
        ledger.backup(copy)
    shutil.copytree(home / "remote", backup / "remote")
    for name in ("admin.key", "cluster.key"):
        shutil.copy2(home / name, backup / name)


def test_backup_becomes_a_platform_with_the_same_keys_models_and_bill(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama")
    with running_platform(tmp_path / "home", SMALL) as platform:
        key = platform.tenant("acme")
        model = platform.upload(key, checkpoint, "tiny")
        answer = complete(platform, key, model, [5, 6, 7], max_tokens=8)
        billed = bill(platform, key)
        back_up(platform.home.path, tmp_path / "backup")
        platform.upload(key, make_checkpoint(tmp_path / "later", "qwen2"), "later")
    with running_platform(tmp_path / "backup", SMALL) as restored:
        assert bill(restored, key) == billed
        again = complete(restored, key, model, [5, 6, 7], max_tokens=8)
        assert again["choices"] == answer["choices"]
        with restored.admin() as admin:
            assert [each["id"] for each in admin.call("GET", "/v1/models")["data"]] == [model]
            assert admin.call("GET", "/v1/reconcile")["ok"]
