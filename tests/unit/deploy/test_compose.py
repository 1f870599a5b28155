"""deploy/ says the same as the settings classes: every service, variable, port, volume and health check."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchrelay.common.process.settings import ServiceSettings
from torchrelay.gateway.settings import GatewaySettings
from torchrelay.param_store.settings import StoreSettings
from torchrelay.scheduler.settings import SchedulerSettings
from torchrelay.worker.settings import WorkerSettings

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "param-store": StoreSettings,
    "prefill": WorkerSettings,
    "decode": WorkerSettings,
}
PROGRAMS = {
    "gateway": "torchrelay-gateway",
    "scheduler": "torchrelay-scheduler",
    "param-store": "torchrelay-param-store",
    "prefill": "torchrelay-worker",
    "decode": "torchrelay-worker",
}
REFERENCE = re.compile(r"\$\{(\w+):\?[^}]*\}")


@pytest.fixture(scope="module")
def secrets() -> dict[str, str]:
    """What make_env.py would write."""
    made: dict[str, str] = runpy.run_path(str(DEPLOY / "make_env.py"))["secrets_for_compose"]()
    return made


def settings_of(name: str, secrets: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    for variable, value in SERVICES[name]["environment"].items():
        monkeypatch.setenv(variable, REFERENCE.sub(lambda match: secrets[match[1]], str(value)))
    return SETTINGS[name]()


def test_our_services_are_all_there() -> None:
    folders = {path.name for path in (DEPLOY.parent / "services").iterdir() if path.is_dir()}
    assert folders == set(SETTINGS)
    assert set(SERVICES) == folders | {"postgres", "redis", "nats"}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_variable_is_a_setting_and_the_settings_are_valid(
    name: str, secrets: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {f"TORCHRELAY_{field.upper()}" for field in SETTINGS[name].model_fields}
    assert set(SERVICES[name]["environment"]) <= fields
    settings = settings_of(name, secrets, monkeypatch)
    assert settings.host == "0.0.0.0" and settings.advertised_host == name


@pytest.mark.parametrize("name", SETTINGS)
def test_health_check_and_image_speak_of_the_same_port(name: str) -> None:
    environment = SERVICES[name]["environment"]
    variable = "TORCHRELAY_GRPC_PORT" if name == "gateway" else "TORCHRELAY_PORT"
    address = f"127.0.0.1:{environment[variable]}"
    assert SERVICES[name]["healthcheck"]["test"] == ["CMD", "torchrelay-health", address]
    recipe = (DEPLOY / "images" / f"{name}.Dockerfile").read_text()
    assert f'HEALTHCHECK --interval=5s --timeout=3s --start-period=60s CMD ["torchrelay-health", "{address}"]' in recipe
    assert f"{variable}={environment[variable]}" in recipe


@pytest.mark.parametrize("name", SETTINGS)
def test_images_are_pinned_without_rights_and_run_the_service(name: str) -> None:
    recipe = (DEPLOY / "images" / f"{name}.Dockerfile").read_text()
    assert f'ENTRYPOINT ["{PROGRAMS[name]}"]' in recipe
    assert re.search(r"^USER torchrelay$", recipe, re.MULTILINE)
    assert all(
        re.fullmatch(r"FROM [\w.-]+:[\w.-]*\d[\w.-]*( AS build)?", line)
        for line in recipe.splitlines()
        if "FROM" in line[:4]
    )
    assert f"./services/{name}" in recipe
    copied = set(re.findall(r"^COPY ((?:proto|libs|services)\S*)", recipe, re.MULTILINE))
    installed = {
        path.partition("[")[0]
        for path in re.findall(r"\./((?:proto|libs|services)[\w/\[\]-]*)", recipe.split("--no-build-isolation")[1])
    }
    assert copied == installed


def test_no_image_floats() -> None:
    for name, service in SERVICES.items():
        assert re.search(r":\d", service["image"]) and "latest" not in service["image"], name


def test_addresses_point_at_services_and_their_ports() -> None:
    for name in SETTINGS:
        for variable, value in SERVICES[name]["environment"].items():
            if variable.endswith("_ADDRESS"):
                host, _, port = value.partition(":")
                assert SERVICES[host]["environment"]["TORCHRELAY_PORT"] == port, f"{name} {variable}"
            elif variable.endswith("_URL") and not str(value).startswith("file:"):
                assert re.split(r"[/:@]", value.partition("://")[2])[-3 if "@" in value else 0] in SERVICES or any(
                    f"@{service}/" in value or f"//{service}:" in value for service in SERVICES
                ), f"{name} {variable}"


def test_published_ports_are_the_gateways() -> None:
    environment = SERVICES["gateway"]["environment"]
    assert set(SERVICES["gateway"]["ports"]) == {
        f"{port}:{port}" for port in (environment["TORCHRELAY_HTTP_PORT"], environment["TORCHRELAY_GRPC_PORT"])
    }
    assert all("ports" not in service for name, service in SERVICES.items() if name != "gateway")


def test_every_path_lies_on_a_volume_and_every_volume_is_declared() -> None:
    declared = set(COMPOSE["volumes"])
    used = {mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", [])}
    assert used == declared
    mounts = [mount.split(":")[1] for mount in SERVICES["param-store"]["volumes"]]
    environment = SERVICES["param-store"]["environment"]
    for variable in ("TORCHRELAY_ARENA_PATH", "TORCHRELAY_DATA_DIR", "TORCHRELAY_REMOTE_URL"):
        path = environment[variable].removeprefix("file://")
        assert any(path.startswith(f"{mount}/") for mount in mounts), variable


def test_volumes_of_ours_belong_to_the_images_user() -> None:
    # Docker makes a named volume root's, unless the image has the folder: the service could not write into it.
    for name in SETTINGS:
        recipe = (DEPLOY / "images" / f"{name}.Dockerfile").read_text()
        for mount in SERVICES[name].get("volumes", []):
            volume, folder, *_ = mount.split(":")
            options = (COMPOSE["volumes"][volume] or {}).get("driver_opts", {})
            if "uid=10001" not in options.get("o", ""):
                assert "--uid 10001" in recipe
                assert f"install -d -o torchrelay {folder}\n" in recipe, f"{name} {folder}"


def test_workers_share_the_arena_read_only_and_it_is_large_enough() -> None:
    for name in ("prefill", "decode"):
        assert "arena:/arena:ro" in SERVICES[name]["volumes"]
    options = COMPOSE["volumes"]["arena"]["driver_opts"]
    size = int(re.search(r"size=(\d+)", options["o"])[1])  # type: ignore[index]
    arena_bytes = int(SERVICES["param-store"]["environment"]["TORCHRELAY_ARENA_BYTES"])
    assert options["type"] == "tmpfs" and arena_bytes < size < 1.1 * arena_bytes
    assert "uid=10001" in options["o"]


def test_make_env_answers_every_question_of_the_compose_file(secrets: dict[str, str]) -> None:
    asked = set(REFERENCE.findall((DEPLOY / "compose.yaml").read_text()))
    assert set(secrets) == asked
