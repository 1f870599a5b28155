"""Joining machines: their folder, and the settings of their store and workers."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from torchrelay.cli.errors import CliError
from torchrelay.cli.join.folder import NodeFolder, make_private
from torchrelay.cli.join.plan import JoinOptions, NodePlan
from torchrelay.cli.join_file import JoinFile
from torchrelay.common.process.settings import ServiceSettings
from torchrelay.control.v1 import scheduler_pb2

HOST = "127.0.0.1"


def test_port_stays_while_another_program_runs_and_is_replaced_if_taken_otherwise(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path / "node")
    port = folder.choose_store_port(HOST, ["w-0"])
    with folder.worker_locked("w-0"):
        assert folder.choose_store_port(HOST, ["w-0"]) == port
        with socket.create_server((HOST, port)), folder.worker_locked("w-1"):
            assert folder.choose_store_port(HOST, ["w-1"]) == port, "its store has it"
        with socket.create_server((HOST, port)):
            assert folder.choose_store_port(HOST, ["w-0"]) != port, "a stranger has it"


def test_folder_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    (tmp_path / "link").symlink_to(make_private(tmp_path / "own"))
    for name in ("open", "link"):
        with pytest.raises(CliError, match="can be used by others"):
            make_private(tmp_path / name)
    (tmp_path / "own").chmod(0o755)
    assert make_private(tmp_path / "own").stat().st_mode & 0o777 == 0o700


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
