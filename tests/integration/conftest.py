"""A published model for the tests of the roles."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tests.integration.roles_testbed import Make, running_testbed
from tests.support.checkpoints import make_checkpoint
from tests.unit.engine.harness import Model
from tests.unit.param_store.running_store import publish, running_store
from torchrelay.control.v1 import param_store_pb2


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3"))


@pytest.fixture(scope="session")
def published(
    model: Model, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, param_store_pb2.VersionDescription]:
    """A remote folder with the model's version in it, and its description."""
    folder = tmp_path_factory.mktemp("published")

    async def run() -> param_store_pb2.VersionDescription:
        async with running_store(folder) as store:
            return await publish(store, model.folder)

    return folder / "remote", asyncio.run(run())


@pytest.fixture
def scene_of(tmp_path: Path, published: tuple[Path, param_store_pb2.VersionDescription], nats_url: str) -> Make:
    return partial(running_testbed, tmp_path, *published, nats_url)
