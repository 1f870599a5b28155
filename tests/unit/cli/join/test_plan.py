"""The settings of a joining machine's store and workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from torchrelay.cli.join.plan import JoinOptions, NodePlan
from torchrelay.cli.join_file import JoinFile
from torchrelay.common.process.settings import ServiceSettings
from torchrelay.control.v1 import scheduler_pb2

FILE = JoinFile("127.0.0.1:7101", "nats://127.0.0.1:4222", "s3://bucket/packs", "node-.1.mac")
CREDENTIALS = scheduler_pb2.EnrollReply(node_key="00", store_token="token")


def store_environment(remote_url: str, home: Path) -> dict[str, str]:
    options = JoinOptions(host_id="node-a", home=home)
    plan = NodePlan(replace(FILE, remote_url=remote_url), options, ServiceSettings())
    spec = plan.store(plan.folder(), CREDENTIALS)
    return {**spec.inherited, **spec.env}


def test_store_reads_the_clusters_packs_where_it_reaches_them(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "a folder", tmp_path / "of another machine"
    here.mkdir()
    home = tmp_path / "home"
    for url in ("s3://bucket/packs", here.as_uri()):
        assert store_environment(url, home)["TORCHRELAY_REMOTE_URL"] == url
    own = store_environment(elsewhere.as_uri(), home)["TORCHRELAY_REMOTE_URL"]
    assert own == (home / "remote").as_uri() and not elsewhere.exists()


def test_services_do_not_share_a_port_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRELAY_METRICS_PORT", "9400")
    monkeypatch.setenv("TORCHRELAY_LOG_LEVEL", "debug")
    environment = store_environment("s3://bucket/packs", tmp_path / "home")
    assert "TORCHRELAY_METRICS_PORT" not in environment and environment["TORCHRELAY_LOG_LEVEL"] == "debug"
