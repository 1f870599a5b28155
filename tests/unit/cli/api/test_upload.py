"""Folders of models: faults that are reported before anything is sent, and uploads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint, make_encoder
from tests.support.int8_checkpoints import int8_checkpoint
from tests.unit.cli.conftest import CONFIG, Run
from tests.unit.cli.fake_gateway import TENANT_KEY, FakeGateway
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.api.model_check import check_model, check_name, is_model_name
from torchrelay.cli.api.model_files import adapter_paths, has_chat_template, left_out, model_paths
from torchrelay.cli.api.model_source import Folder
from torchrelay.cli.api.upload import ModelUpload, UploadJournal
from torchrelay.cli.errors import ApiError, CliError
from torchrelay.cli.home import Home
from torchrelay.common.errors import UploadRefused
from torchrelay.gateway.resource_names import is_name
from torchrelay.param_store.uploads.declared_files import DeclaredFile, check_declared

NAMES = ["tiny", "a", "qwen2.5-0.5b_it", "9b", "", "-a", ".a", "Tiny", "a b", "a" * 64, "a" * 65, "ä", "tiny\n", "a/b"]


def test_name_check_matches_gateway() -> None:
    assert [is_model_name(name) for name in NAMES] == [is_name(name) for name in NAMES]


def test_model_may_include_tenant() -> None:
    check_name("tiny")
    check_name("acme/tiny")
    for wrong in ("Acme/tiny", "acme/", "a/b/c", "/tiny"):
        with pytest.raises(CliError, match="is not a valid name"):
            check_name(wrong)


def test_valid_model_folder_passes(model_folder: Path) -> None:
    check_model(Folder(model_folder))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "is not valid JSON"),
        ("[]", "not a JSON object"),
        ("\udcff", "is not valid JSON"),
        (json.dumps({**CONFIG, "architectures": ["Qwen3ForCausalLm"]}), "nearest that it knows is Qwen3ForCausalLM"),
        (json.dumps({**CONFIG, "hidden_size": "64"}), "hidden_size"),
    ],
)
def test_unsupported_config_is_refused(model_folder: Path, config: str, said: str) -> None:
    (model_folder / "config.json").write_bytes(config.encode(errors="surrogateescape"))
    with pytest.raises(CliError, match=said):
        check_model(Folder(model_folder))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "safetensors file: it is empty"),
        (b"\x02" + bytes(4), "it ends within the length of its header, which takes 8 bytes, after 5"),
        (b"\xff" * 64, "claims 18,446,744,073,709,551,615 bytes, but 56 follow"),
        ((100).to_bytes(8, "little") + b"{" * 99, "claims 100 bytes, but 99 follow"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git-LFS pointer, not the weights"),
        ((2).to_bytes(8, "little") + b"[]", "its header is not that of a safetensors file"),
        ((9).to_bytes(8, "little") + b'{"w": {}}', "its header is not that of a safetensors file"),
        (
            (30).to_bytes(8, "little") + b'{"w":{"data_offsets":[0,400]}}' + bytes(399),
            "its tensors take 400 bytes, but 399 follow the header",
        ),
    ],
)
def test_truncated_or_foreign_weights_are_refused(model_folder: Path, content: bytes, said: str) -> None:
    (model_folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CliError, match=said):
        check_model(Folder(model_folder))


def test_missing_folder_or_nested_model_is_hinted(model_folder: Path) -> None:
    def refusal(folder: Path) -> tuple[str, str]:
        with pytest.raises(CliError) as refused:
            check_model(Folder(folder))
        return refused.value.message, refused.value.hint

    above, needed = (
        model_folder.parent,
        "give the folder of a Hugging Face model, or OWNER/NAME to take it from the hub",
    )
    assert refusal(above / "Tyni") == (f"{above / 'Tyni'} does not exist", needed)
    config = model_folder / "config.json"
    assert refusal(config) == (f"{config} is not a folder", needed)
    beneath = f"{model_folder} has one: torchrelay upload {model_folder} --name NAME"
    assert refusal(above) == (f"{above} has no config.json", beneath)
    cache = above / "cache"
    (cache / "snapshots" / "abc").mkdir(parents=True)
    assert refusal(cache) == (f"{cache} has no config.json", needed)
    (cache / "snapshots" / "abc" / "config.json").write_text("{}")
    assert refusal(cache)[1].startswith(f"{cache / 'snapshots' / 'abc'} has one: ")
    (cache / "other").mkdir()
    (cache / "other" / "config.json").write_text("{}")
    assert refusal(cache)[1] == needed, "which of two is not for us to say"


def test_upload_of_invalid_folder_sends_no_request(
    run: Run, home: Home, gateway: FakeGateway, model_folder: Path
) -> None:
    home.save_key(TENANT_KEY)
    problems = [run("upload", str(model_folder), "--name", "My Model").exception]
    (model_folder / "config.json").write_text(json.dumps({**CONFIG, "use_bidirectional_attention": True}))
    problems.append(run("upload", str(model_folder)).exception)
    assert all(isinstance(problem, CliError) for problem in problems)
    assert gateway.asked == []


def test_folder_to_be_quantized_is_checked_before_it_is_sent(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    assert (check_model(Folder(folder)), check_model(Folder(folder), to_int8=True)) == ("", "torchrelay")
    with pytest.raises(CliError, match=r"config\.json: quantization_config: the weights are quantized already"):
        check_model(Folder(int8_checkpoint(folder)), to_int8=True)
    with pytest.raises(CliError, match=r"config\.json: BertModel cannot be quantized here") as refused:
        check_model(Folder(make_encoder(tmp_path / "encoder")), to_int8=True)
    assert refused.value.hint == "upload without --quantize"


def test_upload_sends_model_files_only(gateway: FakeGateway, model_folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    with GatewayClient(gateway.url, TENANT_KEY) as client:
        model = ModelUpload(client, Folder(model_folder), "tiny", lambda *step: seen.append(step)).run(
            {"max_instances": 2}
        )
    assert model["id"] == "acme/tiny"
    assert set(gateway.received) == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert all(bytes(sent) == (model_folder / path).read_bytes() for path, sent in gateway.received.items())
    assert gateway.asked[-1][2] == {"max_instances": 2}
    first, *sent_files, validate, pack = dict.fromkeys(stage for stage, _, _ in seen)
    assert (first, sorted(sent_files), validate, pack) == ("hash", sorted(gateway.received), "validate", "pack")
    for path, sent in gateway.received.items():
        assert [step for step in seen if step[0] == path][-1] == (path, len(sent), len(sent))


def test_upload_resumes_after_broken_connection(gateway: FakeGateway, model_folder: Path) -> None:
    gateway.cut_after = 1_000_000
    with GatewayClient(gateway.url, TENANT_KEY) as client:
        ModelUpload(client, Folder(model_folder), "tiny", lambda *_: None).run({})
    puts = [path for method, path, _ in gateway.asked if method == "PUT" and path.endswith("model.safetensors")]
    assert len(puts) == 2
    assert bytes(gateway.received["model.safetensors"]) == (model_folder / "model.safetensors").read_bytes()


def test_files_that_the_platform_has_lost_are_sent_before_a_second_commit(
    gateway: FakeGateway, model_folder: Path
) -> None:
    gateway.loses_known_files = True
    with GatewayClient(gateway.url, TENANT_KEY) as client:
        ModelUpload(client, Folder(model_folder), "tiny", lambda *_: None).run({"quantize": "int8"})
    methods = [method for method, _, _ in gateway.asked]
    assert (methods[:3], set(methods[3:-1]), methods[-1]) == (["POST", "POST", "GET"], {"PUT"}, "POST")
    assert gateway.asked[0][2]["quantize"] == "int8"
    assert bytes(gateway.received["model.safetensors"]) == (model_folder / "model.safetensors").read_bytes()


def test_next_run_resumes_interrupted_upload(gateway: FakeGateway, model_folder: Path, tmp_path: Path) -> None:
    memory = UploadJournal(tmp_path / "memory")

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "validate":
            raise KeyboardInterrupt

    with GatewayClient(gateway.url, TENANT_KEY) as client:
        with pytest.raises(CliError, match="interrupted") as caught:
            ModelUpload(client, Folder(model_folder), "tiny", interrupt, memory).run({})
        assert "to resume" in caught.value.hint
        assert "torchrelay uploads abort upl-1" in caught.value.hint
        gateway.asked = []
        ModelUpload(client, Folder(model_folder), "tiny", lambda *_: None, memory).run({})
        assert [method for method, _, _ in gateway.asked] == ["GET", "POST"]  # what is there, then the commit
        gateway.asked = []
        ModelUpload(client, Folder(model_folder), "tiny", lambda *_: None, memory).run({})
        assert gateway.asked[0][:2] == ("POST", "/v1/uploads")  # that one was ended


def test_refused_upload_is_not_resumed(gateway: FakeGateway, model_folder: Path, tmp_path: Path) -> None:
    memory = UploadJournal(tmp_path / "memory")
    gateway.refuse_commit = True
    with GatewayClient(gateway.url, TENANT_KEY) as client:
        with pytest.raises(ApiError, match="no such architecture"):
            ModelUpload(client, Folder(model_folder), "tiny", lambda *_: None, memory).run({})
        gateway.refuse_commit, gateway.asked = False, []
        ModelUpload(client, Folder(model_folder), "tiny", lambda *_: None, memory).run({})
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
        ModelUpload(client, Folder(model_folder), "tiny", lambda *_: None).run({})
    assert caught.value.hint
    assert gateway.asked == []


def test_cli_and_store_agree_on_model_files(tmp_path: Path) -> None:
    names = ["config.json", "tokenizer.json", "merges.txt", "vocab.json", "chat_template.jinja", "model.safetensors"]
    names += ["special_tokens_map.json", "added_tokens.json", "modules.json", "1_Pooling/config.json"]
    names += ["additional_chat_templates/tool_use.jinja"]
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "additional_chat_templates").mkdir()
    rag = "additional_chat_templates/rag.jinja"
    for name in (*names, rag, "README.md", "pytorch_model.bin", "consolidated.safetensors"):
        (tmp_path / name).touch()
    assert left_out(Folder(tmp_path), is_adapter=False) == [
        f"the upload leaves out {rag}: the platform selects no template by name"
    ]
    assert set(model_paths(Folder(tmp_path))) == set(names)
    check_declared([DeclaredFile(name, 10, "0" * 64) for name in names], 0, 1 << 40)


def test_cli_and_store_agree_on_the_files_of_an_adapter(tmp_path: Path) -> None:
    names = ["adapter_config.json", "adapter_model.safetensors"]
    for name in (*names, "README.md", "tokenizer.json"):
        (tmp_path / name).touch()
    assert adapter_paths(Folder(tmp_path)) == names
    reason = "an adapter has the tokenizer and the chat template of its base"
    assert left_out(Folder(tmp_path), is_adapter=True) == [f"the upload leaves out tokenizer.json: {reason}"]
    check_declared([DeclaredFile(name, 10, "0" * 64) for name in names], 0, 1 << 40)
    for wrong in (names[:1], [*names, "tokenizer.json"]):
        with pytest.raises(UploadRefused):
            check_declared([DeclaredFile(name, 10, "0" * 64) for name in wrong], 0, 1 << 40)
    with pytest.raises(CliError, match="is a LoRA adapter"):
        model_paths(Folder(tmp_path))
    (tmp_path / names[1]).unlink()
    with pytest.raises(CliError, match=r"has no adapter_model\.safetensors"):
        adapter_paths(Folder(tmp_path))


def test_index_decides_which_weights_are_sent(model_folder: Path) -> None:
    (model_folder / "model.safetensors").rename(model_folder / "part-a.safetensors")
    (model_folder / "model-00009-of-00009.safetensors").touch()
    index = model_folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-a.safetensors"}}))
    sent = {"config.json", "generation_config.json", "tokenizer.json", "part-a.safetensors", index.name}
    assert set(model_paths(Folder(model_folder))) == sent
    check_declared([DeclaredFile(name, 10, "0" * 64) for name in sent], 0, 1 << 40)
    (model_folder / "model.safetensors").touch()
    assert set(model_paths(Folder(model_folder))) == sent
    index.write_text(json.dumps({"weight_map": {"a": "merged.safetensors"}}))  # into the single file, which is sent
    assert set(model_paths(Folder(model_folder))) == sent - {"part-a.safetensors"} | {"model.safetensors"}
    (model_folder / "model.safetensors").unlink()
    for text, said in {
        '{"weight_map": {"a": "../part-b.safetensors"}}': "has no ../part-b.safetensors, which",
        '{"weight_map": {"a": 3}}': "has no 3, which",
        '{"weight_map": []}': "is not an index of weights",
        "[": "is not an index of weights",
    }.items():
        index.write_text(text)
        with pytest.raises(CliError, match=said):
            model_paths(Folder(model_folder))


@pytest.mark.parametrize("name", ["x.gguf.part1of2", "x.GGUF.aa", "x.gguf-split-a"])
def test_a_part_of_a_gguf_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CliError, match=r"(?i)is a part of the GGUF file x\.gguf$") as caught:
        model_paths(Folder(tmp_path / name))
    assert "join all its parts" in caught.value.hint


def test_chat_templates_are_found_in_either_file(tmp_path: Path) -> None:
    assert not has_chat_template(Folder(tmp_path))
    for config, found in (("{", False), ("[]", False), ("{}", False), ('{"chat_template": "x"}', True)):
        (tmp_path / "tokenizer_config.json").write_text(config)
        assert has_chat_template(Folder(tmp_path)) is found
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").touch()
    assert has_chat_template(Folder(tmp_path))
