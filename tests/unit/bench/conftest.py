from __future__ import annotations

import sys

# Triton runs on Linux only.
collect_ignore = [] if sys.platform == "linux" else ["test_gpu.py"]
