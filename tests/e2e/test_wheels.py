"""The wheels hold every file of the packages, and suffice for the services as compose and the images start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.compose_services import assert_answers, containers_of, made_secrets, running_servers
from tests.support.deploy import DISTRIBUTIONS, REPO, SETTINGS, needed

pytestmark = pytest.mark.timeout(600)  # the build takes minutes, and longer beside other tests


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
    command = [str(root / "bin" / "torchrelay"), "demo"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Scale to zero means" in done.stdout and "acme/glossary │" in done.stdout
    assert not list(folder.iterdir())


def test_services_start_by_commands_of_images(roots: dict[str, Path], tmp_path: Path) -> None:
    """The health checks of the images pass, and an uploaded model answers."""

    def command_of(name: str) -> Callable[[str, Mapping[str, str]], Sequence[str]]:
        return lambda program, environment: [str(roots[name] / "bin" / program)]

    secrets = made_secrets()
    with running_servers(tmp_path, secrets) as servers:
        assert_answers(containers_of(tuple(SETTINGS), secrets, servers, tmp_path, command_of), tmp_path)
