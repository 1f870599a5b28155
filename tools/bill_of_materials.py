"""Writes a bill of materials (CycloneDX, JSON) of what the distribution ``torchrelay`` is installed with.

    python tools/bill_of_materials.py FILE

Developers' tools of this environment are left out: listed is what `torchrelay` requires, directly or through others.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required_by(name: str, extras: frozenset[str], seen: set[tuple[str, str]]) -> Iterator[Distribution]:
    """The distribution and all that it requires here with ``extras``, each once."""
    wanted = {(canonicalize_name(name), extra) for extra in (*extras, "")} - seen
    if not wanted:
        return
    seen |= wanted
    installed = distribution(name)
    if (canonicalize_name(name), "") in wanted:
        yield installed
    for text in installed.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for _, extra in wanted):
            yield from required_by(requirement.name, frozenset(requirement.extras), seen)


def main(path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment, metadata = folder / "environment", folder / "metadata"
        metadata.mkdir()
        for each in required_by("torchrelay", frozenset(), set()):
            files = Path(str(each.locate_file(""))) / f"{each.name.replace('-', '_')}-{each.version}.dist-info"
            source = files if files.exists() else Path(str(getattr(each, "_path", files)))
            (metadata / source.name).symlink_to(source)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        [packages] = environment.glob("lib/python*/site-packages")
        (packages / "metadata.pth").write_text(f"{metadata}\n")
        command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
        subprocess.run([*command, "--output-file", str(path), str(environment / "bin" / "python")], check=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except PackageNotFoundError as error:
        sys.exit(f"{error.name} is required but not installed: make developer")
