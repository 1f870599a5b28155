"""Models of the hub: names, what is read and sent, resumed reads, damage, GGUF files, and refusals."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from tests.support import hub_server
from tests.support.checkpoints import make_checkpoint
from tests.support.hub_server import TOKEN, HubServer, running_hub
from tests.unit.cli.conftest import CONFIG, Run, refusal
from tests.unit.cli.fake_gateway import TENANT_KEY, FakeGateway
from tests.unit.cli.gguf.gguf_files import write_gguf
from torchrelay.cli.commands import upload
from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home
from torchrelay.cli.hub import repository
from torchrelay.cli.hub.name import HubName, hub_name
from torchrelay.cli.hub.repository import HubRepository

WEIGHTS = (2).to_bytes(8, "little") + b"{}" + bytes(range(256)) * 12_000
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "generation_config.json": b"",
    "additional_chat_templates/tool_use.jinja": b"x",
    "model.safetensors": WEIGHTS,
}
OTHERS = {"README.md": b"x", "pytorch_model.bin": b"x", "onnx/model.safetensors": b"x", "original/config.json": b"x"}
REPO = "Acme/Tiny-1B"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub that HF_ENDPOINT names: huggingface_hub reads the variable when it is imported, so its constant is set."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with running_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        yield hub
    huggingface_hub.close_session()


@pytest.fixture(autouse=True)
def tenant_key(home: Home) -> None:
    home.save_key(TENANT_KEY)


@pytest.mark.parametrize(
    ("source", "revision", "name"),
    [
        ("Qwen/Qwen3-8B", None, HubName("Qwen/Qwen3-8B", "", None)),
        ("Qwen/Qwen3-8B:Q4_K_M", None, HubName("Qwen/Qwen3-8B", "Q4_K_M", None)),
        ("a/b:q8_0@refs/pr/1", None, HubName("a/b", "q8_0", "refs/pr/1")),
        ("a/b", "v1.0", HubName("a/b", "", "v1.0")),
        ("hf://here/model@main", None, HubName("here/model", "", "main")),
        ("here/model", None, None),
        ("hf://here/model", None, HubName("here/model", "", None)),
        ("here/model", "main", HubName("here/model", "", "main")),
        ("gpt2", None, None),
        ("a/b/c", None, None),
        ("/a/b", None, None),
        ("../b", None, None),
        ("./a/b", None, None),
        ("~/b", None, None),
        ("a/b/", None, None),
        ("a/b@main/", None, None),
        ("here/other", "main", HubName("here/other", "", "main")),
        ("hf://here/other", None, HubName("here/other", "", None)),
    ],
)
def test_what_exists_here_is_no_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, revision: str | None, name: HubName | None
) -> None:
    (tmp_path / "here/model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_name(source, revision) == name


def test_mistyped_path_is_not_sent_to_the_hub(
    run: Run, gateway: FakeGateway, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Acme").mkdir()
    monkeypatch.chdir(tmp_path)
    hub.publish(REPO, FILES)
    refused = refusal(run("upload", REPO))
    assert refused.message == f"{REPO} does not exist, and Acme is a folder here"
    assert "a path that exists" in refused.hint and f"hf://{REPO}" in refused.hint
    assert "does not exist" in refusal(run("upload", f"./{REPO}")).message
    assert hub.asked == []


def test_model_is_read_at_one_commit_and_sent(run: Run, gateway: FakeGateway, hub: HubServer) -> None:
    first = hub.publish(REPO, FILES | OTHERS)
    last = hub.publish(REPO, FILES | {"model.safetensors": WEIGHTS[::-1]})
    for source, options, commit in (
        (REPO, (), last),
        (f"{REPO}@{first}", (), first),
        (REPO, ("--revision", first), first),
    ):
        hub.asked.clear()
        gateway.asked.clear()
        shown = run("upload", source, *options)
        assert shown.exit_code == 0, shown.exception
        assert "published acme/tiny" in shown.stdout and f"{REPO} at commit {commit}" in shown.stderr
        begun = next(body for method, path, body in gateway.asked if (method, path) == ("POST", "/v1/uploads"))
        assert begun["model"] == "tiny-1b"
        assert gateway.received == {name: hub.repos[REPO][commit][name] for name in FILES}
        assert all(f"/resolve/{commit}/" in path for _, path, _ in hub.asked if "/resolve/" in path)
        lines = [line.split()[0] for line in shown.stderr.splitlines()]
        assert sorted(line for line in lines if line in FILES) == sorted(file["path"] for file in begun["files"])


def test_token_is_told_to_the_hub_alone(
    run: Run, gateway: FakeGateway, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.publish(REPO, FILES)
    hub.private.add(REPO)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert run("upload", REPO).exit_code == 0
    told = {path.split("/")[1]: headers.get("authorization") for _, path, headers in hub.asked}
    assert told == {"api": f"Bearer {TOKEN}", "Acme": f"Bearer {TOKEN}", "cdn": None}


def test_broken_connections_resume_where_they_broke(run: Run, gateway: FakeGateway, hub: HubServer) -> None:
    hub.publish(REPO, FILES)
    hub.cut_at, end = 1_500_000, len(WEIGHTS) - 1
    assert run("upload", REPO).exit_code == 0
    assert gateway.received["model.safetensors"] == WEIGHTS
    first, second = hub.ranges("model.safetensors")
    assert first == f"bytes=0-{end}" and second != first and int(second[6:].split("-")[0]) <= 1_500_000
    hub.asked.clear()
    gateway.cut_after = 1_000_000
    assert run("upload", REPO).exit_code == 0
    assert gateway.received["model.safetensors"] == WEIGHTS
    assert hub.ranges("model.safetensors") == [f"bytes=0-{end}", f"bytes=1000000-{end}"]


def test_ranges_are_bounded_and_may_be_ignored(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "_MAX_RANGE_BYTES", 2_000_000)
    hub.publish(REPO, FILES)
    files = HubRepository(HubName(REPO, "", None))
    assert b"".join(files.blocks("model.safetensors", 7)) == WEIGHTS[7:]
    assert hub.ranges("model.safetensors") == ["bytes=7-2000006", f"bytes=2000007-{len(WEIGHTS) - 1}"]
    hub.ignores_ranges = True
    assert b"".join(files.blocks("model.safetensors", 7)) == WEIGHTS[7:]


def test_what_a_server_sends_beyond_a_range_is_not_read(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "_MAX_RANGE_BYTES", 2_000_000)
    monkeypatch.setattr(repository, "MAX_FAILED_TRIES", 0)
    hub.publish(REPO, FILES)
    hub.ignores_ranges, hub.cut_at = True, 3_000_000  # a client that reads on to there sees a broken connection
    assert b"".join(HubRepository(HubName(REPO, "", None)).blocks("model.safetensors")) == WEIGHTS


def test_document_above_the_limit_of_the_platform_is_not_read(
    run: Run, gateway: FakeGateway, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_server, "_LARGE", (".json", ".safetensors"))  # listed with a SHA-256
    hub.publish(REPO, FILES | {"config.json": b" " * (16 << 20) + FILES["config.json"]})
    assert f"{REPO}/config.json has 16,777," in refusal(run("upload", REPO)).message
    assert not any("/resolve/" in path for _, path, _ in hub.asked)


@pytest.mark.parametrize(("name", "kind"), [("config.json", "SHA-1 in Git"), ("model.safetensors", "SHA-256")])
def test_damaged_file_is_refused_by_name(run: Run, gateway: FakeGateway, hub: HubServer, name: str, kind: str) -> None:
    hub.publish(REPO, FILES)
    hub.damaged.add(name)
    refused = refusal(run("upload", REPO))
    assert f"{name}: its {kind} is" in refused.message
    assert not any(path.endswith("/commit") for _, path, _ in gateway.asked)


def test_gguf_file_is_chosen_by_quantization(
    run: Run, gateway: FakeGateway, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = write_gguf(tmp_path / "x.gguf", make_checkpoint(tmp_path / "hf", "llama"), "Q8_0").read_bytes()
    split = [f"Q2_K/tiny-Q2_K-0000{number}-of-00002.gguf" for number in (1, 2)]
    names = ["tiny-Q4_K_M.gguf", "tiny-Q4_K_S.gguf", "UD-Q4_K_S/tiny-UD-Q4_K_S.gguf", "mmproj-Q8_0.gguf", *split]
    hub.publish(REPO, {name: b"x" for name in names} | {"tiny.q8_0.gguf": content})
    hub.cut_at = 100_000
    shown = run("upload", f"{REPO}:Q8_0")
    assert shown.exit_code == 0, shown.exception
    assert {"config.json", "tokenizer.json", "model.safetensors"} < set(gateway.received)
    assert len(hub.ranges("tiny.q8_0.gguf")) == 2 and "tiny.q8_0.gguf" in shown.stderr
    cache = tmp_path / "cache/torchrelay/hub"
    assert not list(cache.iterdir()), "the copy of a published model is removed"

    monkeypatch.setattr(repository, "MAX_FAILED_TRIES", 1)
    hub.cut_at, hub.stays_cut = 100_000, True
    assert "does not answer" in refusal(run("upload", f"{REPO}:Q8_0")).message
    hub.cut_at = None
    hub.asked.clear()
    assert run("upload", f"{REPO}:Q8_0").exit_code == 0
    assert hub.ranges("tiny.q8_0.gguf") == [f"bytes=100000-{len(content) - 1}"]
    hub.damaged.add("tiny.q8_0.gguf")
    assert "tiny.q8_0.gguf: its SHA-256 is" in refusal(run("upload", f"{REPO}:Q8_0")).message
    assert not list(cache.iterdir())
    gateway.refuse_commit = True
    hub.damaged.clear()
    assert refusal(run("upload", f"{REPO}:Q8_0")).refuses_file
    assert not list(cache.iterdir()), "the copy of a refused model is removed"
    for source, message, hint in (
        (":Q4_K_S", "2 GGUF files with Q4_K_S", "name one: UD-Q4_K_S/tiny-UD-Q4_K_S.gguf, tiny-Q4_K_S.gguf"),
        (":Q4_K", "no GGUF files with Q4_K ", "tiny-Q4_K_M.gguf"),
        (":Q2_K", "has Q2_K in 2 parts", "llama-gguf-split"),
        ("", "has no config.json", "tiny-Q4_K_M.gguf"),
    ):
        refused = refusal(run("upload", REPO + source))
        assert message in refused.message and hint in refused.hint
    assert HubRepository(HubName(REPO, "", None)).gguf_file("ud-q4_k_s") == "UD-Q4_K_S/tiny-UD-Q4_K_S.gguf"


def test_gguf_file_is_refused_before_it_is_downloaded(
    run: Run, gateway: FakeGateway, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, cache = make_checkpoint(tmp_path / "hf", "llama"), tmp_path / "cache/torchrelay/hub"
    content = write_gguf(tmp_path / "x.gguf", checkpoint, "Q8_0", general__architecture="mamba").read_bytes()
    hub.publish(REPO, {"tiny.Q8_0.gguf": content + bytes(16 << 20)})
    monkeypatch.setattr(upload, "MAX_HEADER_BYTES", len(content))
    hub.cut_at, hub.stays_cut = len(content) + (8 << 20), True  # a client that reads on sees a broken connection
    assert "general.architecture" in refusal(run("upload", f"{REPO}:Q8_0")).message
    assert not list(cache.iterdir())
    free = SimpleNamespace(free=16 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: free)
        refused = refusal(run("upload", f"{REPO}:Q8_0"))
    assert f"{REPO}/tiny.Q8_0.gguf: {cache} has " in refused.message and "and the file needs" in refused.message
    (copy,) = cache.iterdir()
    with copy.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert refusal(run("upload", f"{REPO}:Q8_0")).message == f"another upload uses {copy}"


def test_refusals_say_what_to_do(
    run: Run, gateway: FakeGateway, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: str) -> CliError:
        return refusal(run("upload", source))

    hub.publish(REPO, FILES)
    assert refused("Acme/Tyni").message == f"Acme/Tyni is neither a path here nor a model of {hub.url}"
    assert "hf auth login" in refused("Acme/Tyni").hint and "HF_TOKEN" in refused("Acme/Tyni").hint
    assert refused(f"{REPO}@v9").message == f"{REPO} has no revision v9"
    assert refused("Acme/Tiny..1B").message == "Acme/Tiny..1B is not a name on the hub"
    hub.gated.add(REPO)
    assert refused(REPO).message == f"{REPO} is gated"
    assert f"accept its terms at {hub.url}/{REPO}, and log in with `hf auth login`" in refused(REPO).hint
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert refused(REPO).message == f"{hub.url} refuses the token"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert refused("Acme/Tyni").message.startswith("Acme/Tyni is neither a path")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert refused(REPO).message == "HF_HUB_OFFLINE forbids to read the hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for hub.listing, said in (b"<html>", "does not answer as a hub does"), (b'{"id": "x"}', "lists no commit"):
        assert f"{hub.url} {said}" in refused(REPO).message
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert refused(REPO).message.startswith("http://127.0.0.1:9 does not answer: ")
