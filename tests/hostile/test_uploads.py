"""Faulty uploads are refused by file and cause, while a neighbour's chats go on."""

from __future__ import annotations

import gzip
import hashlib
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.completions import headers
from tests.support.http import http
from tests.support.platform import Platform
from tests.unit.param_store.faulty_folders import FAULTS, SHARD_FAULTS, Fault
from tests.unit.param_store.model_folders import write_folder, write_shards

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("watch")]

JSON = {"content-type": "application/json"}
CONFIG = b"{}"
# A fault of each file; the store's unit tests have them all.
FOLDERS: list[tuple[Callable[[Path], Path], Fault]] = [
    *((write_folder, fault) for fault in {fault[2]: fault for fault in FAULTS}.values()),
    *((write_shards, fault) for fault in {fault[2]: fault for fault in SHARD_FAULTS}.values()),
]


def declared(path: str, data: bytes = b"", **changes: Any) -> dict[str, Any]:
    return {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), **changes}


SOUND = [declared("config.json", CONFIG), declared("tokenizer.json", CONFIG), declared("model.safetensors", CONFIG)]


def declare(platform: Platform, key: str, files: list[dict[str, Any]]) -> httpx.Response:
    body = json.dumps({"model": "hostile", "files": files})
    return http.post(f"{platform.http}/v1/uploads", content=body, headers={**headers(key), **JSON}, timeout=60)


class Upload:
    """An open upload."""

    def __init__(self, platform: Platform, key: str, upload_id: str, data: bytes = b"") -> None:
        self.url, self.key, self.data = f"{platform.http}/v1/uploads/{upload_id}", key, data

    @classmethod
    def begin(cls, platform: Platform, key: str) -> Upload:
        """Opens an upload of three files of eight bytes, which the store has never seen."""
        data = secrets.token_bytes(8)
        begun = declare(platform, key, [declared(file["path"], data) for file in SOUND])
        assert begun.status_code == 201, begun.text
        return cls(platform, key, begun.json()["id"], data)

    def put(self, data: bytes, path: str = "config.json", key: str = "", **more: str) -> httpx.Response:
        sent = {**headers(key or self.key), **{name.replace("_", "-"): value for name, value in more.items()}}
        return http.put(f"{self.url}/files/{path}", content=data, headers=sent, timeout=60)

    def commit(self, key: str = "") -> httpx.Response:
        return http.post(f"{self.url}/commit", headers=headers(key or self.key), timeout=60)

    def abort(self, key: str = "") -> httpx.Response:
        return http.delete(self.url, headers=headers(key or self.key), timeout=60)


def send(platform: Platform, key: str, folder: Path) -> httpx.Response:
    """Uploads all files of a folder, as a client of one's own would; returns the first refusal, or the model."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    begun = declare(platform, key, [declared(name, data) for name, data in files.items()])
    if begun.status_code != 201:
        return begun
    upload = Upload(platform, key, begun.json()["id"])
    states = {state["path"]: state["complete"] for state in begun.json()["files"]}
    for name, data in files.items():
        if not states[name] and (answer := upload.put(data, name)).status_code != 200:
            upload.abort()
            return answer
    return upload.commit()


def test_faulty_folder_is_refused_by_file_and_cause(
    platform: Platform, mallory: str, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for number, (make, (name, change, file, detail)) in enumerate(FOLDERS):
        with subtests.test(name):
            folder = make(tmp_path / str(number))
            change(folder)
            refused = send(platform, mallory, folder)
            assert refused.status_code == 422, refused.text
            error = refused.json()["error"]
            assert (error["code"], error["param"]) == ("upload_refused", file)
            assert detail in error["message"]


def test_link_in_the_folder_is_sent_as_its_target(platform: Platform, mallory: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (tmp_path / "elsewhere").write_text("no JSON")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(tmp_path / "elsewhere")
    refused = send(platform, mallory, folder)
    assert refused.status_code == 422 and "not valid JSON" in refused.text
    stored = [*(platform.home.path / "store").rglob("*"), *(platform.home.path / "remote").rglob("*")]
    assert stored and not [path for path in stored if path.is_symlink()]


# What takes memory, and what only JSON or HTTP can say; the store's unit tests have the other names, sizes and digests.
DECLARATIONS: dict[str, list[dict[str, Any]]] = {
    "file above the folder": [*SOUND, declared("../model.safetensors")],
    "zero byte": [*SOUND, declared("config.json\0")],
    "lone surrogate": [*SOUND, declared("config\udc80.json")],
    "right to left": [*SOUND, declared("\u202egnp.json")],
    "501 characters": [*SOUND, declared("a" * 501)],
    "code": [*SOUND, declared("modeling.py")],
    "no files": [],
    "100,000 files": [declared(f"f{i}") for i in range(100_000)],
    "size of 2**80": [*SOUND[:2], declared("model.safetensors", size=2**80)],
    "config of a gigabyte": [declared("config.json", size=1 << 30), *SOUND[1:]],
    "more than the disk has": [*SOUND[:2], declared("model.safetensors", size=2**49)],
    "digest of a megabyte": [declared("config.json", sha256="a" * (1 << 20)), *SOUND[1:]],
    "unknown field": [{**SOUND[0], "mode": "0777"}, *SOUND[1:]],
}


def test_faulty_declaration_is_refused_before_any_byte(
    platform: Platform, mallory: str, subtests: pytest.Subtests
) -> None:
    for name, files in DECLARATIONS.items():
        with subtests.test(name):
            refused = declare(platform, mallory, files)
            assert refused.status_code in (400, 413, 422, 507), refused.text
            assert refused.json()["error"]["message"]


PUTS: dict[str, tuple[Callable[[Upload], httpx.Response], tuple[int, ...]]] = {
    "longer than declared": (lambda upload: upload.put(upload.data * 2), (422,)),
    "a megabyte instead": (lambda upload: upload.put(b"x" * (1 << 20)), (422,)),
    "other bytes": (lambda upload: upload.put(bytes(8)), (422,)),
    "compressed": (lambda upload: upload.put(gzip.compress(b"{}" * 10**6), content_encoding="gzip"), (422,)),
    "offset beyond": (lambda upload: upload.put(upload.data[1:], upload_offset="1"), (409,)),
    "offset below zero": (lambda upload: upload.put(upload.data, upload_offset="-1"), (400, 409)),
    "offset of 2**70": (lambda upload: upload.put(upload.data, upload_offset=str(2**70)), (400, 409)),
    "offset in words": (lambda upload: upload.put(upload.data, upload_offset="one"), (400,)),
    "undeclared file": (lambda upload: upload.put(b"{}", "generation_config.json"), (404, 422)),
    "file above the folder": (lambda upload: upload.put(b"{}", "..%2F..%2Fetc%2Fpasswd"), (404, 422)),
    "commit without files": (lambda upload: upload.commit(), (409, 422)),
}


def test_undeclared_file_is_refused(platform: Platform, mallory: str, subtests: pytest.Subtests) -> None:
    for name, (call, statuses) in PUTS.items():
        with subtests.test(name):
            upload = Upload.begin(platform, mallory)
            try:
                refused = call(upload)
                assert refused.status_code in statuses, refused.text
                assert refused.json()["error"]["message"]
            finally:
                upload.abort()


def test_upload_of_another_tenant_is_not_found(platform: Platform, mallory: str) -> None:
    upload = Upload.begin(platform, platform.tenant("victim"))
    for answer in (upload.commit(mallory), upload.abort(mallory), upload.put(upload.data, key=mallory)):
        assert answer.status_code == 404
    assert upload.abort().status_code == 204
