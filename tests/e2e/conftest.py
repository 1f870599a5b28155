"""A shared platform for tests that do not break it; the others start their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from tests.support.platform import Platform, running_platform

SMALL = ("--arena-mb", "256", "--kv-pool-mb", "32", "--threads", "1")


@dataclass(slots=True)
class Tenant:
    """A tenant with a key, and models that are published once."""

    platform: Platform
    name: str
    key: str
    folder: Path
    _models: dict[str, str] = field(default_factory=dict)

    def checkpoint(self, family: str, tied: bool = False) -> Path:
        path = self.folder / f"{family}{'-tied' if tied else ''}"
        return path if path.exists() else make_checkpoint(path, family, tied=tied)

    def model(self, family: str = "llama", tied: bool = False) -> str:
        """The full name of a published tiny model of this family."""
        path = self.checkpoint(family, tied)
        if path.name not in self._models:
            self._models[path.name] = self.platform.upload(self.key, path, path.name)
        return self._models[path.name]

    @property
    def published(self) -> list[str]:
        """The full names of all its models."""
        return sorted(self._models.values())


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="package")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A prefill and a decode worker; models go to zero after 3 idle seconds.

    Its home has characters that URLs, configuration files and shells give a meaning, and a proxy of the environment
    would answer nothing.
    """
    home = tmp_path_factory.mktemp("platform") / "plätform 数 #1 50%? \"q' \\z"
    proxy = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"), "http://127.0.0.1:9")
    with running_platform(home, (*SMALL, "--idle-timeout-s", "3"), proxy) as running:
        yield running
        assert [path.name for path in home.parent.iterdir()] == [home.name]


@pytest.fixture(scope="package")
def tenant(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Tenant:
    return Tenant(platform, "acme", platform.tenant("acme"), tmp_path_factory.mktemp("checkpoints"))
