from __future__ import annotations

import sys

# There is no Triton but for Linux.
collect_ignore = [] if sys.platform == "linux" else ["test_gpu.py"]
