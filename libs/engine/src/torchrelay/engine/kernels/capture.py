"""Recordings of a device's kernel launches, which one launch replays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

Replay = Callable[[], Tensor]


class Capturer(ABC):
    @abstractmethod
    def capture(self, compute: Callable[[], Tensor]) -> Replay:
        """Records what ``compute`` launches.

        Calling the result repeats the launches and returns the same tensor each time.
        """


class CudaCapturer(Capturer):
    """CUDA graphs in one memory pool: the result of a replay is valid until the next one."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], Tensor]) -> Replay:
        # The first run, also on a side stream, is not recorded: it compiles kernels and allocates workspaces.
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            compute()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: copies to the device by other threads are not part of this recording.
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
