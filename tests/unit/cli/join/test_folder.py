"""The folder that the programs of a machine share."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from torchrelay.cli.errors import CliError
from torchrelay.cli.join.folder import NodeFolder, make_private

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
