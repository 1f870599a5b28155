"""A program that cannot start names the setting in a single sentence, without a traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
from pydantic_settings import BaseSettings

from tests.support.wait import HANG_S, wait_until
from torchrelay.cli.main import main
from torchrelay.common.process.settings import misspelt
from torchrelay.gateway.settings import GatewaySettings
from torchrelay.param_store.settings import StoreSettings
from torchrelay.scheduler.settings import SchedulerSettings
from torchrelay.worker.settings import WorkerSettings

SCRIPTS = Path(sys.executable).parent
KEY = "ab" * 32
KEYED = ("--node-key", KEY)
SERVICES: list[type[BaseSettings]] = [GatewaySettings, SchedulerSettings, StoreSettings, WorkerSettings]


def ended(program: str, *args: str, cwd: Path, env: Mapping[str, str] = MappingProxyType({})) -> tuple[int, str]:
    """Exit status and standard error of a program that is expected to end by itself."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")}
    ran = subprocess.run(
        (str(SCRIPTS / program), *args),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**clean, **env},
    )
    return ran.returncode, ran.stderr


Up = Callable[..., tuple[object, str]]


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Up:
    """``ended`` for ``torchrelay up`` in ``tmp_path``, without the CPU of another process."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TORCHRELAY_")]:
        monkeypatch.delenv(name)

    def ended_up(*args: str, env: Mapping[str, str] = MappingProxyType({})) -> tuple[object, str]:
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ending:
            patch.setattr(sys, "argv", ["torchrelay", "up", *args])
            for name, value in env.items():
                patch.setenv(name, value)
            main()
        return ending.value.code, capsys.readouterr().err

    return ended_up


@contextmanager
def hung_server() -> Iterator[str]:
    """The address of a server that lets everybody connect and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


NO_FILES = {f"TORCHRELAY_TLS_{name}_FILE": "absent" for name in ("CA", "CERT", "KEY")}


@pytest.mark.parametrize(
    ("options", "env", "message", "hint"),
    [
        (("--device", "cuda:7"), {}, "cuda:7 is asked for and this machine has", "--device cpu"),
        (("--arena-mb", "1"), {}, "an arena of 1 MiB holds no model", "--arena-mb"),
        (("--arena-mb", "1000000"), {}, "an arena of 1.049 TB is asked for and ", "--arena-mb"),
        (("--kv-pool-mb", "1000000"), {}, "2.097 TB are asked for KV and ", "--kv-pool-mb"),
        (("--threads", "100000"), {}, "100000 threads are asked for and this machine has ", "--threads"),
        (("--home", "file"), {}, "file cannot be used as home: it is a file", "TORCHRELAY_HOME"),
        (("--home", "/proc/home"), {}, "/proc/home cannot be used as home: ", "choose another"),
        (("--home", "x" * 300), {}, "File name too long", "choose another"),
        (("--remote", "s3:/typo"), {}, "'s3:/typo' is not a valid pack location", "s3://"),
        (("--http-port", "TAKEN"), {}, "port TAKEN on 127.0.0.1 is taken", "--http-port"),
        (("--grpc-port", "TAKEN"), {}, "port TAKEN on 127.0.0.1 is taken", "--grpc-port"),
        ((), {"TORCHRELAY_METRICS_PORT": "TAKEN"}, "port TAKEN on 127.0.0.1 is taken", "TORCHRELAY_METRICS_PORT"),
        ((), {"TORCHRELAY_CONFIG": "absent.toml"}, "TORCHRELAY_CONFIG: absent.toml cannot be read: No such file", ""),
        ((), {"TORCHRELAY_CONFIG": "file"}, "TORCHRELAY_CONFIG: file is not TOML: ", ""),
        ((), {"TORCHRELAY_TLS_CA_FILE": "ca.crt"}, "TLS needs all three files or none", ""),
        ((), NO_FILES, "TORCHRELAY_TLS_CA_FILE: absent cannot be read: No such file", ""),
    ],
)
def test_up_names_what_the_machine_cannot_meet(
    up: Up, tmp_path: Path, options: tuple[str, ...], env: dict[str, str], message: str, hint: str
) -> None:
    (tmp_path / "file").write_text("log_level = ")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = {name: value.replace("TAKEN", port) for name, value in env.items()}
        status, said = up(*(option.replace("TAKEN", port) for option in options), env=given)
    lines = said.splitlines()
    assert status == 1, said
    assert lines[0].startswith("torchrelay: ") and message.replace("TAKEN", port) in " ".join(said.split())
    assert hint in lines[-1] and "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "no home is left behind"


@pytest.mark.parametrize(
    ("program", "args", "message"),
    [
        ("worker", ("--device", "cuda:7"), "device (TORCHRELAY_DEVICE): GPU 7 is configured, but torch finds"),
        ("worker", ("--kv-pool-bytes", str(1 << 50)), "kv_pool_bytes (TORCHRELAY_KV_POOL_BYTES): "),
        ("param-store", ("--arena-bytes", str(1 << 50)), "arena_bytes (TORCHRELAY_ARENA_BYTES): an arena of "),
        ("param-store", ("--arena-bytes", "4096"), "arena_bytes (TORCHRELAY_ARENA_BYTES): an arena must have more"),
        ("param-store", ("--arena-path", "/absent/arena"), "arena_path (TORCHRELAY_ARENA_PATH): "),
        ("param-store", ("--data-dir", "/proc/data"), "/proc/data"),
        ("gateway", ("--trace-file", "/absent/traces"), "/absent/traces: No such file or directory"),
    ],
)
def test_service_names_settings_that_the_machine_cannot_meet(
    tmp_path: Path, program: str, args: tuple[str, ...], message: str
) -> None:
    keyed = {"worker": ("--worker-id", "w", *KEYED), "param-store": ("--store-id", "s", *KEYED)}.get(program, ())
    status, said = ended(f"torchrelay-{program}", *keyed, *args, cwd=tmp_path)
    lines = [line for line in said.splitlines() if not line.startswith("{")]
    assert status == 1, said
    assert len(lines) == 1 and lines[0].startswith(f"torchrelay-{program}: ") and message in lines[0]


def test_service_names_a_taken_port(tmp_path: Path, nats_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        settings = ("--cluster-key", KEY, "--nats-url", nats_url, "--port", port)
        status, said = ended("torchrelay-scheduler", *settings, cwd=tmp_path)
        assert status == 1 and f"port (TORCHRELAY_PORT): cannot listen on 127.0.0.1:{port}: another process" in said
        assert "Traceback" not in said
        status, said = ended("torchrelay-gateway", "--http-port", port, "--nats-url", nats_url, cwd=tmp_path)
        assert status == 1 and "ddress already in use" in said and "Traceback" not in said


HANGING = [
    ("scheduler", ("--cluster-key", KEY), "nats_url (TORCHRELAY_NATS_URL): NATS at nats://127.0.0.1:"),
    ("worker", ("--worker-id", "w", *KEYED), "nats_url (TORCHRELAY_NATS_URL): NATS at nats://127.0.0.1:"),
    ("gateway", ("--database-url", "postgresql://ann:hunter2@HUNG/ledger"), "database"),
]


def test_services_name_a_hung_server_that_they_need(tmp_path: Path) -> None:
    """All at once, as each waits for its server."""

    def run(program: str, args: tuple[str, ...], address: str) -> tuple[int, str]:
        given = [each.replace("HUNG", address) for each in args]
        return ended(f"torchrelay-{program}", *given, "--nats-url", f"nats://{address}", cwd=tmp_path)

    with hung_server() as address, ThreadPoolExecutor() as threads:
        runs = [threads.submit(run, program, args, address) for program, args, _ in HANGING]
    for (program, _, message), ending in zip(HANGING, runs, strict=True):
        status, said = ending.result()
        lines = [line for line in said.splitlines() if not line.startswith("{")]
        assert status == 1 and len(lines) == 1, said
        assert lines[0].startswith(f"torchrelay-{program}: ") and message in lines[0] and "does not answer" in lines[0]
        assert "hunter2" not in said


@pytest.mark.parametrize(
    ("program", "args"),
    [
        ("gateway", ("--http-port", "0", "--grpc-port", "0", "--redis-url", "redis://ann:hunter2@HUNG/0")),
        ("param-store", ("--store-id", "s", *KEYED, "--arena-bytes", str(32 << 20))),
    ],
)
def test_service_serves_without_hung_servers_that_it_can_miss(
    tmp_path: Path, program: str, args: tuple[str, ...]
) -> None:
    ready = tmp_path / "ready.json"
    with hung_server() as address:
        given = [each.replace("HUNG", address) for each in args]
        common = ("--nats-url", f"nats://{address}", "--ready-file", str(ready))
        process = subprocess.Popen((str(SCRIPTS / f"torchrelay-{program}"), *given, *common), cwd=tmp_path)
        try:
            wait_until(lambda: ready.exists() or process.poll() is not None, "the service's ready file")
            process.terminate()
            assert process.wait(HANG_S) == 0
        finally:
            process.kill()
            process.wait()


def test_misspelt_key_of_the_file_gets_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("arena_byte = 1\n")
    config = {"TORCHRELAY_CONFIG": "settings.toml"}
    status, said = ended("torchrelay-param-store", "--store-id", "s", *KEYED, cwd=tmp_path, env=config)
    assert status == 2
    assert said == (
        "torchrelay-param-store: settings.toml: 'arena_byte' is not a setting; did you mean 'arena_bytes'?\n"
    )


@pytest.mark.parametrize("settings", SERVICES, ids=lambda settings: settings.__name__)
def test_settings_of_other_services_are_no_misspellings(settings: type[BaseSettings]) -> None:
    others = {name for each in SERVICES for name in each.model_fields} - settings.model_fields.keys()
    known = settings.model_fields
    assert {name: misspelt(name, known) for name in others if misspelt(name, known)} == {}
