"""The services of compose.yaml on loopback, each as a process that a test starts: from wheels, or in an image."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest

from tests.support.brokers import free_port, nats_server, redis_server
from tests.support.deploy import (
    COMPOSE,
    DEPLOY,
    REFERENCE,
    REPO,
    SERVICES,
    environment_of,
    health_check_of,
    stages_of,
)
from tests.support.wait import wait_until
from tests.unit.gateway.postgres_server import postgres_server
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.api.model_source import Folder
from torchrelay.cli.api.upload import ModelUpload
from torchrelay.common.net.redis_users import redis_users

LOOPBACK = "127.0.0.1"
# Compose reserves memory for real models; these sizes do for the example's.
SMALL = {"TORCHRELAY_ARENA_BYTES": str(64 << 20), "TORCHRELAY_KV_POOL_BYTES": str(32 << 20), "TORCHRELAY_THREADS": "1"}


@dataclass(frozen=True)
class Container:
    """A service of compose.yaml as a process on loopback.

    ``command_of`` gives the command that runs a program of its image with an environment. The program may be a process
    below that of the command.
    """

    name: str
    environment: Mapping[str, str]
    health_port: str
    command_of: Callable[[str, Mapping[str, str]], Sequence[str]]

    @property
    def command(self) -> Sequence[str]:
        (program,) = json.loads(stages_of(self.name)[-1]["ENTRYPOINT"][0])
        return self.command_of(program, self.environment)

    def is_healthy(self) -> bool:
        """Whether the image's health check passes."""
        program, _ = health_check_of(stages_of(self.name)[-1])
        command = [*self.command_of(program, self.environment), f"{LOOPBACK}:{self.health_port}"]
        return subprocess.run(command, env=dict(self.environment), capture_output=True, timeout=60).returncode == 0


def port_variables(name: str) -> list[str]:
    return [variable for variable in SERVICES[name]["environment"] if variable.endswith("_PORT")]


def made_secrets() -> dict[str, str]:
    """The secrets that make_env.py writes."""
    made: dict[str, str] = runpy.run_path(str(DEPLOY / "make_env.py"))["secrets_for_compose"]()
    return made


@contextmanager
def running_servers(folder: Path, secrets: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The URLs of NATS, Redis and PostgreSQL, with compose's users where it has some."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as environment:
        for variable, value in SERVICES["nats"]["environment"].items():
            environment.setenv(variable, REFERENCE.sub(lambda match: secrets[match[1]], value))
        users = (DEPLOY / COMPOSE["configs"]["nats"]["file"]).read_text()
        users = users.replace("127.0.0.1:8222", f"{LOOPBACK}:{free_port()}")
        for name in ("nats", "redis"):
            (folder / name).mkdir()
        nats = stack.enter_context(nats_server(folder / "nats", authorization=users))
        lines = redis_users("gateway", secrets["REDIS_PASSWORD"])
        redis = stack.enter_context(redis_server(folder / "redis", lines))
        yield {"nats": nats, "redis": redis, "postgres": stack.enter_context(postgres_server())}


def containers_of(
    names: Sequence[str],
    secrets: Mapping[str, str],
    servers: Mapping[str, str],
    folder: Path,
    command_of: Callable[[str], Callable[[str, Mapping[str, str]], Sequence[str]]],
) -> dict[str, Container]:
    """The services with the environment of image and compose: addresses on loopback, volumes in ``folder``."""
    ports = {(name, variable): str(free_port()) for name in names for variable in port_variables(name)}
    volumes = {volume: folder / volume for volume in COMPOSE["volumes"]}
    for volume in volumes.values():
        volume.mkdir()

    def adapted(name: str, variable: str, value: str) -> str:
        if (name, variable) in ports:
            return ports[name, variable]
        if variable in ("TORCHRELAY_HOST", "TORCHRELAY_ADVERTISE_HOST"):
            return LOOPBACK
        if variable.endswith("_ADDRESS"):
            return f"{LOOPBACK}:{ports[value.partition(':')[0], 'TORCHRELAY_PORT']}"
        if variable.endswith("_URL") and (server := urlsplit(value).hostname) in servers:
            return with_users(value, servers[str(server)])
        for volume, place, *_ in (mount.split(":") for mount in SERVICES[name].get("volumes", [])):
            value = re.sub(rf"^(file://)?{place}/", rf"\g<1>{volumes[volume]}/", value)
        return SMALL.get(variable, value)

    made = {}
    for name in names:
        image, compose = environment_of(stages_of(name)[-1]), SERVICES[name]["environment"]
        told = {variable: REFERENCE.sub(lambda match: secrets[match[1]], value) for variable, value in compose.items()}
        ours = {variable: adapted(name, variable, value) for variable, value in told.items()}
        health_port = ports[name, "TORCHRELAY_GRPC_PORT" if name == "gateway" else "TORCHRELAY_PORT"]
        made[name] = Container(name, {**image, **ours}, health_port, command_of(name))
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
            container.command, env=dict(container.environment), cwd=log.parent, stdout=output, stderr=output
        )

    def is_healthy() -> bool:
        assert process.poll() is None, f"{container.name} ended with {process.returncode}:\n{log.read_text()[-3000:]}"
        return container.is_healthy()

    try:
        yield is_healthy
    finally:
        os.kill(service_below(process.pid), signal.SIGTERM)
        try:
            status = process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
    assert status == 0, f"{container.name} ended with {status}:\n{log.read_text()[-3000:]}"


def service_below(pid: int) -> int:
    """The process of ours that a command runs, which may be the command itself."""
    waiting = [pid]
    for each in waiting:
        interpreter, program, *_ = [*Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0"), b"", b""]
        if b"python" in interpreter and b"torchrelay-" in program:
            return each
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            waiting += map(int, children.read_text().split())
    raise ProcessLookupError(f"nothing of ours runs below {pid}")


def assert_answers(containers: Mapping[str, Container], folder: Path) -> None:
    """Starts all services, whose health checks pass, and asks an uploaded model."""
    with ExitStack() as stack:
        checks = {name: stack.enter_context(running(each, folder / f"{name}.log")) for name, each in containers.items()}
        for name, is_healthy in checks.items():
            wait_until(is_healthy, f"the health check of {name}")
        gateway = containers["gateway"].environment
        url = f"http://{LOOPBACK}:{gateway['TORCHRELAY_HTTP_PORT']}"
        with GatewayClient(url, gateway["TORCHRELAY_ADMIN_KEY"]) as admin:
            admin.call("POST", "/v1/tenants", json={"name": "acme"})
            key = admin.call("POST", "/v1/keys", json={"tenant": "acme", "name": "test"})["key"]
        with GatewayClient(url, key) as client:
            model = ModelUpload(client, Folder(REPO / "examples/glossary/model"), "glossary", lambda *_: None).run({})[
                "id"
            ]
            question = [{"role": "user", "content": "What is a relay?"}]
            answer = client.call("POST", "/v1/chat/completions", json={"model": model, "messages": question})
        assert answer["choices"][0]["message"]["content"]
