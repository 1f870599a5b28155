"""deploy/ matches the settings classes: every service, variable, port, volume and health check."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError

from tests.support.brokers import free_port, listening, nats_server
from tests.support.deploy import (
    COMPOSE,
    DEPLOY,
    DISTRIBUTIONS,
    NODE,
    REFERENCE,
    REPO,
    SERVICES,
    SETTINGS,
    distribution_in,
    environment_of,
    health_check_of,
    health_options_of,
    needed,
    pip_installs,
    recipe_of,
    stages_of,
)
from tests.support.nats_wire import publication, refusal
from torchrelay.cli.home import Home
from torchrelay.cli.up.plan import StackPlan, UpOptions
from torchrelay.cli.up.ports import Ports
from torchrelay.common.net.nats_permissions import authorization
from torchrelay.param_store.settings import StoreSettings


@pytest.fixture(scope="module")
def secrets() -> dict[str, str]:
    """The secrets that make_env.py writes."""
    made: dict[str, str] = runpy.run_path(str(DEPLOY / "make_env.py"))["secrets_for_compose"]()
    return made


def test_compose_runs_what_up_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All services, by the same programs; with PostgreSQL, as SQLite has no process."""
    folders = {path.name for path in (DEPLOY.parent / "services").iterdir() if path.is_dir()}
    assert folders == set(SETTINGS) == {name for name, service in SERVICES.items() if "build" in service}
    assert {recipe_of(name) for name in {*SETTINGS, NODE}} == set((DEPLOY / "images").iterdir())
    for name in ("TORCHRELAY_REDIS_URL", "TORCHRELAY_NATS_URL"):
        monkeypatch.delenv(name, raising=False)
    home = Home(tmp_path)
    home.make()
    with closing(Ports()) as ports:
        children = StackPlan(home, UpOptions(), ports).stack().specs
    programs = {child.name.removesuffix("-0"): Path(child.command[0]).name for child in children}
    assert programs.keys() | {"postgres"} == {name for name, each in SERVICES.items() if "profiles" not in each}
    for name in SETTINGS:
        assert json.loads(stages_of(name)[-1]["ENTRYPOINT"][0]) == [programs[name]]


@pytest.mark.parametrize("name", SETTINGS)
def test_environment_and_image_form_valid_settings(
    name: str, secrets: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service's settings accept its environment; the image repeats a part of it, and checks the same port."""
    environment, fields = SERVICES[name]["environment"], SETTINGS[name].model_fields
    variables = {f"TORCHRELAY_{field.upper()}" for field in fields}
    assert set(environment) <= variables
    for variable, value in environment.items():
        monkeypatch.setenv(variable, REFERENCE.sub(lambda match: secrets[match[1]], str(value)))
    settings = SETTINGS[name]()
    assert settings.host == "0.0.0.0" and settings.advertised_host == name

    image = stages_of(name)[-1]
    of_image = environment_of(image)
    ours = {variable: value for variable, value in of_image.items() if variable.startswith("TORCHRELAY_")}
    assert set(ours) <= variables and {variable: environment[variable] for variable in ours} == ours
    servers = {field for field in ("port", "grpc_port", "http_port") if field in fields}
    assert set(" ".join(image["EXPOSE"]).split()) == {environment[f"TORCHRELAY_{field.upper()}"] for field in servers}
    port = environment["TORCHRELAY_GRPC_PORT" if name == "gateway" else "TORCHRELAY_PORT"]
    check, command = SERVICES[name]["healthcheck"], ["torchrelay-health", f"127.0.0.1:{port}"]
    assert check["test"] == ["CMD", *command] and health_check_of(image) == command
    assert health_options_of(image) == {key: check[key] for key in ("interval", "timeout", "start_period")}


def image_package(name: str) -> str:
    """The package that an image is for."""
    return "torchrelay" if name == NODE else f"torchrelay-{name}"


@pytest.mark.parametrize("name", [*SETTINGS, NODE])
def test_image_installs_exactly_needed_packages(name: str) -> None:
    build = stages_of(name)[0]
    copied = {target: source for source, target in map(str.split, build["COPY"])}
    folders = [word for word in pip_installs(name)[-1] if word.startswith("./")]
    installed = {}
    for folder in folders:
        path, _, extra = folder.removesuffix("]").partition("[")
        assert copied[path] == path.removeprefix("./"), f"{folder} is installed, and not copied"
        installed[distribution_in(REPO / path).name] = set(extra.split(",")) - {""}
    assert copied.keys() - {"./"} == {folder.partition("[")[0] for folder in folders}
    assert installed == needed(image_package(name))


@pytest.mark.parametrize("name", [*SETTINGS, NODE])
def test_recipe_pins_match_constraints(name: str) -> None:
    build, image = stages_of(name)
    (base,) = image["FROM"]
    assert build["FROM"] == [f"{base} AS build"] and re.fullmatch(r"python:3\.11\.\d+-[\w-]+", base)
    pins = dict(line.split("==") for line in (REPO / "constraints.txt").read_text().split() if "==" in line)
    *others, own = pip_installs(name)
    for command in others:
        is_constrained = "-c" in command and command[command.index("-c") + 1] == "constraints.txt"
        words = command[command.index("install") + 1 :]
        for requirement in {word for word in words if re.match(r"[a-z]", word)} - {"constraints.txt"}:
            distribution, _, version = requirement.partition("==")
            assert distribution in pins and (is_constrained or version == pins[distribution]), requirement
    assert "constraints.txt ./" in build["COPY"] and own[own.index("-c") + 1] == "constraints.txt"


@pytest.mark.parametrize("name", [*SETTINGS, NODE])
def test_image_that_may_compute_on_gpus_has_what_triton_compiles_with(name: str) -> None:
    """Torch for CUDA installs Triton, which compiles its launchers in the container: by gcc, with Python's headers."""
    image = stages_of(name)[-1]
    apt = [value for value in image["RUN"] if "apt-get install -y --no-install-recommends $COMPILER" in value]
    installs_torch = any(word.startswith("torch==") for words in pip_installs(name) for word in words)
    assert len(apt) == installs_torch
    assert ('COMPILER="gcc libc6-dev"' in image.get("ARG", ())) == installs_torch
    (base,) = image["FROM"]  # Docker's own python images have Python.h, Debian's package python3 does not
    assert base.startswith("python:") and installs_torch == ("torchrelay-worker" in needed(image_package(name)))


@pytest.mark.parametrize("name", SETTINGS)
def test_image_runs_its_services_version_and_program_unprivileged(name: str) -> None:
    build, image = stages_of(name)
    own = DISTRIBUTIONS[f"torchrelay-{name}"]
    assert SERVICES[name]["image"] == f"torchrelay/{name}:{own.version}"
    programs: dict[str, str] = {}
    for distribution in needed(own.name):
        programs |= DISTRIBUTIONS[distribution].programs
    (program,) = json.loads(image["ENTRYPOINT"][0])
    for command in (program, health_check_of(image)[0]):
        module, _, function = programs[command].partition(":")
        assert callable(getattr(import_module(module), function)), command
    assert program in own.programs or programs[program] == "torchrelay.worker.main:main", "another service's program"
    (copy,) = image["COPY"]
    source, venv, target = copy.split()
    assert (source, venv) == ("--from=build", target) and f"python -m venv {venv} " in build["RUN"][-1]
    assert environment_of(image)["PATH"].split(":")[0] == f"{venv}/bin"
    (user,) = image["USER"]
    assert any(command.startswith("useradd ") and user in command.split() for command in image["RUN"])
    assert user != "root" and list(image).index("USER") < list(image).index("ENTRYPOINT")


@pytest.mark.parametrize("name", SERVICES)
def test_containers_are_pinned_drop_all_rights_and_restart(name: str) -> None:
    service = SERVICES[name]
    assert re.search(r":\d", service["image"]) and "latest" not in service["image"]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"] and "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert "/tmp" in service["tmpfs"] and service.get("user", "") not in ("0", "root")
    assert re.fullmatch(r"\d+[mg]", service["mem_limit"])
    assert "privileged" not in service and "network_mode" not in service
    assert "ports" not in service or name in ("gateway", "ingress")


@pytest.mark.parametrize("name", ["prefill", "decode", "gateway", "param-store"])
def test_services_end_before_docker_kills_them(name: str) -> None:
    service, killed_after_s = SERVICES[name], float(SERVICES[name]["stop_grace_period"].removesuffix("s"))
    if name == "param-store":
        assert int(service["environment"]["TORCHRELAY_STOP_LIMIT_S"]) < killed_after_s
    else:
        default_s = SETTINGS[name].model_fields["grace_s"].default
        assert float(service["environment"].get("TORCHRELAY_GRACE_S", default_s)) + 15 == killed_after_s


def test_addresses_point_at_services_and_their_ports() -> None:
    for name in SETTINGS:
        for variable, value in SERVICES[name]["environment"].items():
            if variable.endswith("_ADDRESS"):
                host, _, port = value.partition(":")
                assert SERVICES[host]["environment"]["TORCHRELAY_PORT"] == port, f"{name} {variable}"
            elif variable.endswith("_URL") and not str(value).startswith("file:"):
                assert urlsplit(REFERENCE.sub("secret", value)).hostname in SERVICES, f"{name} {variable}"
    environment = SERVICES["gateway"]["environment"]
    ports = (environment["TORCHRELAY_HTTP_PORT"], environment["TORCHRELAY_GRPC_PORT"])
    assert set(SERVICES["gateway"]["ports"]) == {f"127.0.0.1:{port}:{port}" for port in ports}


def test_paths_lie_on_declared_volumes_of_the_images_user() -> None:
    used = {mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", [])}
    assert used == set(COMPOSE["volumes"])
    store = SERVICES["param-store"]
    mounts = [mount.split(":")[1] for mount in store["volumes"]]
    for variable in ("TORCHRELAY_ARENA_PATH", "TORCHRELAY_DATA_DIR", "TORCHRELAY_REMOTE_URL"):
        path = store["environment"][variable].removeprefix("file://")
        assert any(path.startswith(f"{mount}/") for mount in mounts), variable
    # Docker makes a named volume root's, unless the image has the folder: the service could not write into it.
    for name in SETTINGS:
        image = stages_of(name)[-1]
        commands = [shlex.split(command) for value in image["RUN"] for command in value.split("&&")]
        for mount in SERVICES[name].get("volumes", []):
            volume, folder, *_ = mount.split(":")
            options = (COMPOSE["volumes"][volume] or {}).get("driver_opts", {})
            if "uid=10001" not in options.get("o", ""):
                assert any(words[0] == "useradd" and words[words.index("--uid") + 1] == "10001" for words in commands)
                made = [words for words in commands if words[:4] == ["install", "-d", "-o", *image["USER"]]]
                assert any(folder in words[4:] for words in made), f"{name} {folder}"


def test_workers_map_the_arena_read_only_and_it_fits_the_stores_memory() -> None:
    for name in ("prefill", "decode"):
        assert "arena:/arena:ro" in SERVICES[name]["volumes"]
    options, store = COMPOSE["volumes"]["arena"]["driver_opts"], SERVICES["param-store"]
    size = int(re.search(r"size=(\d+)", options["o"])[1])  # type: ignore[index]
    arena_bytes = int(store["environment"]["TORCHRELAY_ARENA_BYTES"])
    assert options["type"] == "tmpfs" and arena_bytes < size < 1.1 * arena_bytes
    assert "uid=10001" in options["o"]
    packer_bytes = StoreSettings.model_fields["packer_memory_bytes"].default
    assert arena_bytes + packer_bytes + (512 << 20) < int(store["mem_limit"].removesuffix("g")) << 30


def test_secrets_come_only_from_environment(secrets: dict[str, str]) -> None:
    """Each comes from .env, by the environment of the containers that need it."""
    named = re.compile(r"(KEY|TOKEN|PASSWORD|AUTH)$")
    for name, service in SERVICES.items():
        assert not REFERENCE.search(str(service.get("command", ""))), name
        for variable, value in service.get("environment", {}).items():
            if named.search(variable):
                assert REFERENCE.fullmatch(value), f"{name} {variable}"
    told = {name: set(REFERENCE.findall(str(service))) for name, service in SERVICES.items()}
    for secret in secrets:
        holders = {name for name, known in told.items() if secret in known}
        assert len(holders) <= 2, f"{secret}: {holders}"  # who shows it, and who asks for it
    assert {name for name, known in told.items() if "CLUSTER_KEY" in known} == {"scheduler"}
    assert set(secrets) == set(REFERENCE.findall((DEPLOY / "compose.yaml").read_text()))


@pytest.fixture
def passwords(secrets: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for broker in ("nats", "redis"):
        for variable, value in SERVICES[broker]["environment"].items():
            monkeypatch.setenv(variable, REFERENCE.sub(lambda match: secrets[match[1]], value))
    return secrets


async def test_nats_serves_only_its_users(passwords: dict[str, str], tmp_path: Path) -> None:
    users = runpy.run_path(str(DEPLOY / "make_env.py"))["nats_users"]()
    written = (DEPLOY / "nats.conf").read_text()
    assert COMPOSE["configs"]["nats"]["file"] == "nats.conf" and written.endswith(authorization(users))
    port = free_port()
    lines = written.replace("127.0.0.1:8222", f"127.0.0.1:{free_port()}")
    with nats_server(tmp_path, port, authorization=lines) as url:
        for name in SETTINGS:
            told = urlsplit(
                REFERENCE.sub(lambda match: passwords[match[1]], SERVICES[name]["environment"]["TORCHRELAY_NATS_URL"])
            )
            assert await refusal(url, publication(f"_INBOX.{told.username}.x"), told.username, "wrong")
            load = "store" if name == "param-store" else "worker"
            said = await refusal(url, publication(f"relay.load.{load}.{told.username}"), told.username, told.password)
            assert ("Permissions Violation" in said) == (name in ("gateway", "scheduler")), name
        assert "Authorization Violation" in await refusal(url, publication("relay.hint.key"))


async def test_redis_serves_gateway_only(passwords: dict[str, str], tmp_path: Path) -> None:
    shell, option, script = SERVICES["redis"]["command"]
    place = f"redis-server - --bind 127.0.0.1 --dir {tmp_path} --port"

    def command(port: int) -> list[str]:
        return [shell, option, script.replace("$$", "$").replace("redis-server -", f"{place} {port}")]

    with listening(command, tmp_path / "redis.log", "127.0.0.1") as port:
        told = SERVICES["gateway"]["environment"]["TORCHRELAY_REDIS_URL"]
        url = REFERENCE.sub(lambda match: passwords[match[1]], told).replace("redis:6379", f"127.0.0.1:{port}")
        async with Redis.from_url(url) as redis:
            assert await redis.set("key", "value")
        async with Redis.from_url(f"redis://127.0.0.1:{port}") as outsider:
            with pytest.raises(AuthenticationError):
                await outsider.get("key")
        check = SERVICES["redis"]["healthcheck"]["test"]
        asking = await asyncio.create_subprocess_shell(check[1].replace("redis-cli", f"redis-cli -p {port}"))
        assert check[0] == "CMD-SHELL" and await asking.wait() == 0


@pytest.fixture
def env(secrets: dict[str, str], tmp_path: Path) -> Path:
    path = tmp_path / ".env"
    path.write_text("".join(f"{name}={value}\n" for name, value in secrets.items()))
    return path


def make_env(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["make_env.py", *arguments])
    runpy.run_path(str(DEPLOY / "make_env.py"), run_name="__main__")


def assignments(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def test_old_env_gains_missing_variables(
    env: Path, secrets: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = ("NATS_DECODE_PASSWORD", "WORKER_STORE_TOKEN", "ADMIN_KEY")
    old = "# ours\n" + "".join(f"{name}={secrets[name]}\n" for name in secrets if name not in lost) + "ADMIN_KEY="
    env.write_text(old)
    env.chmod(0o644)
    make_env(monkeypatch, str(env))
    text = env.read_text()
    made = assignments(text)
    assert text.startswith(f"{old}\n") and env.stat().st_mode & 0o777 == 0o600
    admin_key = made["ADMIN_KEY"]
    assert made == secrets | {"ADMIN_KEY": admin_key} and admin_key.startswith("tra-")
    said = capsys.readouterr().out
    assert f"added: {', '.join(lost)}\n" in said and "\nADMIN_KEY: new, at random" in said
    assert not any(made[name] in said for name in lost)
    make_env(monkeypatch, str(env))
    assert env.read_text() == text and "added: nothing" in capsys.readouterr().out


@pytest.mark.parametrize(("key", "fault"), [("", "has no CLUSTER_KEY"), ("CLUSTER_KEY=xyz\n", "is not in hex")])
def test_env_without_cluster_key_is_unchanged(env: Path, key: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env.write_text(f"{key}POSTGRES_PASSWORD=x\n")
    with pytest.raises(SystemExit, match=fault):
        make_env(monkeypatch, str(env))
    assert env.read_text() == f"{key}POSTGRES_PASSWORD=x\n"


async def test_added_worker_is_accepted_without_committed_secrets(
    env: Path,
    passwords: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_worker = runpy.run_path(str(DEPLOY / "make_env.py"))["print_worker"]
    print_worker("prefill-2", env)
    for_env, for_nats, for_worker, entry = capsys.readouterr().out.split("\n\n")
    added = assignments(for_env)
    assert set(added) == {"NATS_PREFILL_2_PASSWORD", "PREFILL_2_NODE_KEY"}
    assert not any(value in text for value in added.values() for text in (for_nats, for_worker, entry))
    (asked,) = yaml.safe_load(for_nats).items()
    assert asked == ("NATS_PREFILL_2_PASSWORD", "${NATS_PREFILL_2_PASSWORD:?run make_env.py --worker prefill-2}")
    environment = yaml.safe_load(for_worker)
    copied = SERVICES["prefill"]["environment"]
    assert {name for name in copied if "prefill-1" in copied[name] or "PREFILL" in copied[name]} <= set(environment)
    url = REFERENCE.sub(lambda match: added[match[1]], environment["TORCHRELAY_NATS_URL"])
    monkeypatch.setenv("NATS_PREFILL_2_PASSWORD", added["NATS_PREFILL_2_PASSWORD"])
    written = (DEPLOY / "nats.conf").read_text().replace("127.0.0.1:8222", f"127.0.0.1:{free_port()}")
    with nats_server(
        tmp_path, free_port(), authorization=written.replace("  users: [\n", f"  users: [\n{entry}")
    ) as at:
        user, password = urlsplit(url).username, urlsplit(url).password
        assert user == "prefill-2"
        assert not await refusal(at, publication("relay.load.worker.prefill-2"), user, password)
        assert "Permissions Violation" in await refusal(at, publication("relay.load.worker.x"), user, password)


@pytest.mark.parametrize("worker_id", ["prefill-1", "gateway", "prefill", "store"])
def test_taken_worker_id_is_refused(env: Path, worker_id: str) -> None:
    with pytest.raises(SystemExit, match="choose another id"):
        runpy.run_path(str(DEPLOY / "make_env.py"))["print_worker"](worker_id, env)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--worker", "a.*"], "is not 1 to 63 lower-case letters, digits and '-'"),
        (["--worker", ">"], "is not 1 to 63 lower-case letters, digits and '-'"),
        (["--worker", "2nd"], "is not 1 to 63 lower-case letters, digits and '-'"),
        (["--worker", "Decode"], "is not 1 to 63 lower-case letters, digits and '-'"),
        (["--worker", "-x"], "expected one argument"),
        (["--force"], "unrecognized arguments: --force"),
        ([".env", "other"], "unrecognized arguments: other"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str],
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        make_env(monkeypatch, *arguments)
    assert fault in capsys.readouterr().err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_writes_nothing(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        make_env(monkeypatch, option)
    assert "[--worker ID] [FILE]" in capsys.readouterr().out and list(tmp_path.iterdir()) == []


def test_python_without_torchrelay_is_told_which_to_use(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", str(DEPLOY / "make_env.py"), str(tmp_path / ".env")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "../.venv/bin/python make_env.py" in ended.stderr
    assert "Traceback" not in ended.stderr and list(tmp_path.iterdir()) == []


def test_gpu_variant_is_one_worker_with_an_image_of_both_roles() -> None:
    variant = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())
    services = variant["services"]
    worker, store = services["prefill"], services["param-store"]
    assert services.keys() <= SERVICES.keys() and services["decode"] == {"profiles": ["cpu"]}
    given = {name.removeprefix("TORCHRELAY_").lower() for name in worker["environment"]} - {"triton_cache_dir"}
    assert given <= SETTINGS["prefill"].model_fields.keys()
    assert worker["environment"]["TORCHRELAY_ROLES"] == "prefill,decode"
    assert worker["image"].startswith(f"torchrelay/{NODE}:") and worker["build"]["args"]["COMPILER"]
    assert worker["image"].partition(":")[2] == SERVICES["prefill"]["image"].partition(":")[2]
    assert recipe_of(NODE) == REPO / worker["build"]["dockerfile"]
    assert worker["entrypoint"] == json.loads(stages_of("prefill")[-1]["ENTRYPOINT"][0])
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    arena_bytes = int(store["environment"]["TORCHRELAY_ARENA_BYTES"])
    usual, options = COMPOSE["volumes"]["arena"]["driver_opts"]["o"], variant["volumes"]["arena"]["driver_opts"]["o"]
    assert re.sub(r"size=\d+", "", options) == re.sub(r"size=\d+", "", usual)
    assert arena_bytes < int(re.search(r"size=(\d+)", options)[1]) < 1.1 * arena_bytes  # type: ignore[index]
    assert arena_bytes + (1 << 30) < int(store["mem_limit"].removesuffix("g")) << 30
