"""Fixtures of the store's tests: packs and S3 servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.s3_server import FaultyProxy, faulty_proxy, make_bucket, s3_server
from tests.unit.param_store.holders import RemoteScene
from tests.unit.param_store.model_folders import StoredPack, put_pack
from torchrelay.common.ids import new_id
from torchrelay.param_store.remote.remote_store import RemoteOptions, open_remote


@pytest.fixture
def pack(tmp_path: Path) -> StoredPack:
    """A pack of 28 chunks in the remote store of ``tmp_path``."""
    return put_pack(tmp_path)


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 protocol server; use a bucket of your own."""
    with s3_server(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dummies in the environment, and nothing that the machine of the tests may have there."""
    _use_dummies(monkeypatch)


@pytest.fixture
def bucket_url(s3_endpoint: str, credentials: None) -> str:
    """A fresh bucket with a prefix in it."""
    return _fresh_bucket(s3_endpoint)


@pytest.fixture(scope="session")
def s3_version(s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, StoredPack]:
    """A bucket that tests only read, and the pack of 28 chunks that lies in it."""
    url, pack = _fresh_bucket(s3_endpoint), put_pack(tmp_path_factory.mktemp("s3-version"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        _use_dummies(monkeypatch)
        remote = open_remote(url, RemoteOptions(s3_endpoint))
        for path in (pack.path, pack.path.with_suffix(".manifest")):
            remote.put_file(f"packs/{path.name}", path)
    return url, pack


def _use_dummies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")) or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "dummy")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "dummy")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


def _fresh_bucket(endpoint: str) -> str:
    bucket = new_id("bkt")
    make_bucket(endpoint, bucket)
    return f"s3://{bucket}/some/prefix"


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[FaultyProxy]:
    """Stands before the S3 server; without a fault until the test chooses one."""
    with faulty_proxy(s3_endpoint) as proxy:
        yield proxy


@pytest.fixture
def remote(tmp_path: Path, s3_version: tuple[str, StoredPack], proxy: FaultyProxy, credentials: None) -> RemoteScene:
    return RemoteScene(tmp_path, proxy, *s3_version)
