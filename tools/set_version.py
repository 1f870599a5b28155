"""Writes the version in VERSION into the packages, the chart and the names of the images.

With ``--check`` nothing is written: exits with status 1, and names the files, if one has another version.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NUMBER = r"\d+\.\d+\.\d+"
PLACES = {
    r"(^|/)pyproject\.toml$": rf'(?m)^(version = "){NUMBER}(?=")',
    r"^deploy/chart/Chart\.yaml$": rf"(?m)^((?:app)?[vV]ersion: ){NUMBER}",
    r"^(deploy|docs)/.*(Dockerfile|\.yaml|\.md)$": rf"(torchrelay/[a-z-]+:){NUMBER}",
}


def main() -> int:
    version = (ROOT / "VERSION").read_text().strip()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    different = []
    for name in listed.splitlines():
        for path, pattern in PLACES.items():
            if not re.search(path, name) or not (ROOT / name).is_file():
                continue
            text = (ROOT / name).read_text()
            changed = re.sub(pattern, rf"\g<1>{version}", text)
            if changed != text:
                different.append(name)
                if "--check" not in sys.argv:
                    (ROOT / name).write_text(changed)
    print(*different, sep="\n")
    return int(bool(different) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
