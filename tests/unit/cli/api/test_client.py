"""Uploads that are cut off, refused or gone on with, and errors as problems."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.unit.cli.fake_gateway import ADMIN_KEY, TENANT_KEY, FakeGateway, running_gateway
from torchrelay.cli.api import client as client_module
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.api.model_folder import is_model_file
from torchrelay.cli.api.upload import UploadJournal
from torchrelay.cli.errors import ApiError, CliError, Unreachable
from torchrelay.param_store.uploads.declared_files import DeclaredFile, check_declared


def test_an_upload_sends_every_model_file_and_nothing_else(door: FakeGateway, model_folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    with GatewayClient(door.url, TENANT_KEY) as client:
        model = client.upload(model_folder, "tiny", {"max_instances": 2}, lambda *step: seen.append(step))
    assert model["id"] == "acme/tiny"
    assert set(door.received) == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert all(bytes(sent) == (model_folder / path).read_bytes() for path, sent in door.received.items())
    assert door.asked[-1][2] == {"max_instances": 2}
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["hash", "upload", "validate", "pack"]
    total = sum(len(sent) for sent in door.received.values())
    assert [step for step in seen if step[0] == "upload"][-1] == ("upload", total, total)


def test_a_broken_connection_is_gone_on_from_where_it_broke(door: FakeGateway, model_folder: Path) -> None:
    door.cut_after = 1_000_000
    with GatewayClient(door.url, TENANT_KEY) as client:
        client.upload(model_folder, "tiny", {}, lambda *_: None)
    puts = [path for method, path, _ in door.asked if method == "PUT" and path.endswith("model.safetensors")]
    assert len(puts) == 2
    assert bytes(door.received["model.safetensors"]) == (model_folder / "model.safetensors").read_bytes()


def test_another_run_goes_on_with_the_upload_of_the_first(
    door: FakeGateway, model_folder: Path, tmp_path: Path
) -> None:
    memory = UploadJournal(tmp_path / "memory")
    door.refuse_commit = True
    with GatewayClient(door.url, TENANT_KEY) as client:
        with pytest.raises(ApiError, match="no such architecture"):
            client.upload(model_folder, "tiny", {}, lambda *_: None, memory)
        door.refuse_commit, door.asked = False, []
        client.upload(model_folder, "tiny", {}, lambda *_: None, memory)
        assert [method for method, _, _ in door.asked] == ["GET", "POST"]  # what is there, then the commit
        door.asked = []
        client.upload(model_folder, "tiny", {}, lambda *_: None, memory)
        assert door.asked[0][:2] == ("POST", "/v1/uploads")  # that one was ended


@pytest.mark.parametrize(
    ("missing", "said"),
    [("config.json", "config.json"), ("tokenizer.json", "tokenizer"), ("model.safetensors", "safetensors")],
)
def test_a_folder_that_is_no_model_is_told_before_anything_is_sent(
    door: FakeGateway, model_folder: Path, missing: str, said: str
) -> None:
    (model_folder / missing).unlink()
    with GatewayClient(door.url, TENANT_KEY) as client, pytest.raises(CliError, match=said) as caught:
        client.upload(model_folder, "tiny", {}, lambda *_: None)
    assert caught.value.hint
    assert door.asked == []


def test_the_param_store_takes_what_the_cli_calls_a_model_file() -> None:
    names = ["config.json", "tokenizer.json", "merges.txt", "vocab.json", "chat_template.jinja", "model.safetensors"]
    assert all(is_model_file(name) for name in names)
    check_declared([DeclaredFile(name, 10, "0" * 64) for name in names], 0, 1 << 40)
    assert not any(is_model_file(name) for name in ("README.md", "pytorch_model.bin", "consolidated.safetensors"))


def test_errors_of_the_gateway_are_problems_with_its_own_sentence(door: FakeGateway) -> None:
    with GatewayClient(door.url, "tr-wrong") as client, pytest.raises(ApiError, match="the key is not known") as caught:
        client.call("GET", "/v1/models")
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert "--key" in caught.value.hint


def test_a_gateway_that_is_started_again_is_waited_for() -> None:
    with running_gateway() as before:
        port = int(before.url.rpartition(":")[2])
    with ExitStack() as doors:

        def supervised() -> bool:
            """Asked after the first refusal; the gateway comes up then."""
            if not doors_opened:
                doors_opened.append(doors.enter_context(running_gateway(port)))
            return True

        doors_opened: list[FakeGateway] = []
        with GatewayClient(before.url, TENANT_KEY, is_supervised=supervised) as client:
            assert client.call("GET", "/v1/models")["data"]
            assert len(doors_opened) == 1
            with client.stream("POST", "/v1/chat/completions", json={}) as lines:
                assert next(lines) == b": waiting"


def test_a_gateway_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RESTART_TIMEOUT_S", 0.2)
    with (
        GatewayClient("http://127.0.0.1:1", ADMIN_KEY, is_supervised=lambda: True) as client,
        pytest.raises(Unreachable, match="is restarting"),
    ):
        client.call("GET", "/v1/models")


def test_no_gateway_is_a_problem() -> None:
    with GatewayClient("http://127.0.0.1:1", ADMIN_KEY) as client, pytest.raises(Unreachable, match="does not answer"):
        client.call("GET", "/v1/models")
    with GatewayClient("localhost", ADMIN_KEY) as client, pytest.raises(CliError, match="not an address"):
        client.call("GET", "/v1/models")
