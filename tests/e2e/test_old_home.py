"""A home of an earlier version starts, and keeps models, keys, prices and bills; its event streams go on.

``homes/VERSION.tar.xz`` was made by that version, with the NATS and Redis of its time: two tenants, a model, a revoked
key, an answer and its bill. ``record.json`` in it has what the platform said then.
"""

from __future__ import annotations

import csv
import json
import tarfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.support.completions import complete, headers
from tests.support.http import http
from tests.support.platform import running_platform
from torchrelay.cli.api.client import GatewayClient

HOMES = sorted((Path(__file__).parent / "homes").glob("*.tar.xz"))


@pytest.mark.parametrize("archive", HOMES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def test_home_of_an_earlier_version_starts_and_keeps_everything(archive: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with tarfile.open(archive) as files:
        files.extractall(home, filter="data")
    record: dict[str, Any] = json.loads((home / "record.json").read_text())
    keys, model, prompt = record["keys"], record["model"], record["prompt"]
    with running_platform(home, ["--arena-mb", "64"]) as platform:
        with GatewayClient(platform.http, keys["acme"]) as client:
            bill = record["bill"] | {"object": "invoice"}  # its name then
            assert client.call("GET", f"/v1/invoices/{bill['period']}").items() >= bill.items()
            assert client.call("GET", "/v1/usage")["total"].items() >= record["usage"]["total"].items()
            [listed] = client.call("GET", "/v1/models")["data"]
            [then] = record["models"]["data"]
            del then["effective_idle_timeout_s"]  # the default of that version
            assert listed.items() >= then.items()
        with GatewayClient(platform.http, keys["beta"]) as client:
            assert client.call("GET", "/v1/models")["data"] == []
        revoked = http.get(f"{platform.http}/v1/models", headers=headers(record["revoked"]))
        assert revoked.status_code == 401
        answer = complete(platform, keys["acme"], model, prompt, max_tokens=12, ignore_eos=True)
        assert answer["choices"][0]["token_ids"] == record["token_ids"]
        exported = [json.loads(line) for line in platform.cli("usage", "export").splitlines()]
        assert [line["id"] for line in exported] == list(range(1, len(exported) + 1))
        with platform.admin() as admin:
            books = admin.call("GET", "/v1/reconcile")
            charges = admin.content("GET", "/v1/usage/export?format=focus").decode().splitlines()
        costs = [Decimal(charge["BilledCost"]) for charge in csv.DictReader(charges)]
        assert books["ok"] and sum(costs) * 10**9 == books["cost_nano"] == sum(line["cost_nano"] for line in exported)
        uploaded = platform.upload(keys["acme"], Path(__file__).parents[2] / "examples/glossary/model", "glossary")
        assert uploaded == "acme/glossary" and "acme/glossary" in platform.cli("events")
