"""A scheduler whose use of loading instances a bench changes while it runs.

    BENCH_LOADING_PROMPTS=PATH python bench/live_scaling/scheduler.py

The file has a value of ``LoadingPrompts``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torchrelay.scheduler.main import main
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.policy.strategies import LoadingPrompts, Strategies


def follow(path: Path) -> None:
    """Makes all policies of this process read the file before each input."""
    by_name = {mode.value: Strategies(loading_prompts=mode) for mode in LoadingPrompts}
    apply = Policy.apply

    def apply_with(self: Policy, *args: Any, **named: Any) -> Any:
        self.state.strategies = by_name[path.read_text()]
        return apply(self, *args, **named)

    Policy.apply = apply_with  # type: ignore[method-assign]


if __name__ == "__main__":
    follow(Path(os.environ["BENCH_LOADING_PROMPTS"]))
    main()
