"""vLLM's executor in a slot: the first rank in the worker's process, beside the sampler, the others in a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.utils.network_utils import get_distributed_init_method, get_loopback_ip, get_open_port
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from torchrelay.engine.core import LoadFailed
from torchrelay.vllm.device_group import DeviceGroup


class GroupExecutor(UniProcExecutor):
    """Does each call in all ranks, and ends it when all have answered."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._group.results()

    @property
    def _group(self) -> DeviceGroup:
        group: DeviceGroup = self.vllm_config.load_config.model_loader_extra_config["group"]
        return group

    def _distributed_args(self) -> tuple[str, int, int]:
        init_method, rank, _ = super()._distributed_args()
        if not init_method.startswith("file:"):  # with some kernels of ROCm; vLLM's address is that of the network
            init_method = get_distributed_init_method(get_loopback_ip(), get_open_port())
        self._group.begin_start(self.vllm_config, init_method)
        return init_method, rank, self._group.first_gpu

    def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        assert single_value or not non_block, "vLLM waits for what all ranks return"
        self._group.begin_call(method, args, kwargs or {}, not single_value)
        try:
            result = super().collective_rpc(method, timeout, args, kwargs, non_block, single_value)
            if non_block:
                result.result()  # raises the error of the first rank, for which the others may wait
        except Exception as error:
            if self._group.failure:  # of another rank, for which the first has waited
                raise LoadFailed(self._group.failure) from error
            raise
        results = self._group.results()
        return result if single_value else [*result, *results]
