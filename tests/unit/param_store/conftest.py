"""Fixtures of the store's tests: published versions and S3 servers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.s3_server import FaultyProxy, faulty_proxy, make_bucket, s3_server
from tests.unit.param_store.model_folders import LARGER, write_folder
from tests.unit.param_store.running_store import publish, running_store
from torchrelay.common.ids import new_id
from torchrelay.control.v1 import param_store_pb2 as pb


@pytest.fixture
async def published(tmp_path: Path) -> tuple[Path, pb.VersionDescription]:
    """A version in the remote store of ``tmp_path``, and the file of its pack."""
    async with running_store(tmp_path) as store:
        version = await publish(store, write_folder(tmp_path / "model", LARGER))
    return tmp_path / "remote/packs" / version.pack_id, version


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
def s3_version(s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A bucket that tests only read, and the id of the pack of 28 chunks that is published in it."""
    folder, url = tmp_path_factory.mktemp("s3-version"), _fresh_bucket(s3_endpoint)

    async def run() -> str:
        async with running_store(folder, remote_url=url, remote_endpoint=s3_endpoint) as store:
            return (await publish(store, write_folder(folder / "model", LARGER))).pack_id

    with pytest.MonkeyPatch.context() as monkeypatch:
        _use_dummies(monkeypatch)
        return url, asyncio.run(run())


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
