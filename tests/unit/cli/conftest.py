"""A gateway to speak to, a local home that points at the gateway, and the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main
import typer.testing
from typer.testing import CliRunner, Result

from tests.unit.cli.fake_gateway import ADMIN_KEY, FakeGateway, running_gateway
from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home
from torchrelay.cli.main import app

Run = Callable[..., Result]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with running_gateway() as gateway:
        yield gateway


@pytest.fixture
def home(tmp_path: Path, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> Home:
    """The home of a platform that runs (this process), with this gateway."""
    for name in ("TORCHRELAY_API_URL", "TORCHRELAY_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = Home(tmp_path / "home")
    home.make()
    (home.path / "admin.key").write_text(ADMIN_KEY + "\n")
    home.endpoints_file.write_text(json.dumps({"http": gateway.url, "pid": os.getpid()}))
    monkeypatch.setenv("TORCHRELAY_HOME", str(home.path))
    return home


# Typer makes the commands of an application anew for each command line, which takes 0.04 s.
commands_of = cache(typer.main.get_command)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line; its result has ``stdout``, ``stderr``, ``exit_code`` and ``exception``."""
    monkeypatch.setattr(typer.testing, "_get_command", commands_of)

    def run(*arguments: str, said: str | bytes | None = None) -> Result:
        return CliRunner().invoke(app, arguments, input=said)

    return run


def refusal(result: Result) -> CliError:
    """The error that ended a command."""
    assert isinstance(result.exception, CliError), result.output
    return result.exception


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder of the right names; one file is large enough to be sent in pieces."""
    folder = tmp_path / "Tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text("")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(range(256)) * 12_000)
    (folder / "README.md").write_text("not a part of the model")
    return folder
