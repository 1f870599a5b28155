"""The credentials of one process, derived from the cluster key into a file that its service reads."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from torchrelay.common.identity.callers import SCHEDULER_NODE, Caller, call_token
from torchrelay.common.identity.credentials_file import main, node_id
from torchrelay.common.identity.keys import derive_compiled_key, derive_node_key
from torchrelay.param_store.settings import StoreSettings
from torchrelay.worker.settings import WorkerSettings

KEY = bytes(range(32))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "settings.toml"
    monkeypatch.setenv("TORCHRELAY_CLUSTER_KEY", KEY.hex())
    monkeypatch.setenv("TORCHRELAY_CONFIG", str(path))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["torchrelay-credentials", *map(str, arguments)])
    main()


def test_store_and_worker_of_a_host_know_each_other(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "store", file, "--name", "node-1.example")
    store = StoreSettings()
    assert store.store_id == "node-1_example" and store.node_key == derive_node_key(KEY, store.store_id).hex()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    run(monkeypatch, "worker", file, "--name", "decode-7f9c", "--store", "node-1.example")
    worker = WorkerSettings()
    assert worker.worker_id == "decode-7f9c" and worker.node_key == derive_node_key(KEY, "decode-7f9c").hex()
    assert worker.store_token == call_token(bytes.fromhex(store.node_key), Caller.WORKER)
    assert worker.compiled_key == derive_compiled_key(KEY).hex()


def test_gateway_gets_tokens_and_no_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "gateway", file, "--store", "uploads-0")
    lines = dict(line.split(" = ") for line in file.read_text().splitlines())
    assert lines == {
        "scheduler_token": f'"{call_token(derive_node_key(KEY, SCHEDULER_NODE), Caller.GATEWAY)}"',
        "store_token": f'"{call_token(derive_node_key(KEY, "uploads-0"), Caller.GATEWAY)}"',
    }


@pytest.mark.parametrize("name", ["", "a_b", "x" * 64, "node\n", '"'])
def test_name_that_is_no_host_or_pod_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be an id"):
        node_id(name)


@pytest.mark.parametrize(("key", "fault"), [("", "at least 16 bytes"), ("xyz", "TORCHRELAY_CLUSTER_KEY is not in hex")])
def test_unusable_cluster_key_is_refused(file: Path, key: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRELAY_CLUSTER_KEY", key)
    with pytest.raises(SystemExit, match=fault):
        run(monkeypatch, "store", file, "--name", "node-1")
    assert not file.exists()
