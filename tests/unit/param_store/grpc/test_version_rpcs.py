"""Published versions over gRPC: content addressed, described, read, deleted; they outlive the store's process."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path

import pytest
from blake3 import blake3

from tests.unit.param_store.model_folders import config_of, tensors_of, write_folder
from tests.unit.param_store.running_store import RunningStore, contents, publish, refusal, running_store
from torchrelay.common.errors import DataCorrupted, InvalidRequest, NotFound, Unavailable
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.param_store.remote.file_reader import FileReader
from torchrelay.param_store.remote.folder_store import FolderStore
from torchrelay.transfer.manifest import decode_manifest, pack_id_of


def stored(folder: Path) -> set[str]:
    """The remote store's objects."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


async def describe(store: RunningStore, version_id: str) -> pb.VersionDescription:
    return (await store.stub.Describe(pb.DescribeRequest(version_id=version_id))).version


async def read(store: RunningStore, digest: str) -> bytes:
    return b"".join([part.data async for part in store.stub.ReadFile(pb.ReadFileRequest(digest=digest))])


async def delete(store: RunningStore, version_id: str) -> int:
    return (await store.stub.DeleteVersion(pb.DeleteVersionRequest(version_id=version_id))).num_bytes_freed


async def test_tokenizer_with_tokens_of_other_files_is_published(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    declared = {"added_tokens_decoder": {"1": {"content": "t1", "special": True, "normalized": False}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    async with running_store(tmp_path) as store:
        version = await publish(store, folder)
        digests = version.file_digests
        tokenizer = json.loads(await read(store, digests["tokenizer.json"]))
        assert await read(store, digests["tokenizer_config.json"]) == contents(folder)["tokenizer_config.json"]
        assert set(digests) == set(contents(folder)) - {"model.safetensors"}
    uploaded = json.loads((folder / "tokenizer.json").read_text())
    assert [token["content"] for token in tokenizer.pop("added_tokens")] == ["t1", "<s>", "<image_soft_token>"]
    assert tokenizer == {key: value for key, value in uploaded.items() if key != "added_tokens"}


async def test_version_description_survives_restart(tmp_path: Path) -> None:
    config = config_of("Qwen2ForCausalLM", tie_word_embeddings=True)
    folder = write_folder(tmp_path / "model", config, "BF16")
    async with running_store(tmp_path) as store:
        version = await publish(store, folder)
    async with running_store(tmp_path) as store:
        assert await describe(store, version.version_id) == version
        for name, digest in version.file_digests.items():
            assert await read(store, digest) == contents(folder)[name]
    assert version.architecture == "Qwen2ForCausalLM"
    assert version.dtype == "BF16"
    shape = version.shape
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.kv_dtype_bytes) == (2, 2, 16, 2)
    assert (shape.max_context_tokens, shape.vocab_size) == (512, 96)
    assert list(version.eos_token_ids) == [2, 5]
    assert version.routing_block_tokens == 64
    assert set(version.file_digests) == set(contents(folder)) - {"model.safetensors"}
    remote = tmp_path / "remote"
    pack, manifest = remote / f"packs/{version.pack_id}", remote / f"packs/{version.pack_id}.manifest"
    assert pack_id_of(manifest.read_bytes()) == version.pack_id
    assert blake3((remote / f"versions/{version.version_id}.json").read_bytes()).hexdigest() == version.version_id
    assert version.pack_bytes == pack.stat().st_size
    files = sum(len(data) for name, data in contents(folder).items() if name != "model.safetensors")
    assert version.stored_bytes == version.pack_bytes + manifest.stat().st_size + files
    entry = decode_manifest(manifest.read_bytes()).tensors[0]
    data = pack.read_bytes()[entry.offset : entry.offset + entry.num_bytes]
    assert data == tensors_of(config, "BF16").by_name["model.embed_tokens.weight"][2]


async def test_deletion_counts_references_of_shared_objects(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    async with running_store(tmp_path) as store:
        first = await publish(store, folder)
        before = stored(tmp_path / "remote")
        assert await publish(store, folder) == first
        assert stored(tmp_path / "remote") == before
        (folder / "chat_template.jinja").write_text("another template")
        second = await publish(store, folder)
        assert second.pack_id == first.pack_id
        assert second.version_id != first.version_id
        assert await delete(store, first.version_id) == len("{{ messages }}")
        assert await describe(store, second.version_id) == second
        assert isinstance(await refusal(describe(store, first.version_id)), NotFound)
        assert await delete(store, second.version_id) == second.stored_bytes
        assert stored(tmp_path / "remote") == set()


@pytest.mark.parametrize(
    "failure",
    [OSError(errno.ENOSPC, "No space left on device"), Unavailable("it does not answer")],
    ids=["full", "away"],
)
async def test_failed_publication_can_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    folder = write_folder(tmp_path / "model")
    put_bytes = FolderStore.put_bytes

    def fail(remote: FolderStore, key: str, data: bytes) -> None:
        if key.startswith("versions/"):
            raise failure
        put_bytes(remote, key, data)

    async with running_store(tmp_path) as store:
        kept = await publish(store, folder)
        before = stored(tmp_path / "remote")
        other = write_folder(tmp_path / "other", seed=1)
        await store.send(other, "u1")
        monkeypatch.setattr(FolderStore, "put_bytes", fail)
        error = await refusal(store.commit("u1"))
        is_full = isinstance(failure, OSError)
        assert (error.code == "disk_full", str(tmp_path) in error.message) == (is_full, is_full)
        assert stored(tmp_path / "remote") == before
        assert await describe(store, kept.version_id) == kept
        monkeypatch.undo()
        assert (await store.commit("u1"))[-1].version.pack_id != kept.pack_id


async def test_large_file_is_read_a_piece_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store held an adapter of up to 512 MB for each call."""
    content = bytes(range(256)) * (40 << 10)  # 10 MiB
    digest, lengths = blake3(content).hexdigest(), []
    read_into = FileReader.read_into

    def noted(reader: FileReader, offset: int, view: memoryview, stop: threading.Event) -> None:
        lengths.append(len(view))
        read_into(reader, offset, view, stop)

    async with running_store(tmp_path) as store:
        (tmp_path / "remote" / "files").mkdir(parents=True, exist_ok=True)
        (tmp_path / "remote" / "files" / digest).write_bytes(content)
        monkeypatch.setattr(FileReader, "read_into", noted)
        monkeypatch.delattr(FolderStore, "get_bytes")
        assert await read(store, digest) == content
    assert sum(lengths) == len(content) and max(lengths) <= 4 << 20


async def test_bad_ids_and_damaged_objects_are_refused(tmp_path: Path) -> None:
    async with running_store(tmp_path) as store:
        version = await publish(store, write_folder(tmp_path / "model"))
        for bad in ("../../etc/passwd", "A" * 64, ""):
            assert isinstance(await refusal(read(store, bad)), InvalidRequest)
        assert isinstance(await refusal(read(store, "0" * 64)), NotFound)
        digest = version.file_digests["tokenizer.json"]
        for damaged in (f"files/{digest}", f"packs/{version.pack_id}.manifest", f"versions/{version.version_id}.json"):
            (tmp_path / "remote" / damaged).write_bytes(b"{}")
        assert isinstance(await refusal(read(store, digest)), DataCorrupted)
        assert isinstance(await refusal(describe(store, version.version_id)), DataCorrupted)
