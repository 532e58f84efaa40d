"""Mistakes that mypy must find. If it does not, it has not seen vLLM's types."""

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import NoSuchOutput, SchedulerOutput  # mistake


class Connector(KVConnectorBase_V1):
    def register_kv_caches(self) -> None:  # mistake
        """A hook with another signature."""


def call(manager: KVCacheManager) -> None:
    manager.get_block_ids()  # mistake


def read(output: SchedulerOutput, config: VllmConfig) -> NoSuchOutput:
    print(config.parallel_config.no_such_size)  # mistake
    return output.no_such_field  # mistake
