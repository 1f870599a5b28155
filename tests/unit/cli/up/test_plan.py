"""The children of an embedded install, what they are told, and their certificates."""

from __future__ import annotations

import io
import socket
import stat
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from rich.console import Console

from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home
from torchrelay.cli.up.certificates import CA_LIFE, CERT_LIFE, RENEW_BEFORE, ensure_certificates
from torchrelay.cli.up.children.child import STOP_TIMEOUT_S
from torchrelay.cli.up.children.stack import Stack
from torchrelay.cli.up.plan import OWN_CERTIFICATE, StackPlan, UpOptions, callers_of
from torchrelay.cli.up.ports import Ports
from torchrelay.cli.up.progress import StartupProgress, next_steps
from torchrelay.cli.up.tls import tls_of_install
from torchrelay.common.identity.callers import Caller
from torchrelay.common.identity.tls import Tls, TlsFiles
from torchrelay.common.process.environment import SECRET_SETTINGS
from torchrelay.transfer.protocol.tickets import derive_node_key


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for name in ("REDIS_URL", "NATS_URL", "DATABASE_URL", "TLS_CA_FILE", "TLS_CERT_FILE", "TLS_KEY_FILE"):
        monkeypatch.delenv(f"TORCHRELAY_{name}", raising=False)
    home = Home(tmp_path / "home")
    home.make()
    return home


@pytest.fixture
def ports() -> Iterator[Ports]:
    with closing(Ports()) as ports:
        yield ports


def envs(stack: Stack) -> dict[str, dict[str, str]]:
    return {spec.name: dict(spec.env) for spec in stack.specs}


def test_brokers_start_first_and_gateway_stops_first(home: Home, ports: Ports) -> None:
    stack = StackPlan(home, UpOptions(num_both_workers=1), ports).stack()
    assert [[spec.name for spec in group] for group in stack.groups] == [
        ["redis", "nats"],
        ["param-store"],
        ["scheduler"],
        ["prefill-0", "decode-0", "worker-0"],
        ["gateway"],
    ]
    assert [len(wave) for wave in stack.waves] == [2, 6]


def test_running_brokers_are_used(home: Home, ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRELAY_REDIS_URL", "redis://elsewhere:6379/0")
    monkeypatch.setenv("TORCHRELAY_NATS_URL", "nats://elsewhere:4222")
    stack = StackPlan(home, UpOptions(), ports).stack()
    assert stack.groups[0] == ()
    assert envs(stack)["gateway"]["TORCHRELAY_REDIS_URL"] == "redis://elsewhere:6379/0"
    assert envs(stack)["scheduler"]["TORCHRELAY_NATS_URL"] == "nats://elsewhere:4222"


@pytest.mark.parametrize(("engine", "expected"), [("torchrelay", 60.0), ("vllm", 180.0)])
def test_workers_of_another_engine_may_start_longer(
    home: Home, ports: Ports, monkeypatch: pytest.MonkeyPatch, engine: str, expected: float
) -> None:
    monkeypatch.setenv("TORCHRELAY_ENGINE", engine)
    stack = StackPlan(home, UpOptions(num_both_workers=1), ports).stack()
    ready_s = {spec.name: spec.ready_s for group in stack.groups for spec in group}
    assert (ready_s["worker-0"], ready_s["gateway"]) == (expected, 60.0)


def test_remote_is_below_home_by_default(home: Home, ports: Ports, tmp_path: Path) -> None:
    def told(remote: str) -> str:
        return envs(StackPlan(home, UpOptions(remote=remote), ports).stack())["param-store"]["TORCHRELAY_REMOTE_URL"]

    assert told("") == (home.path / "remote").as_uri()
    assert told(str(tmp_path / "with space")) == (tmp_path / "with space").as_uri()
    assert told("packs") == (Path.cwd() / "packs").as_uri()
    for url in ("s3://bucket/prefix", "gs://bucket", "az://container/a", "file:///srv/packs"):
        assert told(url) == url
    assert told("./a:b") == (Path.cwd() / "a:b").as_uri()
    for wrong in ("s3:///prefix", "http://host/x", "file://elsewhere/x", "s3://", "s3:/bucket", "s3:bucket", "s3://["):
        with pytest.raises(CliError, match="not a valid pack location"):
            told(wrong)


def test_metrics_ports_are_counted_up(home: Home, ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRELAY_METRICS_PORT", "9464")
    told = {
        name: env.get("TORCHRELAY_METRICS_PORT")
        for name, env in envs(StackPlan(home, UpOptions(), ports).stack()).items()
    }
    services = ("param-store", "scheduler", "prefill-0", "decode-0", "gateway")
    assert [told[name] for name in services] == ["9464", "9465", "9466", "9467", "9468"]
    monkeypatch.setenv("TORCHRELAY_METRICS_PORT", "many")
    with pytest.raises(CliError, match="METRICS_PORT is 'many'"):
        StackPlan(home, UpOptions(), ports)


def test_each_child_gets_its_certificate(home: Home, ports: Ports) -> None:
    options = UpOptions(
        host="0.0.0.0", idle_timeout_s=3, kv_pool_bytes=1 << 20, arena_bytes=1 << 30, labels=("gpu=l4", "zone=a")
    )
    stack = StackPlan(home, replace(options, pool_mode="advise", scaling="advise"), ports).stack()
    told = envs(stack)
    cluster_key = bytes.fromhex(home.cluster_key())
    assert told["prefill-0"]["TORCHRELAY_NODE_KEY"] == derive_node_key(cluster_key, "prefill-0").hex()
    assert told["prefill-0"]["TORCHRELAY_ROLES"].split(",")[0] == "prefill"
    assert told["decode-0"]["TORCHRELAY_ROLES"].split(",")[0] == "decode"
    assert told["decode-0"]["TORCHRELAY_KV_POOL_BYTES"] == str(1 << 20)
    assert told["decode-0"]["TORCHRELAY_LABELS"] == "gpu=l4,zone=a"
    assert told["param-store"]["TORCHRELAY_ARENA_BYTES"] == str(1 << 30)
    assert told["param-store"]["TORCHRELAY_ARENA_PATH"] == str(stack.arena)
    assert 0 < int(told["param-store"]["TORCHRELAY_STOP_LIMIT_S"]) < STOP_TIMEOUT_S
    assert {env["TORCHRELAY_GRACE_S"] for env in told.values() if "TORCHRELAY_HOST" in env} == {"5"}
    assert [told["scheduler"][f"TORCHRELAY_{name}"] for name in ("POOL_MODE", "SCALING")] == ["advise"] * 2
    for name in ("scheduler", "gateway"):  # and what tenants are told
        assert told[name]["TORCHRELAY_IDLE_TIMEOUT_S"] == "3"
    assert told["gateway"]["TORCHRELAY_ADMIN_KEY"] == home.admin_key()
    holders_of_the_cluster_key = [name for name, env in told.items() if home.cluster_key() in env.values()]
    assert holders_of_the_cluster_key == ["scheduler"]


def test_each_child_gets_only_its_secrets(home: Home, ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRET_SETTINGS:
        if not name.endswith("_url"):  # those would name servers of another's
            monkeypatch.setenv(f"TORCHRELAY_{name.upper()}", f"somebody's {name}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("TORCHRELAY_CONFIRM_S", "0.25")
    stack = StackPlan(home, UpOptions(), ports).stack()
    whole = {spec.name: {**spec.inherited, **spec.env} for spec in stack.specs}
    assert {name for name, env in whole.items() if "AWS_SECRET_ACCESS_KEY" in env} == {"param-store"}
    for name in ("redis", "nats"):
        assert not any(variable.startswith(("TORCHRELAY_", "AWS_")) for variable in whole[name])
    services = {name: env for name, env in whole.items() if name not in ("redis", "nats")}
    assert all(env["TORCHRELAY_CONFIRM_S"] == "0.25" and "PATH" in env for env in services.values())
    told = {
        name: {setting for setting in SECRET_SETTINGS if f"TORCHRELAY_{setting.upper()}" in env}
        for name, env in services.items()
    }
    assert told["scheduler"] == {"cluster_key", "nats_url"}
    assert told["param-store"] == {"node_key", "nats_url"}
    assert told["gateway"] >= {"admin_key", "database_url", "key_pepper", "nats_url", "redis_url"}
    assert not told["gateway"] & {"cluster_key", "node_key", "api_key"}
    assert told["prefill-0"] >= {"node_key", "nats_url"}
    assert not told["prefill-0"] & {"admin_key", "api_key", "cluster_key", "database_url", "key_pepper", "redis_url"}
    assert services["gateway"]["TORCHRELAY_ADMIN_KEY"] == home.admin_key()
    urls = [env["TORCHRELAY_NATS_URL"] for env in services.values()]
    assert len(set(urls)) == len(urls)  # a password each


def test_secrets_are_hidden_from_other_users(home: Home, ports: Ports) -> None:
    """Neither in a command, which `ps` shows, nor in a file, nor in the addresses, nor in the arena's name."""
    stack = StackPlan(home, UpOptions(), ports).stack()
    passwords = [urlsplit(env[name]).password for env in envs(stack).values() for name in env if name.endswith("S_URL")]
    secrets = [home.cluster_key(), home.admin_key(), *(word for word in passwords if word)]
    assert len(secrets) == 2 + 5 + 1  # five services at NATS, the gateway at Redis
    for shown in (str([spec.command for spec in stack.specs]), str(stack.endpoints), str(stack.arena)):
        assert not any(secret in shown for secret in secrets)
        assert home.cluster_key()[:12] not in shown
    for spec in stack.groups[0]:
        settings = Path(spec.command[1 if spec.name == "redis" else 2])
        assert settings.stat().st_mode & 0o077 == 0 and any(secret in settings.read_text() for secret in secrets)


def test_workers_divide_cores(home: Home, ports: Ports) -> None:
    """All by the same file."""
    environments = envs(StackPlan(home, UpOptions(num_both_workers=1), ports).stack())
    told = [env["TORCHRELAY_CORES_FILE"] for env in environments.values() if "TORCHRELAY_ROLES" in env]
    assert told == [str(home.run / "core-shares")] * 3


@pytest.mark.parametrize(
    ("host", "reached_at"), [("::1", "[::1]"), ("::", "[::1]"), ("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")]
)
def test_urls_name_an_address_of_the_family(home: Home, ports: Ports, host: str, reached_at: str) -> None:
    stack = StackPlan(home, UpOptions(host=host), ports).stack()
    gateway = envs(stack)["gateway"]
    assert stack.endpoints["http"] == f"http://{reached_at}:{gateway['TORCHRELAY_HTTP_PORT']}"
    assert stack.endpoints["grpc"] == f"{reached_at}:{gateway['TORCHRELAY_GRPC_PORT']}"
    assert gateway["TORCHRELAY_HOST"] == host
    others = [env for name, env in envs(stack).items() if name != "gateway" and "TORCHRELAY_HOST" in env]
    assert len(others) == 4 and {env["TORCHRELAY_HOST"] for env in others} == {"127.0.0.1"}


def test_prefixed_installs_share_no_subjects(home: Home, ports: Ports, tmp_path: Path) -> None:
    other_home = Home(tmp_path / "other")
    other_home.make()
    with closing(Ports()) as other_ports:
        stack = StackPlan(home, UpOptions(), ports).stack()
        other = StackPlan(other_home, UpOptions(), other_ports).stack()
    assert not set(stack.endpoints.values()) & set(other.endpoints.values())
    assert stack.arena != other.arena


def test_home_keeps_rest_port_and_reports_conflict(home: Home, tmp_path: Path) -> None:
    with closing(Ports()) as ports, socket.socket() as taken:
        last = ports.free()
        ports.close()
        home.save_http_port(last)
        kept = StackPlan(home, UpOptions(), ports).stack()
        assert (kept.http_port, kept.taken_http_port) == (last, 0)
        assert kept.endpoints["http"].endswith(f":{last}")
        ports.close()
        taken.bind(("127.0.0.1", last))
        taken.listen()
        moved = StackPlan(home, UpOptions(), ports).stack()
        assert moved.http_port != last
        assert moved.taken_http_port == last
    for is_quiet in (False, True):
        told = io.StringIO()
        progress = StartupProgress(home, Console(file=told, width=200), is_quiet=is_quiet)
        progress.port_taken(last, moved.endpoints["http"])
        assert f"{last} is taken: REST is on {moved.endpoints['http']}" in told.getvalue()
        assert (f"TORCHRELAY_HTTP_PORT={last}" in told.getvalue()) is not is_quiet


def test_next_steps_name_folder(tmp_path: Path) -> None:
    assert next_steps(tmp_path, None)[1:] == ["torchrelay upload DIR --name mine", "torchrelay chat mine"]
    assert next_steps(tmp_path, None, has_key=True) == ["torchrelay models", "torchrelay top"]
    (tmp_path / "examples/glossary/model").mkdir(parents=True)
    assert next_steps(tmp_path, tmp_path / ".venv") == [
        ". .venv/bin/activate",
        "torchrelay key create --tenant acme",
        "torchrelay upload examples/glossary/model --name glossary",
        'torchrelay chat glossary "What is a relay?"',
    ]
    assert next_steps(tmp_path, Path("/opt/my venv"))[0] == ". '/opt/my venv/bin/activate'"


def test_quiet_progress_prints_no_hints(home: Home, ports: Ports) -> None:
    stack = StackPlan(home, UpOptions(), ports).stack()
    for is_quiet in (False, True):
        told = io.StringIO()
        progress = StartupProgress(home, Console(file=told, width=200), is_quiet=is_quiet)
        progress.up(stack.endpoints)
        progress.stopping()
        progress.stopped()
        assert "Torchrelay is up" in told.getvalue()
        hints = ("key create", f"  console   {stack.endpoints['http']}/console\n", "press Ctrl-C again", "stopped")
        assert [hint in told.getvalue() for hint in hints] == [not is_quiet] * len(hints)


def test_workers_have_gpus_of_their_own_and_an_arena_without_a_limit(home: Home, ports: Ports) -> None:
    counts = {"num_prefill_workers": 0, "num_decode_workers": 0, "num_both_workers": 2}
    options = UpOptions(**counts, device="auto", gpus=("0", "1"))  # type: ignore[arg-type]
    told = envs(StackPlan(home, options, ports).stack())
    names = ("TORCHRELAY_DEVICE", "CUDA_VISIBLE_DEVICES")
    assert [told["worker-0"][name] for name in names] == ["auto", "0"]
    assert [told["worker-1"][name] for name in names] == ["auto", "1"]
    by_number = envs(StackPlan(home, replace(options, device="cuda:0"), ports).stack())
    assert [by_number[f"worker-{number}"]["TORCHRELAY_DEVICE"] for number in (0, 1)] == ["cuda:0", "cuda:1"]
    assert told["param-store"]["TORCHRELAY_ARENA_LIMIT_BYTES"] == "0"
    on_cpu = envs(StackPlan(home, replace(options, device="cpu", gpus=()), ports).stack())
    assert on_cpu["worker-1"]["TORCHRELAY_DEVICE"] == "cpu"
    assert "TORCHRELAY_ARENA_LIMIT_BYTES" not in on_cpu["param-store"]


def test_workers_of_a_range_start_with_no_wave(home: Home, ports: Ports) -> None:
    options = UpOptions(num_prefill_workers=0, num_decode_workers=0, num_both_workers=2, least_workers=0)
    stack = StackPlan(home, options, ports).stack()
    assert stack.elastic == {"worker-0", "worker-1"} <= {spec.name for spec in stack.specs}
    assert not stack.elastic & {spec.name for wave in stack.waves for spec in wave}
    told = envs(stack)["scheduler"]
    limits = {name: told[f"TORCHRELAY_POOL_{name}"] for name in ("MODE", "MIN_SLOTS", "MAX_SLOTS")}
    assert limits == {"MODE": "follow", "MIN_SLOTS": "0", "MAX_SLOTS": "2"}


DAY = timedelta(days=1)


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
    assert files[OWN_CERTIFICATE].as_settings().items() <= stack.endpoints.items()
