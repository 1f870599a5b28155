"""The images of deploy/images, built by buildah without a daemon, and a platform from them (`make test-images`).

Their base is Debian's, made by mmdebstrap under the name that the recipes use. Builds get the machine's certificates
and its configuration of pip, read-only, and the options of torch from ``TORCH_OPTIONS``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.compose_services import assert_answers, containers_of, made_secrets, running_servers
from tests.support.deploy import DEPLOY, REPO, SETTINGS

pytestmark = pytest.mark.timeout(3000)
VERSION = (REPO / "VERSION").read_text().strip()
NAMES = sorted(path.stem for path in (DEPLOY / "images").glob("*.Dockerfile"))
PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"
CHROOT = ["--isolation", "chroot", "--network", "host"]


def run(*command: str | Path) -> str:
    """The output of a program; its errors are shown."""
    print("$", *command, file=sys.stderr)
    return subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def machine_mounts() -> list[str]:
    """Mounts of the machine's certificates, its configuration of pip, and the folders that this names."""
    paths = {Path("/etc/ssl/certs"), Path("/etc/pip.conf"), Path.home() / ".config" / "pip"}
    settings = run(sys.executable, "-m", "pip", "config", "list")
    named = {Path(each) for each in re.findall(r"(?:file://)?(/[\w./-]+)", re.sub(r"https?://\S+", "", settings))}
    paths |= {path.parent if path.name == "simple" else path for path in named}  # an index has its files beside it
    return [word for path in sorted(paths) if path.exists() for word in ("-v", f"{path}:{path}:ro")]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The image of each recipe, by its name."""
    for program in ("buildah", "mmdebstrap"):
        assert shutil.which(program), f"{program} is missing: apt-get install buildah mmdebstrap"
    [base] = {line.split()[1] for name in NAMES for line in recipe(name).splitlines() if line.startswith("FROM ")}
    if base not in run("buildah", "images", "--format", "{{.Name}}:{{.Tag}}"):
        archive = tmp_path_factory.mktemp("base") / "base.tar"
        run("mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", archive)
        container = run("buildah", "from", "scratch")
        run("buildah", "add", "--quiet", container, archive, "/")
        run("buildah", "config", "--env", f"PATH={os.defpath}:/usr/local/bin:/usr/sbin:/sbin", container)
        run("buildah", "commit", "--quiet", "--rm", container, f"docker.io/library/{base}")
    made = {name: f"localhost/torchrelay/{name}:{VERSION}" for name in NAMES}
    for name, image in made.items():
        options = ["--quiet", "--layers", "--pull-never", "--format", "docker", *CHROOT, *machine_mounts()]
        if "TORCH_OPTIONS" in recipe(name):
            options += ["--build-arg", f"TORCH_OPTIONS={os.environ.get('TORCH_OPTIONS', '')}"]
            options += ["--build-arg", "COMPILER="]  # as compose builds them
        run("buildah", "bud", *options, "-f", DEPLOY / "images" / f"{name}.Dockerfile", "-t", image, REPO)
    return made


def recipe(name: str) -> str:
    return (DEPLOY / "images" / f"{name}.Dockerfile").read_text()


@pytest.fixture(scope="module")
def containers(images: dict[str, str]) -> Iterator[dict[str, str]]:
    """A container of each image."""
    made = {name: run("buildah", "from", "--pull-never", image) for name, image in images.items()}
    yield made
    for container in made.values():
        run("buildah", "rm", container)


def test_images_print_their_sizes(images: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(run("buildah", "images", "--json"))
    sizes = {name: each["size"] for each in listed for name in each["names"] or ()}
    with capsys.disabled():
        print()
        for name, image in images.items():
            print(f"{name:<14} {sizes[image]}")
    assert set(images.values()) <= sizes.keys()


@pytest.mark.parametrize("name", NAMES)
def test_program_of_image_shows_its_help(name: str, containers: dict[str, str]) -> None:
    program = json.loads(run("buildah", "inspect", containers[name]))["Docker"]["config"]["Entrypoint"]
    assert "usage" in run("buildah", "run", *CHROOT, containers[name], "--", *program, "--help").lower()
    assert run("buildah", "run", *CHROOT, containers[name], "--", "id", "-un") == "torchrelay"


@pytest.mark.parametrize("name", [name for name in NAMES if "TORCH_OPTIONS" in recipe(name)])
def test_image_of_a_cpu_worker_has_no_cuda(name: str, containers: dict[str, str]) -> None:
    names = "*(each.name for each in importlib.metadata.distributions())"
    program = f"import importlib.metadata, torch; print(torch.version.cuda, {names})"
    version, *packages = run("buildah", "run", *CHROOT, containers[name], "--", "python", "-c", program).split()
    assert version == "None" and not any(each.startswith("nvidia") for each in packages), "set TORCH_OPTIONS"


def test_platform_of_the_images_answers(containers: dict[str, str], tmp_path: Path) -> None:
    """Each service as its own user, with the environment of compose; a model that is called there answers."""
    volumes = tmp_path / "volumes"
    volumes.mkdir()
    tmp_path.chmod(0o755)

    def command_of(name: str) -> Callable[[str, Mapping[str, str]], Sequence[str]]:
        def command(program: str, environment: Mapping[str, str]) -> Sequence[str]:
            told = [word for key, value in environment.items() if key != "PATH" for word in ("--env", f"{key}={value}")]
            mount = ["-v", f"{volumes}:{volumes}"]
            # The environment of the process is the container's, which is not buildah's.
            machine = ["/usr/bin/env", "-i", f"PATH={os.environ['PATH']}", f"HOME={Path.home()}", "buildah"]
            return [*machine, "run", *CHROOT, *mount, *told, containers[name], "--", program]

        return command

    secrets = made_secrets()
    with running_servers(tmp_path, secrets) as servers:
        services = containers_of(tuple(SETTINGS), secrets, servers, volumes, command_of)
        for folder in (volumes, *volumes.iterdir()):
            folder.chmod(0o777)
        assert_answers(services, tmp_path)
