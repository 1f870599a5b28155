"""The certificates of an install: made once, kept, and made anew in time."""

from __future__ import annotations

import stat
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from torchrelay.cli.api.scheduler_client import local_tls
from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home
from torchrelay.cli.up.certificates import CA_LIFE, CERT_LIFE, RENEW_BEFORE, ensure_certificates
from torchrelay.cli.up.plan import COMMANDS, StackPlan, UpOptions, callers_of
from torchrelay.cli.up.ports import Ports
from torchrelay.cli.up.tls import tls_of_install
from torchrelay.common.identity.callers import Caller
from torchrelay.common.identity.tls import Tls, TlsFiles

DAY = timedelta(days=1)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for name in ("CA", "CERT", "KEY"):
        monkeypatch.delenv(f"TORCHRELAY_TLS_{name}_FILE", raising=False)
    home = Home(tmp_path / "home")
    home.make()
    return home


def contents(files: TlsFiles) -> tuple[bytes, bytes, bytes]:
    return files.ca.read_bytes(), files.cert.read_bytes(), files.key.read_bytes()


NODES = {"gateway": Caller.GATEWAY, "prefill-0": Caller.WORKER}


def ensure(folder: Path, now: datetime | None = None) -> TlsFiles:
    """The files of the worker, beside the gateway's."""
    return ensure_certificates(folder, NODES, now)["prefill-0"]


def end_of(path: Path) -> datetime:
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


def test_certificates_are_created_once_and_private(home: Home) -> None:
    folder = home.path / "tls"
    files = ensure(folder)
    Tls(files).check()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = ("ca", "gateway", "prefill-0")
    assert {path.name for path in folder.iterdir()} == {f"{name}.{kind}" for name in names for kind in ("crt", "key")}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.glob("*.key"))
    made = contents(files)
    assert contents(ensure(folder)) == made


def test_each_certificate_names_its_role(home: Home) -> None:
    before = ensure(home.path / "tls").cert.read_bytes()
    cert = x509.load_pem_x509_certificate(before)
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
    assert names == ["torchrelay.internal", "worker.torchrelay.internal"]
    files = ensure_certificates(home.path / "tls", {"prefill-0": Caller.STORE})["prefill-0"]
    assert files.cert.read_bytes() != before, "the file's role is another"
    Tls(files).check(Caller.STORE)


def test_new_ca_signs_all_certificates(home: Home) -> None:
    folder = home.path / "tls"
    before = ensure(folder).ca.read_bytes()
    (folder / "ca.key").unlink()
    (folder / "prefill-0.crt").unlink()  # the last one: the others are valid until then
    made = ensure_certificates(folder, NODES)
    for name, files in made.items():
        Tls(files).check(NODES[name])
        assert files.ca.read_bytes() != before
    assert made.keys() == NODES.keys()


def test_certificates_are_renewed_within_ca_validity(home: Home) -> None:
    folder = home.path / "tls"
    files = ensure(folder)
    ca, cert, _ = contents(files)
    begin = datetime.now(UTC)
    ensure(folder, begin + CERT_LIFE - RENEW_BEFORE - DAY)
    assert contents(files)[:2] == (ca, cert)
    ensure(folder, begin + CERT_LIFE - RENEW_BEFORE + DAY)
    assert contents(files)[0] == ca
    assert contents(files)[1] != cert
    late = begin + CA_LIFE - CERT_LIFE + DAY
    ensure(folder, late)
    assert contents(files)[0] != ca
    assert late + CERT_LIFE - DAY < end_of(files.cert) < end_of(files.ca)


def test_damaged_certificates_are_renewed(home: Home, tmp_path: Path) -> None:
    other = ensure(tmp_path / "other")
    for name in ("ca.crt", "prefill-0.crt", "prefill-0.key"):
        foreign = other.ca.with_name(name).read_bytes()
        for damage in (None, b"", foreign):
            files = ensure(home.path / "tls")
            path = files.ca.with_name(name)
            path.unlink()
            if damage is not None:
                path.write_bytes(damage)
            files.key.with_name("prefill-0.key.draft").touch()  # of a start that was killed
            Tls(ensure(home.path / "tls")).check()
            assert path.read_bytes() not in (b"", foreign)


def test_tls_is_off_by_default(home: Home) -> None:
    assert tls_of_install(home, UpOptions()) == {}
    assert not (home.path / "tls").exists()
    made = tls_of_install(home, UpOptions(tls=True, num_both_workers=1))
    assert {name: files.cert for name, files in made.items()} == {
        name: home.path / "tls" / f"{name}.crt"
        for name in ("param-store", "scheduler", "gateway", "prefill-0", "decode-0", "worker-0", "cli")
    }


def test_named_files_are_used(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ensure(tmp_path / "mine")
    monkeypatch.setenv("TORCHRELAY_TLS_CA_FILE", str(mine.ca))
    with pytest.raises(CliError, match="set TORCHRELAY_TLS_CERT_FILE and TORCHRELAY_TLS_KEY_FILE"):
        tls_of_install(home, UpOptions(tls=True))
    monkeypatch.setenv("TORCHRELAY_TLS_CERT_FILE", str(mine.cert))
    monkeypatch.setenv("TORCHRELAY_TLS_KEY_FILE", str(mine.key))
    used = tls_of_install(home, UpOptions())
    assert used == tls_of_install(home, UpOptions(tls=True)) and set(used.values()) == {mine}


def test_unwritable_home_is_refused(home: Home) -> None:
    (home.path / "tls").write_text("in the way")
    with pytest.raises(CliError, match="tls cannot be written"):
        tls_of_install(home, UpOptions(tls=True))


def test_commands_use_tls_files_of_endpoints(home: Home) -> None:
    files = ensure(home.path / "tls")
    assert local_tls({"scheduler": "127.0.0.1:1"}) is None
    assert local_tls({"scheduler": "127.0.0.1:1", **files.as_settings()}) is not None
    files.key.unlink()
    with pytest.raises(CliError, match="cannot be read"):
        local_tls(files.as_settings())


def test_services_get_tls_files_and_public_probe_is_plain(home: Home) -> None:
    files = ensure_certificates(home.path / "tls", callers_of(UpOptions()))
    with closing(Ports()) as ports:
        stack = StackPlan(home, UpOptions(), ports, files).stack()
    services = [spec for spec in stack.specs if spec.ready_file is not None]
    assert len(services) == 5
    for spec in services:
        told = {f"TORCHRELAY_{name.upper()}": path for name, path in files[spec.name].as_settings().items()}
        assert told.items() <= spec.env.items()
    assert [spec.name for spec in services if spec.tls is None] == ["gateway"]
    assert files[COMMANDS].as_settings().items() <= stack.endpoints.items()
