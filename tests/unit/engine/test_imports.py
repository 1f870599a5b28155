"""The engine runs with only torch and numpy installed, as on a bare machine with a GPU."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys
from importlib.abc import MetaPathFinder


class Blocker(MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{fullname} is not there", name=fullname)


BLOCKED = {"blake3", "google", "grpc", "msgspec", "nats", "opentelemetry", "pydantic", "redis", "structlog", "triton"}
sys.meta_path.insert(0, Blocker())

import torch
from torchrelay.engine.core import ChoiceSpec, GroupSpec, SamplingParams
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.pool import KvPool
from torchrelay.engine.warm_up import zeros_manifest

manifest = zeros_manifest("F32")
instance = Instance(manifest, memoryview(bytes(manifest.num_bytes)), KvPool(1 << 20), prefix_cache=False)
for segment in range(len(manifest.segments)):
    instance.segment_ready(segment)
sampling = SamplingParams(temperature=0, max_tokens=3)
instance.prefill(GroupSpec("r/0", (1, 2, 3), 3, sampling, (ChoiceSpec(0),)))
tokens = []
while instance.has_work():
    tokens += instance.step().tokens
print([token.token_id for token in tokens], sorted(BLOCKED & sys.modules.keys()))
"""


def test_engine_needs_only_torch_and_numpy() -> None:
    actual = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert actual.returncode == 0, actual.stderr
    assert actual.stdout.strip() == "[0, 0, 0] []"
