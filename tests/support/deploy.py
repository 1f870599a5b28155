"""The compose file, the image recipes and the packages of the repository, as tests read them."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from torchrelay.common.process.settings import ServiceSettings
from torchrelay.gateway.settings import GatewaySettings
from torchrelay.param_store.settings import StoreSettings
from torchrelay.scheduler.settings import SchedulerSettings
from torchrelay.worker.settings import WorkerSettings

REPO = Path(__file__).resolve().parents[2]
DEPLOY = REPO / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


@dataclass(frozen=True)
class Distribution:
    """A package of ours, as its pyproject.toml tells."""

    folder: Path
    name: str
    version: str
    requires: tuple[str, ...]
    programs: Mapping[str, str]


NODE = "node"  # the image of machines that join: all of Torchrelay


def projects() -> list[Path]:
    return [path.parent for path in REPO.glob("*/pyproject.toml")] + [
        path.parent for path in REPO.glob("*/*/pyproject.toml")
    ]


def distribution_in(folder: Path) -> Distribution:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    requires = tuple(project["dependencies"])
    return Distribution(folder, project["name"], project["version"], requires, project.get("scripts", {}))


def needed(name: str) -> dict[str, set[str]]:
    """Our distributions that a distribution needs, itself included, each with its extras."""
    extras_by_name: dict[str, set[str]] = {}
    left = [name]
    while left:
        distribution, _, extras = left.pop().removesuffix("]").partition("[")
        known = distribution in extras_by_name
        extras_by_name.setdefault(distribution, set()).update(set(extras.split(",")) - {""})
        if not known:
            left += [each for each in DISTRIBUTIONS[distribution].requires if each.startswith("torchrelay-")]
    return extras_by_name


def recipe_of(name: str) -> Path:
    """The recipe that compose builds the service's image with, or that of a machine that joins."""
    if name == NODE:
        return DEPLOY / "images" / f"{name}.Dockerfile"
    build = SERVICES[name]["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context == REPO
    path: Path = context / build["dockerfile"]
    return path


def stages_of(name: str) -> list[dict[str, list[str]]]:
    """The values of each stage's instructions, by instruction, their lines joined."""
    stages: list[dict[str, list[str]]] = []
    for line in re.sub(r"\\\n|^#.*$", "", recipe_of(name).read_text(), flags=re.MULTILINE).splitlines():
        instruction, _, value = line.partition(" ")
        if instruction == "FROM":
            stages.append(defaultdict(list))
        if instruction:
            stages[-1][instruction].append(value)
    return stages


def environment_of(image: Mapping[str, list[str]]) -> dict[str, str]:
    return dict(word.split("=", 1) for value in image["ENV"] for word in shlex.split(value))


def health_check_of(image: Mapping[str, list[str]]) -> list[str]:
    command: list[str] = json.loads(image["HEALTHCHECK"][0].partition(" CMD ")[2])
    return command


def health_options_of(image: Mapping[str, list[str]]) -> dict[str, str]:
    options = image["HEALTHCHECK"][0].partition(" CMD ")[0].split()
    return dict(option.removeprefix("--").replace("-", "_").split("=") for option in options)


def pip_installs(name: str) -> list[list[str]]:
    """The words of each command that installs packages, the last of which installs those of this repository."""
    commands = stages_of(name)[0]["RUN"][-1].split("&&")
    return [words for words in map(shlex.split, commands) if "install" in words]


SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "param-store": StoreSettings,
    "prefill": WorkerSettings,
    "decode": WorkerSettings,
}
DISTRIBUTIONS = {each.name: each for each in map(distribution_in, projects())}
REFERENCE = re.compile(r"\$\{(\w+):\?[^}]*\}")
