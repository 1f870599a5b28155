"""Which files may be declared, what of them was received, and which uploads a store keeps."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.small_disk import small_disk
from tests.unit.param_store.model_folders import sha256_of, shard_name, write_folder
from tests.unit.param_store.running_store import declared
from torchrelay.common.errors import Conflict, DiskFull, NotFound, QuotaExceeded, UploadRefused
from torchrelay.param_store.uploads import staging_area
from torchrelay.param_store.uploads.declared_files import DeclaredFile, check_declared
from torchrelay.param_store.uploads.staged_upload import StagedUpload, UploadRecord
from torchrelay.param_store.uploads.staging_area import StagingArea

ZERO = "0" * 64


def a_model(*more: DeclaredFile) -> list[DeclaredFile]:
    return [DeclaredFile(name, 10, ZERO) for name in ("config.json", "tokenizer.json", "model.safetensors")] + [*more]


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        ("pytorch_model.bin", "pickled weights are never loaded"),
        ("model.pt", "save the model as safetensors"),
        ("weights/model.PKL", "pickled weights"),
        ("../config.json", "it is not a plain file name"),
        ("/etc/passwd", "it is not a plain file name"),
        ("a\\b", "it is not a plain file name"),
        ("..", "it is not a plain file name"),
        ("", "it is not a plain file name"),
        ("modeling_llama.py", "it is not one of the files that a model consists of"),
        ("model-1-of-2.safetensors", "the upload has shards and model.safetensors; it must have either"),
        (f"{shard_name(1, 2)}\n", "it is not one of the files"),
        ("config.json", "it is declared twice"),
        (shard_name(1, 2), "must have either"),
    ],
)
def test_only_known_names_may_be_declared(path: str, detail: str) -> None:
    with pytest.raises(UploadRefused, match=detail) as refused:
        check_declared(a_model(DeclaredFile(path, 10, ZERO)), 0, 1 << 20)
    assert refused.value.field in (path, "files")


@pytest.mark.parametrize("gone", ["config.json", "tokenizer.json", "model.safetensors"])
def test_required_files_must_be_declared(gone: str) -> None:
    with pytest.raises(UploadRefused, match=f"{gone}: it is missing") as refused:
        check_declared([file for file in a_model() if file.path != gone], 0, 1 << 20)
    assert refused.value.field == gone


def test_sizes_digests_and_numbers_of_files_are_bounded() -> None:
    large = DeclaredFile("merges.txt", 65 << 20, ZERO)
    with pytest.raises(UploadRefused, match=r"merges.txt: it has 68,157,440 bytes; at most 67,108,864"):
        check_declared(a_model(large), 0, 1 << 40)
    with pytest.raises(UploadRefused, match=r"merges.txt: sha256 must be 64"):
        check_declared(a_model(DeclaredFile("merges.txt", 1, "ab")), 0, 1 << 40)
    with pytest.raises(UploadRefused, match="at most 512 files"):
        check_declared(a_model() * 200, 0, 1 << 40)
    with pytest.raises(UploadRefused, match="the upload has 30 bytes; at most 29"):
        check_declared(a_model(), 0, 29)
    with pytest.raises(QuotaExceeded, match="30 bytes and the tenant's quota has 29 left"):
        check_declared(a_model(), 29, 1 << 20)
    check_declared(a_model(), 30, 30)


@pytest.fixture
def files(tmp_path: Path) -> list[DeclaredFile]:
    folder = write_folder(tmp_path / "model")
    return [DeclaredFile(file.path, file.num_bytes, file.sha256) for file in declared(folder)]


@pytest.fixture
def uploads(tmp_path: Path) -> StagingArea:
    return StagingArea(tmp_path / "uploads", 1 << 30, expiry_s=100)


def test_untouched_uploads_expire(uploads: StagingArea, files: list[DeclaredFile]) -> None:
    old = uploads.begin("old", "ten-1", files, 0)
    new = uploads.begin("new", "ten-1", files, 0)
    os.utime(old.folder / "state.json", (1000, 1000))
    os.utime(new.folder / "state.json", (1050, 1050))
    assert uploads.expire(1100.5) == ["old"]
    assert not old.folder.exists()
    with pytest.raises(NotFound, match="may have expired"):
        uploads.get("old")
    assert uploads.get("new") is new
    assert uploads.num_open == 1


def test_upload_committed_during_expiry_stays(
    uploads: StagingArea, files: list[DeclaredFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = uploads.begin("u1", "ten-1", files, 0)

    def judged() -> float:
        upload.committing = True
        return 0.0

    monkeypatch.setattr(upload, "last_touched_unix_s", judged)
    assert uploads.expire(1000.0) == []
    assert uploads.get("u1") is upload and upload.folder.exists()


def test_expiry_tolerates_concurrent_removal(uploads: StagingArea, files: list[DeclaredFile]) -> None:
    upload = uploads.begin("u1", "ten-1", files, 0)
    upload.remove()  # not forgotten yet
    assert upload.last_touched_unix_s() == 0.0
    assert uploads.expire(1000.0) == ["u1"]


def test_upload_begins_after_full_disk(tmp_path: Path, uploads: StagingArea, files: list[DeclaredFile]) -> None:
    (tmp_path / "uploads/u1/files").mkdir(parents=True)
    assert uploads.begin("u1", "ten-1", files, 0).progress()


def test_declared_bytes_reserved_for_open_uploads(tmp_path: Path, files: list[DeclaredFile]) -> None:
    uploads = StagingArea(tmp_path / "uploads", 1 << 60, expiry_s=100)
    weights = shutil.disk_usage(tmp_path).free * 3 // 10  # twice that is needed, for the pack
    large = [f if f.path != "model.safetensors" else DeclaredFile(f.path, weights, f.sha256) for f in files]
    uploads.begin("u1", "ten-1", large, 0)
    with pytest.raises(DiskFull, match="bytes left and the upload needs"):
        uploads.begin("u2", "ten-2", large, 0)
    uploads.abort("u1")
    uploads.begin("u2", "ten-2", large, 0)


def test_last_refused_upload_kept_for_hour(tmp_path: Path, files: list[DeclaredFile]) -> None:
    uploads = StagingArea(tmp_path / "uploads", 1 << 30, expiry_s=86400)
    for name, tenant in (("u1", "ten-1"), ("u2", "ten-1"), ("u3", "ten-2")):
        upload = uploads.begin(name, tenant, files, 0)
        uploads.refuse(upload)
    assert uploads.num_open == 0
    assert sorted(path.name for path in (tmp_path / "uploads").iterdir()) == ["u2", "u3"]
    refused_at = uploads.get("u2").last_touched_unix_s()
    assert uploads.expire(refused_at + 3000) == []
    assert "u2" in uploads.expire(refused_at + 3700)


def a_disk(root: Path, capacity_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links of a file take its bytes once."""

    def left(path: Path) -> int:
        sizes = {status.st_ino: status.st_size for file in root.rglob("files/*") if (status := file.stat())}
        return capacity_bytes + staging_area._RESERVED_DISK_BYTES - sum(sizes.values())

    monkeypatch.setattr(staging_area, "free_bytes", left)


def sent(uploads: StagingArea, name: str, files: dict[str, bytes]) -> StagedUpload:
    declared = [DeclaredFile(path, len(data), sha256_of(data)) for path, data in files.items()]
    upload = uploads.begin(name, "ten-1", declared, 0)
    for path, data in files.items():
        if (writer := upload.open_file(path, upload.file_progress(path).num_bytes_received)) is not None:
            writer.write(data)
            writer.finish()
            writer.close()
    return upload


def test_files_kept_after_refusal_need_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = StagingArea(tmp_path / "uploads", 1 << 30, expiry_s=100)
    documents = {"config.json": b"{}", "tokenizer.json": b"{}"}
    a_disk(tmp_path, 260_000, monkeypatch)  # twice the weights, and some more
    uploads.refuse(sent(uploads, "u1", {**documents, "model.safetensors": bytes(100_000)}))
    resent = sent(uploads, "u2", {**documents, "config.json": b"{ }", "model.safetensors": bytes(100_000)})
    assert resent.file_progress("model.safetensors").complete
    uploads.refuse(resent)
    other = sent(uploads, "u3", {**documents, "model.safetensors": b"1" * 100_000})  # nothing to take over
    assert other.file_progress("model.safetensors").complete and not resent.folder.exists()
    with pytest.raises(DiskFull, match="needs 600,00"):
        sent(uploads, "u4", {**documents, "model.safetensors": bytes(300_000)})


def test_invalid_upload_folders_removed_at_start(tmp_path: Path) -> None:
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/state.json").write_text("{")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/state.json").write_bytes(b'{"upload_id": "\xff"}')
    assert StagingArea(tmp_path, 1 << 30, 100).num_open == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.lab
def test_upload_too_large_for_disk_refused_first(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 48 << 20) as disk:
        uploads = StagingArea(disk.folder, 1 << 30, expiry_s=100)
        documents = [DeclaredFile(name, 1 << 10, "0" * 64) for name in ("config.json", "tokenizer.json")]
        too_large = [*documents, DeclaredFile("model.safetensors", 10 << 20, "0" * 64)]
        small = [*documents, DeclaredFile("model.safetensors", 1 << 20, "0" * 64)]
        with pytest.raises(DiskFull, match=f"disk of {disk.folder} has .* bytes left .* needs 20,975,616,"):
            uploads.begin("u1", "ten-1", too_large, 0)
        assert uploads.begin("u2", "ten-1", small, 0).progress()


def num_bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def test_file_sent_in_parts_digested_once(tmp_path: Path) -> None:
    part, num_parts = os.urandom(1 << 20), 24
    files = (DeclaredFile("model.safetensors", num_parts << 20, sha256_of(part * num_parts)),)
    upload = StagedUpload.begin(tmp_path / "u1", UploadRecord("u1", "ten-1", files), {})
    before = num_bytes_read()
    for index in range(num_parts):
        writer = upload.open_file("model.safetensors", index << 20)
        assert writer is not None and not writer.must_resume
        writer.write(part)
        writer.finish()
        writer.close()
    assert num_bytes_read() - before < 4 << 20
    assert upload.file_progress("model.safetensors").complete


def test_complete_file_may_be_sent_again_during_a_commit(uploads: StagingArea) -> None:
    documents = {name: b"{}" for name in ("config.json", "tokenizer.json", "model.safetensors")}
    upload = sent(uploads, "u1", documents)
    upload.begin_commit()
    assert upload.open_file("config.json", 0) is None
    with pytest.raises(Conflict, match="being committed"):
        upload.open_file("config.json", 2)


def test_received_bytes_digested_again_after_restart(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    files = (DeclaredFile("model.safetensors", len(data), sha256_of(data)),)
    upload = StagedUpload.begin(tmp_path / "u1", UploadRecord("u1", "ten-1", files), {})
    for begin_at in range(0, len(data), 1 << 20):
        upload = StagedUpload.load(tmp_path / "u1")
        writer = upload.open_file("model.safetensors", begin_at)
        assert writer is not None and writer.must_resume == bool(begin_at)
        writer.resume()
        assert not writer.must_resume
        writer.write(data[begin_at : begin_at + (1 << 20)])
        writer.finish()
        writer.close()
    assert upload.file_progress("model.safetensors").complete
