"""Which uploads a store keeps, and which it removes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.small_disk import small_disk
from tests.unit.param_store.model_folders import sha256_of, write_folder
from tests.unit.param_store.running_store import declared
from torchrelay.common.errors import DiskFull, NotFound
from torchrelay.param_store.uploads import staging_area
from torchrelay.param_store.uploads.declared_files import DeclaredFile
from torchrelay.param_store.uploads.staged_upload import StagedUpload
from torchrelay.param_store.uploads.staging_area import StagingArea


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def test_untouched_uploads_expire(tmp_path: Path, folder: Path) -> None:
    uploads = StagingArea(tmp_path / "uploads", 1 << 30, expiry_s=100)
    files = [DeclaredFile(file.path, file.num_bytes, file.sha256) for file in declared(folder)]
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


def test_upload_committed_during_expiry_stays(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = StagingArea(tmp_path / "uploads", 1 << 30, expiry_s=100)
    files = [DeclaredFile(file.path, file.num_bytes, file.sha256) for file in declared(folder)]
    upload = uploads.begin("u1", "ten-1", files, 0)

    def judged() -> float:
        upload.committing = True
        return 0.0

    monkeypatch.setattr(upload, "last_touched_unix_s", judged)
    assert uploads.expire(1000.0) == []
    assert uploads.get("u1") is upload and upload.folder.exists()


def test_expiry_tolerates_concurrent_removal(tmp_path: Path, folder: Path) -> None:
    uploads = StagingArea(tmp_path / "uploads", 1 << 30, expiry_s=100)
    files = [DeclaredFile(file.path, file.num_bytes, file.sha256) for file in declared(folder)]
    upload = uploads.begin("u1", "ten-1", files, 0)
    upload.remove()  # not forgotten yet
    assert upload.last_touched_unix_s() == 0.0
    assert uploads.expire(1000.0) == ["u1"]


def test_upload_begins_after_full_disk(tmp_path: Path, folder: Path) -> None:
    uploads = StagingArea(tmp_path / "uploads", 1 << 30, expiry_s=100)
    files = [DeclaredFile(file.path, file.num_bytes, file.sha256) for file in declared(folder)]
    (tmp_path / "uploads/u1/files").mkdir(parents=True)
    assert uploads.begin("u1", "ten-1", files, 0).progress()


def test_declared_bytes_reserved_for_open_uploads(tmp_path: Path, folder: Path) -> None:
    uploads = StagingArea(tmp_path / "uploads", 1 << 60, expiry_s=100)
    files = [DeclaredFile(file.path, file.num_bytes, file.sha256) for file in declared(folder)]
    weights = shutil.disk_usage(tmp_path).free * 3 // 10  # twice that is needed, for the pack
    large = [f if f.path != "model.safetensors" else DeclaredFile(f.path, weights, f.sha256) for f in files]
    uploads.begin("u1", "ten-1", large, 0)
    with pytest.raises(DiskFull, match="bytes left and the upload needs"):
        uploads.begin("u2", "ten-2", large, 0)
    uploads.abort("u1")
    uploads.begin("u2", "ten-2", large, 0)


def test_last_refused_upload_kept_for_hour(tmp_path: Path, folder: Path) -> None:
    uploads = StagingArea(tmp_path / "uploads", 1 << 30, expiry_s=86400)
    files = [DeclaredFile(file.path, file.num_bytes, file.sha256) for file in declared(folder)]
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
