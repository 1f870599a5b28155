from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import resource, sys
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from torchrelay.common.process.descriptors import raise_descriptor_limit
print(raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard"), [(256, 1000), (1000, 1000)])
def test_soft_descriptor_limit_is_raised(soft: int, hard: int) -> None:
    program = [sys.executable, "-c", _PROGRAM, str(soft), str(hard)]
    told = subprocess.run(program, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["1000", "1000", "1000"]
