"""The wheels hold every file of the packages, and suffice for the services as compose and the images start them."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest

from tests.support.brokers import free_port, nats_server, redis_server
from tests.support.deploy import (
    COMPOSE,
    DEPLOY,
    DISTRIBUTIONS,
    REFERENCE,
    REPO,
    SERVICES,
    SETTINGS,
    environment_of,
    health_check_of,
    needed,
    stages_of,
)
from tests.support.wait import wait_until
from tests.unit.gateway.postgres_server import postgres_server
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.api.upload import ModelUpload
from torchrelay.common.net.redis_users import redis_users

pytestmark = pytest.mark.timeout(600)  # the build takes minutes, and longer beside other tests
LOOPBACK = "127.0.0.1"
# Compose reserves memory for real models; these sizes do for the example's.
SMALL = {"TORCHRELAY_ARENA_BYTES": str(64 << 20), "TORCHRELAY_KV_POOL_BYTES": str(32 << 20), "TORCHRELAY_THREADS": "1"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels that `make wheels` builds, by distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    made = subprocess.run(["make", "wheels", f"DIST={folder}"], cwd=REPO, capture_output=True, text=True, timeout=500)
    assert made.returncode == 0, made.stderr
    return {path.name.partition("-")[0].replace("_", "-"): path for path in folder.iterdir()}


def test_wheels_hold_all_files_of_packages(wheels: dict[str, Path]) -> None:
    assert wheels.keys() == DISTRIBUTIONS.keys()
    for name, wheel in wheels.items():
        source = DISTRIBUTIONS[name].folder / "src"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=source, capture_output=True, text=True, check=True)
        files = {file for file in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in file}
        kernels = {file for file in files if file.endswith(".so")}
        assert files - kernels == set(listed.stdout.split("\0")) - {""}, name
        levels = {re.sub(r".*_kernels_(\w+)\..*", r"\1", file) for file in kernels}
        assert levels == ({"v3", "v4"} if name == "torchrelay-engine" else set()), name


def site_packages(root: Path) -> Path:
    """Where Python finds packages in the virtual environment at ``root``."""
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(root), "platbase": str(root)}))


def link_third_party(folder: Path) -> None:
    """Fills a folder with links to the installed packages that are not ours.

    Their versions are the image's, as both come from constraints.txt. The files that make the repository importable
    are left out.
    """
    for path in site_packages(Path(sys.prefix)).iterdir():
        if "torchrelay" not in path.name and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)


@pytest.fixture(scope="module")
def roots(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A virtual environment per image, with the wheels that its recipe installs."""
    third_party = tmp_path_factory.mktemp("third-party")
    link_third_party(third_party)
    made = {}
    for name in SETTINGS:
        made[name] = root = tmp_path_factory.mktemp(name)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True, timeout=60)
        (site_packages(root) / "third-party.pth").write_text(f"{third_party}\n")
        files = [wheels[distribution] for distribution in needed(f"torchrelay-{name}")]
        pip = [sys.executable, "-m", "pip", "--python", str(root / "bin" / "python"), "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", *files], check=True, timeout=120)
    return made


@pytest.mark.parametrize("name", SETTINGS)
def test_environment_reaches_no_source_folder(name: str, roots: dict[str, Path]) -> None:
    root = roots[name]
    program = "import sys, torchrelay; print(*torchrelay.__path__); print(*sys.path)"
    run = subprocess.run([root / "bin" / "python", "-c", program], cwd=root, env={}, capture_output=True, text=True)
    packages, path = run.stdout.splitlines()
    assert packages == str(site_packages(root) / "torchrelay")
    assert not any(Path(folder).is_relative_to(REPO) for folder in path.split() if folder)


def test_one_command_installs_a_platform_that_answers(wheels: dict[str, Path], tmp_path: Path) -> None:
    """In an empty folder, with nothing but the environment's programs and those of every machine."""
    root, folder = tmp_path / "environment", tmp_path / "empty"
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "--python", str(root / "bin" / "python"), "--disable-pip-version-check"]
    found = ["--find-links", str(wheels["torchrelay"].parent), "-c", str(REPO / "constraints.txt")]
    subprocess.run([*pip, "install", "--quiet", "--no-compile", *found, "torchrelay"], check=True, timeout=500)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHRELAY_", "PYTHON"))}
    environment = {**kept, "PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    command = [root / "bin" / "torchrelay", "demo"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Scale to zero means" in done.stdout and "acme/glossary │" in done.stdout
    assert not list(folder.iterdir())


@dataclass(frozen=True)
class Container:
    """A service of compose.yaml as a process on loopback."""

    name: str
    root: Path
    environment: Mapping[str, str]
    health_port: str

    @property
    def entrypoint(self) -> list[str]:
        (program,) = json.loads(stages_of(self.name)[-1]["ENTRYPOINT"][0])
        return [str(self.root / "bin" / program)]

    def is_healthy(self) -> bool:
        """What the image's health check says."""
        program, _ = health_check_of(stages_of(self.name)[-1])
        command = [str(self.root / "bin" / program), f"{LOOPBACK}:{self.health_port}"]
        return subprocess.run(command, env=self.environment, capture_output=True, timeout=60).returncode == 0


def port_variables(name: str) -> list[str]:
    return [variable for variable in SERVICES[name]["environment"] if variable.endswith("_PORT")]


@pytest.fixture(scope="module")
def secrets() -> dict[str, str]:
    """The secrets that make_env.py writes."""
    made: dict[str, str] = runpy.run_path(str(DEPLOY / "make_env.py"))["secrets_for_compose"]()
    return made


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, secrets: dict[str, str]) -> Iterator[dict[str, str]]:
    """The URLs of NATS, Redis and PostgreSQL, with compose's users where it has some."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as environment:
        for variable, value in SERVICES["nats"]["environment"].items():
            environment.setenv(variable, REFERENCE.sub(lambda match: secrets[match[1]], value))
        users = (DEPLOY / COMPOSE["configs"]["nats"]["file"]).read_text()
        users = users.replace("127.0.0.1:8222", f"{LOOPBACK}:{free_port()}")
        nats = stack.enter_context(nats_server(tmp_path_factory.mktemp("nats"), authorization=users))
        lines = redis_users("gateway", secrets["REDIS_PASSWORD"])
        redis = stack.enter_context(redis_server(tmp_path_factory.mktemp("redis"), lines))
        yield {"nats": nats, "redis": redis, "postgres": stack.enter_context(postgres_server())}


@pytest.fixture(scope="module")
def containers(
    roots: dict[str, Path], secrets: dict[str, str], servers: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Container]:
    """The services with the environment of image and compose: addresses on loopback, volumes in folders."""
    ports = {(name, variable): str(free_port()) for name in SETTINGS for variable in port_variables(name)}
    volumes = {volume: tmp_path_factory.mktemp(volume) for volume in COMPOSE["volumes"]}

    def adapted(name: str, variable: str, value: str) -> str:
        if (name, variable) in ports:
            return ports[name, variable]
        if variable in ("TORCHRELAY_HOST", "TORCHRELAY_ADVERTISE_HOST"):
            return LOOPBACK
        if variable.endswith("_ADDRESS"):
            return f"{LOOPBACK}:{ports[value.partition(':')[0], 'TORCHRELAY_PORT']}"
        if variable.endswith("_URL") and (server := urlsplit(value).hostname) in servers:
            return with_users(value, servers[str(server)])
        for volume, folder, *_ in (mount.split(":") for mount in SERVICES[name].get("volumes", [])):
            value = re.sub(rf"^(file://)?{folder}/", rf"\g<1>{volumes[volume]}/", value)
        return SMALL.get(variable, value)

    made = {}
    for name, root in roots.items():
        image, compose = environment_of(stages_of(name)[-1]), SERVICES[name]["environment"]
        told = {variable: REFERENCE.sub(lambda match: secrets[match[1]], value) for variable, value in compose.items()}
        ours = {variable: adapted(name, variable, value) for variable, value in told.items()}
        path = f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}"
        health_port = ports[name, "TORCHRELAY_GRPC_PORT" if name == "gateway" else "TORCHRELAY_PORT"]
        made[name] = Container(name, root, {**image, **ours, "PATH": path, "HOME": str(root)}, health_port)
    return made


def with_users(told: str, server: str) -> str:
    """The URL of a server with the user and the password of the URL in compose."""
    place, credentials = urlsplit(server), urlsplit(told).netloc.rpartition("@")[0]
    return urlunsplit(place._replace(netloc=f"{credentials}@{place.netloc.rpartition('@')[2]}"))


@contextmanager
def running(container: Container, log: Path) -> Iterator[Callable[[], bool]]:
    """Runs a service until the block ends; yields its health check, which fails with the log if it ended early."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            container.entrypoint, env=container.environment, cwd=container.root, stdout=output, stderr=output
        )

    def is_healthy() -> bool:
        assert process.poll() is None, f"{container.name} ended with {process.returncode}:\n{log.read_text()[-3000:]}"
        return container.is_healthy()

    try:
        yield is_healthy
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_services_start_by_commands_of_images(containers: dict[str, Container], tmp_path: Path) -> None:
    """The health checks of the images pass, and an uploaded model answers."""
    with ExitStack() as stack:
        checks = {
            name: stack.enter_context(running(each, tmp_path / f"{name}.log")) for name, each in containers.items()
        }
        for name, is_healthy in checks.items():
            wait_until(is_healthy, f"the health check of {name}")
        gateway = containers["gateway"].environment
        url = f"http://{LOOPBACK}:{gateway['TORCHRELAY_HTTP_PORT']}"
        with GatewayClient(url, gateway["TORCHRELAY_ADMIN_KEY"]) as admin:
            admin.call("POST", "/v1/tenants", json={"name": "acme"})
            key = admin.call("POST", "/v1/keys", json={"tenant": "acme", "name": "test"})["key"]
        with GatewayClient(url, key) as client:
            model = ModelUpload(client, REPO / "examples/glossary/model", "glossary", lambda *_: None).run({})["id"]
            question = [{"role": "user", "content": "What is a relay?"}]
            answer = client.call("POST", "/v1/chat/completions", json={"model": model, "messages": question})
        assert answer["choices"][0]["message"]["content"]
