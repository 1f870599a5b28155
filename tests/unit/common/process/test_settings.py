"""Settings that several fields decide together: TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.certificates import Authority
from torchrelay.common.identity.callers import Caller
from torchrelay.common.process.settings import ServiceSettings, load_settings
from torchrelay.worker.settings import WorkerSettings

FIELDS = ("tls_ca_file", "tls_cert_file", "tls_key_file")


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    for name in FIELDS:
        monkeypatch.delenv(f"TORCHRELAY_{name.upper()}", raising=False)
    return Authority(tmp_path)


def complaint(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        load_settings(ServiceSettings, "torchrelay-x", args)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_tls_is_off_without_files(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(ServiceSettings, "torchrelay-x", []).tls is None
    files = authority.node("node")
    for name, path in files.as_settings().items():
        monkeypatch.setenv(f"TORCHRELAY_{name.upper()}", path)
    settings = load_settings(ServiceSettings, "torchrelay-x", [])
    assert settings.tls_files == files
    assert settings.tls is not None


def test_half_an_identity_names_what_is_missing(authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    files = authority.node("node")
    said = complaint([f"--tls-ca-file={files.ca}"], capsys)
    assert said.startswith("torchrelay-x: TLS needs all three files or none: set ")
    assert "set TORCHRELAY_TLS_CERT_FILE and TORCHRELAY_TLS_KEY_FILE, or unset the rest" in said
    said = complaint([f"--tls-ca-file={files.ca}", f"--tls-cert-file={files.cert}"], capsys)
    assert "set TORCHRELAY_TLS_KEY_FILE, or unset the rest" in said


def test_expired_certificate_refuses_start(authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    args = [f"--{name.replace('_', '-')}={path}" for name, path in authority.expired().as_settings().items()]
    assert "certificate has expired" in complaint(args, capsys)


def test_start_refuses_certificate_of_other_role(authority: Authority) -> None:
    worker: dict[str, Any] = {"node_key": "ab" * 32, "worker_id": "w-1"}
    files = authority.node("w-1", Caller.WORKER).as_settings()
    assert WorkerSettings(**worker | files).tls is not None
    files = authority.node("w-1", Caller.STORE).as_settings()
    with pytest.raises(ValidationError, match="a worker needs one with the DNS name worker"):
        WorkerSettings(**worker | files)


def test_variable_similar_to_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("TORCHRELAY_LOG_LEVL", "TORCHRELAY_HTTP_PORT", "LOG_LEVL"):  # the second is another service's
        monkeypatch.setenv(name, "3")
    load_settings(ServiceSettings, "torchrelay-x", [])
    said = "torchrelay-x: TORCHRELAY_LOG_LEVL is not a setting and is ignored; did you mean TORCHRELAY_LOG_LEVEL?\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--log-levl", "info"], "--log-levl is not an option; did you mean --log-level?"),
        (["--log_level=info"], "--log_level is not an option; did you mean --log-level?"),
        (["--flavour", "sweet"], "--flavour is not an option"),
        (["serve"], "unrecognized arguments: serve"),
        (["--host"], "argument --host: expected one argument"),
    ],
)
def test_unknown_flag_prints_single_line(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(args, capsys) == f"torchrelay-x: {said} (torchrelay-x --help lists all)\n"


def test_only_nodes_have_node_key() -> None:
    assert "node_key" not in ServiceSettings.model_fields and "node_key" in WorkerSettings.model_fields
