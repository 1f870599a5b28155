"""Keys and locks of a home."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import pytest

from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home


def test_keys_are_made_once_and_are_private(tmp_path: Path) -> None:
    home = Home(tmp_path)
    admin, cluster = home.admin_key(), home.cluster_key()
    assert admin.startswith("tra-")
    assert len(bytes.fromhex(cluster)) == 32
    assert (home.admin_key(), home.cluster_key()) == (admin, cluster)
    home.save_key("tr-a-b")
    for name in ("admin.key", "cluster.key", "cli.key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_a_new_home_is_its_owners_alone(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.make()
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700  # the ledger and the traces are in it


def test_a_home_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    home.cluster_key()
    home.admin_key()
    home.save_key("tr-a-b")
    (tmp_path / "tls").mkdir()
    (tmp_path / "tls" / "ca.key").write_text("key")
    (tmp_path / "nats.conf").write_text("password")
    secrets = [tmp_path / name for name in ("admin.key", "cluster.key", "cli.key", "nats.conf", "tls/ca.key")]
    for path in secrets:
        path.chmod(0o644)
    tmp_path.chmod(0o755)
    Home(tmp_path).make()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in secrets] == [0o600] * len(secrets)


def test_a_folder_with_other_things_in_it_stays_open(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "letters").mkdir()
    Home(tmp_path).make()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "logs").stat().st_mode) == 0o700


def test_a_restart_closes_nothing_of_others(tmp_path: Path) -> None:
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
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert [stat.S_IMODE(path.stat().st_mode) for path in theirs] == [0o644] * len(theirs)
    (tmp_path / "cluster.key").chmod(0o644)
    home.make()
    assert stat.S_IMODE((tmp_path / "cluster.key").stat().st_mode) == 0o600


def test_a_private_file_is_private_however_open_the_old_one_was(tmp_path: Path) -> None:
    (tmp_path / "nats.conf").write_text("old")
    (tmp_path / "nats.conf").chmod(0o666)
    path = Home(tmp_path).write_private("nats.conf", "new")
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_saved_key_is_replaced_and_forgotten(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert home.saved_key() is None
    home.save_key("tr-first-which-is-longer")
    home.save_key("tr-second")
    assert home.saved_key() == "tr-second"
    home.forget_key()
    assert home.saved_key() is None


def test_the_rest_port_is_remembered(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    assert home.last_http_port() == 0
    home.save_http_port(8123)
    assert home.last_http_port() == 8123
    (home.path / "http.port").write_text("99999")
    assert home.last_http_port() == 0


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    with home.owned(), pytest.raises(CliError, match="is already running"), home.owned():
        pass
    with home.owned():
        pass


def refused(home: Home, meanwhile: Callable[[], object] = lambda: None) -> None:
    """An `up` of a home that is refused for want of room; ``meanwhile``: what happens before that."""
    home.make()
    with pytest.raises(CliError, match="no room"), home.owned():
        home.admin_key()
        meanwhile()
        raise CliError("no room")


def test_a_new_home_is_removed_if_its_first_start_is_refused_and_only_then(tmp_path: Path) -> None:
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


def test_a_refusal_is_told_even_if_its_home_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = tmp_path / ("x" * 255)  # leaves no room for a longer name: it cannot be set aside
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
def test_a_home_with_something_to_keep_stays_whole(tmp_path: Path, name: str) -> None:
    home = Home(tmp_path / "home")
    refused(home, meanwhile=lambda: (home.path / name).write_text("to keep"))
    assert (home.path / name).read_text() == "to keep"
    assert {path.name for path in home.path.iterdir()} >= {"admin.key", "logs", "store", "remote", "run", "up.lock"}


def test_a_key_that_is_saved_while_its_home_is_set_aside_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_an_up_with_the_lock_of_a_home_that_was_removed_does_not_start(tmp_path: Path, is_made_again: bool) -> None:
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


def test_a_home_without_a_running_platform_has_no_endpoints(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    with pytest.raises(CliError, match="no platform is running") as caught:
        home.endpoints()
    assert "torchrelay up" in caught.value.hint
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    home.endpoints_file.write_text(json.dumps({"http": "x", "pid": int(ended.stdout)}))
    with pytest.raises(CliError, match="no platform is running"):
        home.endpoints()
    with home.owned():
        assert not home.endpoints_file.exists()


def test_a_place_that_cannot_be_a_home(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, why in (("file", "it is a file"), ("file/home", "Not a directory")):
        with pytest.raises(CliError) as refused:
            Home(tmp_path / place).make()
        assert refused.value.message == f"{tmp_path / place} cannot be used as home: {why}"
        assert refused.value.hint == "choose another folder with --home or TORCHRELAY_HOME"


def test_what_processes_tell_each_other_lies_in_memory_while_they_run(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    with home.owned():
        memory = home.run.resolve()
        assert memory.is_relative_to("/dev/shm") and stat.S_IMODE(memory.stat().st_mode) == 0o700
        (home.run / "gateway.json").write_text("{}")
    assert not memory.exists() and list(home.run.iterdir()) == []


def test_memory_left_by_a_killed_up_is_given_back(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
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


def test_a_file_system_without_locks_is_named(tmp_path: Path) -> None:
    def lock(_file: object, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    home = Home(tmp_path)
    home.make()
    with pytest.raises(CliError, match="has no file locks: No locks available") as caught, home.owned(lock):
        pass
    assert "local disk" in caught.value.hint
