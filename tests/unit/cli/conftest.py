"""A gateway and a scheduler to speak to, a local home that points at the gateway, and the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer.main
import typer.testing
from google.protobuf import message_factory
from typer.testing import CliRunner, Result

from tests.unit.cli.fake_gateway import ADMIN_KEY, FakeGateway, running_gateway
from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home
from torchrelay.cli.main import app
from torchrelay.control.v1 import scheduler_pb2

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
    home.endpoints_file.write_text(json.dumps({"http": gateway.url, "scheduler": "127.0.0.1:1", "pid": os.getpid()}))
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


@contextmanager
def scripted_scheduler(**answers: Callable[[Any, grpc.ServicerContext], Any]) -> Iterator[str]:
    """Serves the answers to the scheduler's methods, by their names. Yields the address."""
    service = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"]
    methods: dict[str, Any] = {}
    for name, answer in answers.items():
        method = service.methods_by_name[name]
        kind = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        request: Any = message_factory.GetMessageClass(method.input_type)
        methods[name] = kind(answer, request.FromString, lambda reply: reply.SerializeToString())
    handler = grpc.method_handlers_generic_handler(service.full_name, methods)
    server = grpc.server(ThreadPoolExecutor(1), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()
