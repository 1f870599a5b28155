"""Uploads: interrupted, refused and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.fake_gateway import TENANT_KEY, FakeGateway
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.api.model_folder import adapter_paths, model_paths
from torchrelay.cli.api.upload import ModelUpload, UploadJournal
from torchrelay.cli.errors import ApiError, CliError
from torchrelay.common.errors import UploadRefused
from torchrelay.param_store.uploads.declared_files import DeclaredFile, check_declared


def test_upload_sends_model_files_only(gateway: FakeGateway, model_folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    with GatewayClient(gateway.url, TENANT_KEY) as client:
        model = ModelUpload(client, model_folder, "tiny", lambda *step: seen.append(step)).run({"max_instances": 2})
    assert model["id"] == "acme/tiny"
    assert set(gateway.received) == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert all(bytes(sent) == (model_folder / path).read_bytes() for path, sent in gateway.received.items())
    assert gateway.asked[-1][2] == {"max_instances": 2}
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["hash", "upload", "validate", "pack"]
    total = sum(len(sent) for sent in gateway.received.values())
    assert [step for step in seen if step[0] == "upload"][-1] == ("upload", total, total)


def test_upload_resumes_after_broken_connection(gateway: FakeGateway, model_folder: Path) -> None:
    gateway.cut_after = 1_000_000
    with GatewayClient(gateway.url, TENANT_KEY) as client:
        ModelUpload(client, model_folder, "tiny", lambda *_: None).run({})
    puts = [path for method, path, _ in gateway.asked if method == "PUT" and path.endswith("model.safetensors")]
    assert len(puts) == 2
    assert bytes(gateway.received["model.safetensors"]) == (model_folder / "model.safetensors").read_bytes()


def test_next_run_resumes_interrupted_upload(gateway: FakeGateway, model_folder: Path, tmp_path: Path) -> None:
    memory = UploadJournal(tmp_path / "memory")

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "validate":
            raise KeyboardInterrupt

    with GatewayClient(gateway.url, TENANT_KEY) as client:
        with pytest.raises(CliError, match="interrupted") as caught:
            ModelUpload(client, model_folder, "tiny", interrupt, memory).run({})
        assert "to resume" in caught.value.hint
        assert "torchrelay uploads abort upl-1" in caught.value.hint
        gateway.asked = []
        ModelUpload(client, model_folder, "tiny", lambda *_: None, memory).run({})
        assert [method for method, _, _ in gateway.asked] == ["GET", "POST"]  # what is there, then the commit
        gateway.asked = []
        ModelUpload(client, model_folder, "tiny", lambda *_: None, memory).run({})
        assert gateway.asked[0][:2] == ("POST", "/v1/uploads")  # that one was ended


def test_refused_upload_is_not_resumed(gateway: FakeGateway, model_folder: Path, tmp_path: Path) -> None:
    memory = UploadJournal(tmp_path / "memory")
    gateway.refuse_commit = True
    with GatewayClient(gateway.url, TENANT_KEY) as client:
        with pytest.raises(ApiError, match="no such architecture"):
            ModelUpload(client, model_folder, "tiny", lambda *_: None, memory).run({})
        gateway.refuse_commit, gateway.asked = False, []
        ModelUpload(client, model_folder, "tiny", lambda *_: None, memory).run({})
    assert gateway.asked[0][:2] == ("POST", "/v1/uploads")


@pytest.mark.parametrize(
    ("missing", "said"),
    [("config.json", "config.json"), ("tokenizer.json", "tokenizer"), ("model.safetensors", "safetensors")],
)
def test_upload_refuses_other_folder_before_sending(
    gateway: FakeGateway, model_folder: Path, missing: str, said: str
) -> None:
    (model_folder / missing).unlink()
    with GatewayClient(gateway.url, TENANT_KEY) as client, pytest.raises(CliError, match=said) as caught:
        ModelUpload(client, model_folder, "tiny", lambda *_: None).run({})
    assert caught.value.hint
    assert gateway.asked == []


def test_cli_and_store_agree_on_model_files(tmp_path: Path) -> None:
    names = ["config.json", "tokenizer.json", "merges.txt", "vocab.json", "chat_template.jinja", "model.safetensors"]
    names += ["special_tokens_map.json", "added_tokens.json", "modules.json", "1_Pooling/config.json"]
    (tmp_path / "1_Pooling").mkdir()
    for name in (*names, "README.md", "pytorch_model.bin", "consolidated.safetensors"):
        (tmp_path / name).touch()
    assert {path.relative_to(tmp_path).as_posix() for path in model_paths(tmp_path)} == set(names)
    check_declared([DeclaredFile(name, 10, "0" * 64) for name in names], 0, 1 << 40)


def test_cli_and_store_agree_on_the_files_of_an_adapter(tmp_path: Path) -> None:
    names = ["adapter_config.json", "adapter_model.safetensors"]
    for name in (*names, "README.md", "tokenizer.json"):
        (tmp_path / name).touch()
    assert [path.name for path in adapter_paths(tmp_path)] == names
    check_declared([DeclaredFile(name, 10, "0" * 64) for name in names], 0, 1 << 40)
    for wrong in (names[:1], [*names, "tokenizer.json"]):
        with pytest.raises(UploadRefused):
            check_declared([DeclaredFile(name, 10, "0" * 64) for name in wrong], 0, 1 << 40)
    with pytest.raises(CliError, match="is a LoRA adapter"):
        model_paths(tmp_path)
    (tmp_path / names[1]).unlink()
    with pytest.raises(CliError, match=r"has no adapter_model\.safetensors"):
        adapter_paths(tmp_path)


def test_index_decides_which_weights_are_sent(model_folder: Path) -> None:
    (model_folder / "model.safetensors").rename(model_folder / "part-a.safetensors")
    (model_folder / "model-00009-of-00009.safetensors").touch()
    index = model_folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-a.safetensors"}}))
    sent = {"config.json", "generation_config.json", "tokenizer.json", "part-a.safetensors", index.name}
    assert {path.name for path in model_paths(model_folder)} == sent
    check_declared([DeclaredFile(name, 10, "0" * 64) for name in sent], 0, 1 << 40)
    (model_folder / "model.safetensors").touch()
    assert {path.name for path in model_paths(model_folder)} == sent
    index.write_text(json.dumps({"weight_map": {"a": "merged.safetensors"}}))  # into the single file, which is sent
    assert {path.name for path in model_paths(model_folder)} == sent - {"part-a.safetensors"} | {"model.safetensors"}
    (model_folder / "model.safetensors").unlink()
    for text, said in {
        '{"weight_map": {"a": "../part-b.safetensors"}}': "has no ../part-b.safetensors, which",
        '{"weight_map": {"a": 3}}': "has no 3, which",
        '{"weight_map": []}': "is not an index of weights",
        "[": "is not an index of weights",
    }.items():
        index.write_text(text)
        with pytest.raises(CliError, match=said):
            model_paths(model_folder)
