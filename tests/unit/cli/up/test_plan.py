"""The children of an embedded install and what they are told."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from rich.console import Console

from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home
from torchrelay.cli.up.children.child import STOP_TIMEOUT_S
from torchrelay.cli.up.children.stack import Stack
from torchrelay.cli.up.plan import StackPlan, UpOptions
from torchrelay.cli.up.ports import Ports
from torchrelay.cli.up.progress import StartupProgress, next_steps
from torchrelay.common.process.environment import SECRET_SETTINGS
from torchrelay.transfer.protocol.tickets import derive_node_key


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for name in ("TORCHRELAY_REDIS_URL", "TORCHRELAY_NATS_URL", "TORCHRELAY_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    home = Home(tmp_path)
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
    options = UpOptions(host="0.0.0.0", idle_timeout_s=3, kv_pool_bytes=1 << 20, arena_bytes=1 << 30)
    stack = StackPlan(home, replace(options, pool_mode="advise", scaling="advise"), ports).stack()
    told = envs(stack)
    cluster_key = bytes.fromhex(home.cluster_key())
    assert told["prefill-0"]["TORCHRELAY_NODE_KEY"] == derive_node_key(cluster_key, "prefill-0").hex()
    assert told["prefill-0"]["TORCHRELAY_ROLES"].split(",")[0] == "prefill"
    assert told["decode-0"]["TORCHRELAY_ROLES"].split(",")[0] == "decode"
    assert told["decode-0"]["TORCHRELAY_KV_POOL_BYTES"] == str(1 << 20)
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
    assert told == [str(home.run / "cores")] * 3


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
        StartupProgress(home, Console(file=told, width=200), is_quiet=is_quiet).up(stack.endpoints)
        assert "Torchrelay is up" in told.getvalue()
        assert ("key create" in told.getvalue()) != is_quiet


def test_workers_of_a_range_start_with_no_wave(home: Home, ports: Ports) -> None:
    options = UpOptions(num_prefill_workers=0, num_decode_workers=0, num_both_workers=2, least_workers=0)
    stack = StackPlan(home, options, ports).stack()
    assert stack.elastic == {"worker-0", "worker-1"} <= {spec.name for spec in stack.specs}
    assert not stack.elastic & {spec.name for wave in stack.waves for spec in wave}
    told = envs(stack)["scheduler"]
    limits = {name: told[f"TORCHRELAY_POOL_{name}"] for name in ("MODE", "MIN_SLOTS", "MAX_SLOTS")}
    assert limits == {"MODE": "follow", "MIN_SLOTS": "0", "MAX_SLOTS": "2"}
