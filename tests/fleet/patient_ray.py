"""``ray`` whose nodes may take minutes to start.

Ray gives a node 30 s, and that number is in its code. On a busy machine the processes of a node take longer, and a node
that is started anew takes as long again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ray._private import services
from ray.scripts.scripts import main

START_LIMIT_S = 240.0
_get_node: Callable[..., Any] = services.get_node
_run: Callable[[], object] = main


def get_node(*args: Any, **options: Any) -> Any:
    """The node's description, once it is registered. Raises ``RuntimeError``."""
    end = time.monotonic() + START_LIMIT_S
    while True:
        try:
            return _get_node(*args, **options)
        except RuntimeError:
            if time.monotonic() > end:
                raise


services.get_node = get_node
_run()
