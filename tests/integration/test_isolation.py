"""Gateway, scheduler and param-store start with their own requirements only, and load no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.wait import wait_until
from torchrelay.transfer.protocol.tickets import derive_node_key

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "torchrelay-proto": "proto",
    "torchrelay-common": "libs/common",
    "torchrelay-modelspec": "libs/modelspec",
    "torchrelay-transfer": "libs/transfer",
    "torchrelay-gateway": "services/gateway",
    "torchrelay-scheduler": "services/scheduler",
    "torchrelay-param-store": "services/param-store",
}


def requirements(package: str) -> set[str]:
    """The distributions that installing ``package`` brings, itself included; extras that are not asked for left out."""
    names: set[str] = set()
    seen, waiting = set(), [(package, frozenset({""}))]
    while waiting:
        if (item := waiting.pop()) in seen:
            continue
        seen.add(item)
        name, extras = item
        names.add(canonicalize_name(name))
        for requirement in map(Requirement, distribution(name).requires or []):
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append((requirement.name, frozenset({"", *requirement.extras})))
    return names


def link_distribution(installed: Distribution, folder: Path) -> None:
    """Links the top-level files and folders of one installed distribution into ``folder``."""
    for file in installed.files or []:
        top = file.parts[0]
        if top not in ("..", "__pycache__") and not top.endswith(".pth"):
            target = Path(str(installed.locate_file(top)))
            link = folder / top
            if target.exists() and not link.exists():
                link.symlink_to(target)


@pytest.fixture
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The variables of a Python that finds one service, what it requires, and nothing else."""
    packages = requirements(request.param)
    site = tmp_path / "site"
    site.mkdir()
    for name in packages - set(FOLDERS):
        link_distribution(distribution(name), site)
    sources = [str(ROOT / FOLDERS[name] / "src") for name in packages & set(FOLDERS)]
    assert not {"torch", "transformers"} & packages
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([*sources, str(site)])}


@pytest.mark.parametrize(
    ("environment", "module", "settings"),
    [
        (
            "torchrelay-gateway",
            "gateway",
            {"DATABASE_URL": "sqlite:///{folder}/ledger.db", "ADMIN_KEY": f"tra-{'0' * 32}"},
        ),
        ("torchrelay-scheduler", "scheduler", {"CLUSTER_KEY": "11" * 32}),
        (
            "torchrelay-param-store",
            "param_store",
            {
                "NODE_KEY": derive_node_key(bytes(32), "alone").hex(),
                "STORE_ID": "alone",
                "ARENA_PATH": "{folder}/arena",
                "ARENA_BYTES": str(32 << 20),
                "DATA_DIR": "{folder}/data",
                "REMOTE_URL": "file://{folder}/remote",
            },
        ),
    ],
    indirect=["environment"],
)
def test_service_starts_with_its_own_requirements_only(
    environment: dict[str, str], module: str, settings: dict[str, str], tmp_path: Path, nats_url: str, redis_url: str
) -> None:
    ready = tmp_path / "ready.json"
    (tmp_path / "remote").mkdir()
    variables = {f"TORCHRELAY_{name}": value.format(folder=tmp_path) for name, value in settings.items()}
    urls = {"TORCHRELAY_NATS_URL": nats_url, "TORCHRELAY_REDIS_URL": redis_url, "TORCHRELAY_READY_FILE": str(ready)}
    program = f"import sys; from torchrelay.{module}.main import main; sys.argv = ['alone']; main()"
    # -S: without the site-packages of this environment.
    command = [sys.executable, "-S", "-c", program]
    process = subprocess.Popen(
        command, env={**environment, **variables, **urls, "TORCHRELAY_NATS_PREFIX": f"alone-{module}"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, "the service")
        output = "" if process.poll() is None or process.stdout is None else process.stdout.read().decode()
        assert process.poll() is None, output[-3000:]
        loaded = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in loaded
    finally:
        process.terminate()
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()
