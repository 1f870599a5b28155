"""Faults of a model that are reported before anything is hashed or sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import CONFIG, Run
from tests.unit.cli.fake_gateway import TENANT_KEY, FakeGateway
from torchrelay.cli.api.model_check import check_folder, check_name, is_model_name
from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home
from torchrelay.gateway.resource_names import is_name

NAMES = ["tiny", "a", "qwen2.5-0.5b_it", "9b", "", "-a", ".a", "Tiny", "a b", "a" * 64, "a" * 65, "ä", "tiny\n", "a/b"]


@pytest.mark.parametrize("name", NAMES)
def test_name_check_matches_gateway(name: str) -> None:
    assert is_model_name(name) == is_name(name)


def test_model_may_include_tenant() -> None:
    check_name("tiny")
    check_name("acme/tiny")
    for wrong in ("Acme/tiny", "acme/", "a/b/c", "/tiny"):
        with pytest.raises(CliError, match="is not a valid name"):
            check_name(wrong)


def faults_of(folder: Path) -> list[str]:
    try:
        check_folder(folder)
    except CliError as problem:
        return [problem.message]
    return []


def test_valid_model_folder_passes(model_folder: Path) -> None:
    assert faults_of(model_folder) == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "is not valid JSON"),
        ("[]", "not a JSON object"),
        ("\udcff", "is not valid JSON"),
        (json.dumps({**CONFIG, "architectures": ["T5Model"]}), "'T5Model' is not supported"),
        (json.dumps({**CONFIG, "hidden_size": "64"}), "hidden_size"),
    ],
)
def test_unsupported_config_is_refused(model_folder: Path, config: str, said: str) -> None:
    (model_folder / "config.json").write_bytes(config.encode(errors="surrogateescape"))
    with pytest.raises(CliError, match=said):
        check_folder(model_folder)


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
        check_folder(model_folder)


def test_missing_folder_or_nested_model_is_hinted(model_folder: Path) -> None:
    def refusal(folder: Path) -> tuple[str, str]:
        with pytest.raises(CliError) as refused:
            check_folder(folder)
        return refused.value.message, refused.value.hint

    above, needed = model_folder.parent, "give the folder of a Hugging Face model"
    assert refusal(above / "Tyni") == (f"{above / 'Tyni'} does not exist", needed)
    download = "; to download a model first: hf download acme/tiny --local-dir DIR"
    assert refusal(Path("acme/tiny")) == ("acme/tiny does not exist", needed + download)
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
