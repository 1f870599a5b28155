"""Keys and locks of a home; the folders of machines that join, and the settings of their store and workers."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest

from tests.unit.cli.conftest import Run, refusal
from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home
from torchrelay.cli.join import command as join_command
from torchrelay.cli.join import plan
from torchrelay.cli.join import run as join_run
from torchrelay.cli.join.folder import NodeFolder, make_private
from torchrelay.cli.join.plan import JoinOptions, NodePlan
from torchrelay.cli.join_file import JoinFile
from torchrelay.common.process.settings import ServiceSettings
from torchrelay.control.v1 import scheduler_pb2


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_keys_are_created_once_and_private(tmp_path: Path) -> None:
    home = Home(tmp_path)
    admin, cluster = home.admin_key(), home.cluster_key()
    assert admin.startswith("tra-")
    assert len(bytes.fromhex(cluster)) == 32
    assert (home.admin_key(), home.cluster_key()) == (admin, cluster)
    home.save_key("tr-a-b")
    assert {mode(tmp_path / name) for name in ("admin.key", "cluster.key", "cli.key")} == {0o600}


def test_home_is_closed_to_other_users(tmp_path: Path) -> None:
    """The ledger and the traces are in it."""
    home = Home(tmp_path / "home")
    home.make()
    assert mode(home.path) == 0o700
    home.cluster_key()
    home.admin_key()
    home.save_key("tr-a-b")
    home.keep_key("tr-a-b", "a")
    (home.path / "tls").mkdir()
    (home.path / "tls/ca.key").write_text("key")
    (home.path / "nats.conf").write_text("password")
    names = ("admin.key", "cluster.key", "cli.key", "nats.conf", "tls/ca.key", "keys/a.key")
    for name in names:
        (home.path / name).chmod(0o644)
    home.path.chmod(0o755)
    Home(home.path).make()
    assert mode(home.path) == 0o700 and {mode(home.path / name) for name in names} == {0o600}


def test_folder_with_other_files_keeps_their_modes(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "tls").mkdir()
    theirs = [tmp_path / name for name in ("nginx.conf", "server.key", "tls/server.key")]
    for path in theirs:
        path.write_text("theirs")
        path.chmod(0o644)
    for _ in range(2):
        home = Home(tmp_path)
        home.make()
        home.cluster_key()
    assert mode(tmp_path) == 0o755 and mode(tmp_path / "logs") == 0o700
    assert {mode(path) for path in theirs} == {0o644}
    (tmp_path / "cluster.key").chmod(0o644)
    home.make()
    assert mode(tmp_path / "cluster.key") == 0o600


def test_private_file_replaces_open_one(tmp_path: Path) -> None:
    (tmp_path / "nats.conf").write_text("old")
    (tmp_path / "nats.conf").chmod(0o666)
    path = Home(tmp_path).write_private("nats.conf", "new")
    assert path.read_text() == "new" and mode(path) == 0o600


def test_keys_are_saved_and_kept_by_tenant(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert home.saved_key() is None and home.kept_tenants() == []
    home.save_key("tr-first-which-is-longer")
    home.save_key("tr-second-x")
    home.forget_key("first")
    assert home.saved_key() == "tr-second-x"
    home.forget_key("second")
    assert home.saved_key() is None
    home.keep_key("tr-a-1", "acme")
    home.keep_key("tr-b-2", "birch.tree")
    assert home.kept_tenants() == ["acme", "birch.tree"]
    assert home.kept_key("acme") == "tr-a-1" and home.tenant_of("tr-b-2") == "birch.tree"
    assert home.kept_key("cedar") is None is home.kept_key("../cli")
    assert mode(tmp_path / "keys" / "acme.key") == 0o600
    home.save_key("tr-a-1")
    home.forget_key("a")
    assert home.kept_tenants() == ["birch.tree"] and home.saved_key() is None


def test_rest_port_is_remembered(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    assert home.last_http_port() == 0
    home.save_http_port(8123)
    assert home.last_http_port() == 8123
    (home.path / "http.port").write_text("99999")
    assert home.last_http_port() == 0


def test_home_has_single_owner(tmp_path: Path) -> None:
    def lock(_file: object, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    home = Home(tmp_path)
    home.make()
    with home.owned(), pytest.raises(CliError, match="is already running"), home.owned():
        pass
    with pytest.raises(CliError, match="has no file locks: No locks available") as caught, home.owned(lock):
        pass
    assert "local disk" in caught.value.hint
    with home.owned():
        pass


def refused(home: Home, meanwhile: Callable[[], object] = lambda: None) -> None:
    """An `up` of a home that is refused for want of space; ``meanwhile``: what happens before that."""
    home.make()
    with pytest.raises(CliError, match="no space"), home.owned():
        home.admin_key()
        meanwhile()
        raise CliError("no space")


def test_new_home_is_removed_only_after_refused_start(tmp_path: Path) -> None:
    home = Home(tmp_path / "parent" / "home")
    refused(home)
    assert list((tmp_path / "parent").iterdir()) == []
    home.make()
    with home.owned():
        key = home.admin_key()
        home.keep()
    refused(Home(home.path))
    assert home.admin_key() == key
    (tmp_path / "other").mkdir()
    refused(Home(tmp_path / "other"))
    assert (tmp_path / "other").is_dir(), "it was there before"


def test_refusal_is_shown_if_home_removal_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = tmp_path / ("x" * 255)  # allows no longer name: it cannot be set aside
    refused(Home(longest))
    assert Home(longest).admin_key()

    remove = os.rmdir

    def rmdir(path: str, *, dir_fd: int | None = None) -> None:
        if Path(path).parent == tmp_path:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        remove(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", rmdir)
    refused(Home(tmp_path / "home"))


@pytest.mark.parametrize("name", ["cli.key", "cli.key.draft", "ledger.db", "letter", "store/pack", "logs/gateway.log"])
def test_home_with_content_is_not_removed(tmp_path: Path, name: str) -> None:
    home = Home(tmp_path / "home")
    refused(home, meanwhile=lambda: (home.path / name).write_text("to keep"))
    assert (home.path / name).read_text() == "to keep"
    assert {path.name for path in home.path.iterdir()} >= {"admin.key", "logs", "store", "remote", "run", "up.lock"}


def test_key_saved_in_moved_home_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home")
    rename = Path.rename

    def save_and_rename(path: Path, target: Path) -> Path:
        if path == home.path:
            home.save_key("tr-a-b")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", save_and_rename)
    refused(home)
    assert home.saved_key() == "tr-a-b"
    assert list(tmp_path.iterdir()) == [home.path]


@pytest.mark.parametrize("is_made_again", [False, True])
def test_up_refuses_lock_of_removed_home(tmp_path: Path, is_made_again: bool) -> None:
    first, second, third = (Home(tmp_path / "home") for _ in range(3))
    first.make()
    second.make()

    with ExitStack() as others:

        def lock_after_the_others(file: TextIO, operation: int) -> None:
            others.close()
            fcntl.flock(file, operation)

        if is_made_again:
            others.callback(lambda: third.path.joinpath("up.lock").touch())
            others.callback(third.make)
        others.enter_context(first.owned())  # the first to be left: that removes the home
        with pytest.raises(CliError, match="was removed while"), second.owned(lock_after_the_others):
            pass
    assert third.path.exists() == is_made_again


def test_stopped_home_has_no_endpoints(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    with pytest.raises(CliError, match="no platform is running") as caught:
        home.endpoints()
    assert "torchrelay up" in caught.value.hint
    with subprocess.Popen(["true"]) as ended:
        pass
    home.endpoints_file.write_text(json.dumps({"http": "x", "pid": ended.pid}))
    with pytest.raises(CliError, match="no platform is running"):
        home.endpoints()
    with home.owned():
        assert not home.endpoints_file.exists()


def test_invalid_home_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, why in (("file", "it is a file"), ("file/home", "Not a directory")):
        with pytest.raises(CliError) as refused:
            Home(tmp_path / place).make()
        assert refused.value.message == f"{tmp_path / place} cannot be used as home: {why}"
        assert refused.value.hint == "choose another folder with --home or TORCHRELAY_HOME"


def test_run_folder_lies_in_shared_memory_and_that_of_a_killed_up_is_freed(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    with home.owned():
        memory = home.run.resolve()
        assert memory.is_relative_to("/dev/shm") and mode(memory) == 0o700
        (home.run / "gateway.json").write_text("{}")
    assert not memory.exists() and list(home.run.iterdir()) == []
    left = Path(tempfile.mkdtemp(prefix="torchrelay-run-", dir="/dev/shm"))
    home.run.rmdir()
    home.run.symlink_to(left)
    with home.owned():
        assert not left.exists()
    home.run.rmdir()
    home.run.symlink_to(left)  # the machine was restarted
    home.make()
    with home.owned():
        assert home.run.is_dir()


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


def test_host_of_jobs_with_private_folders_is_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs of a node ran two stores with one id."""

    def host_id(shared_memory: str, temporary: str) -> str:
        monkeypatch.setattr(plan, "SHARED_MEMORY", tmp_path / shared_memory)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / temporary))
        return NodePlan(FILE, JoinOptions(), ServiceSettings()).host_id

    monkeypatch.setenv("SLURMD_NODENAME", "rack_1.n2")
    for name in ("shm", "shm of a job", "tmp", "tmp of a job"):
        (tmp_path / name).mkdir()
    hosts = [host_id("shm", "tmp"), host_id("shm of a job", "tmp"), host_id("shm", "tmp of a job")]
    assert len(set(hosts)) == 3 and host_id("shm", "tmp") == hosts[0]
    assert all(re.fullmatch("node-rack-1-n2-[0-9a-f]{8}", host) for host in hosts)


def store_environment(remote_url: str, home: Path) -> dict[str, str]:
    options = JoinOptions(host_id="node-a", home=home)
    node = NodePlan(replace(FILE, remote_url=remote_url), options, ServiceSettings())
    spec = node.store(node.folder(), CREDENTIALS)
    return {**spec.inherited, **spec.env}


def test_workers_that_join_have_gpus_of_their_own(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[JoinOptions] = []

    async def run_join(cluster: JoinFile, options: JoinOptions) -> None:
        started.append(options)

    monkeypatch.setattr(join_run, "run_join", run_join)
    monkeypatch.setattr(join_command, "visible_gpus", lambda: ("MIG-1", "MIG-2"))
    (tmp_path / "join.toml").write_text(FILE.as_toml())
    command = ("join", str(tmp_path / "join.toml"), "--home", str(tmp_path / "home"))
    for options in ((), ("--device", "cpu"), ("--worker-id", "node-a")):
        assert run(*command, *options).exit_code == 0
    assert [options.num_workers for options in started] == [2, 1, 1]
    assert refusal(run(*command, "--workers", "3")).message == "3 workers need the GPUs 0 to 2, and this machine has 2"
    node = NodePlan(FILE, started[0], ServiceSettings())
    told = [spec.env for spec in node.workers(node.folder(), [CREDENTIALS] * 2)]
    names = ("TORCHRELAY_DEVICE", "CUDA_VISIBLE_DEVICES")
    assert [[each[name] for name in names] for each in told] == [["auto", "MIG-1"], ["auto", "MIG-2"]]
    assert node.store(node.folder(), CREDENTIALS).env["TORCHRELAY_ARENA_LIMIT_BYTES"] == "0"


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
