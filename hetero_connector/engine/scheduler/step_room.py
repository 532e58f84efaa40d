"""The blocks that vLLM must have to load a request in the step that computes it.

Of a recurrent layer vLLM keeps the states at the ends of blocks. When it counts the blocks that an
admission takes, it leaves out that of the restored state
(`MambaManager.get_num_blocks_to_allocate`, 0.32.0): with no block to spare it would begin to
allocate, fail, and end the engine. For a load between steps its count is right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetero_connector.spec import ModelSpec, StateType

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

_STATES = 3
"""The most blocks that an admission takes of a recurrent group, without those of drafts: for the
restored state, a checkpoint inside the step, and the state after it."""


class StepRoom:
    """Tells if a request can be loaded in the step that computes it."""

    def __init__(self, model: ModelSpec) -> None:
        self._recurrent = {x.group for x in model.layers if x.state_type is StateType.RECURRENT}
        self._manager: KVCacheManager | None = None

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Take vLLM's count of free blocks."""
        self._manager = kv_cache_manager

    def suffices(self, num_tokens: int) -> bool:
        """True if there are blocks for a request of so many tokens, whatever vLLM counts."""
        if not self._recurrent or self._manager is None:
            return True
        managers: Any = self._manager.coordinator.single_type_managers
        needed = 0
        for group, manager in enumerate(managers):
            if group in self._recurrent:
                needed += _STATES + manager.num_speculative_blocks
            else:
                needed += num_tokens // manager.block_size + 2  # one for drafts
        return needed <= int(self._manager.block_pool.get_num_free_blocks())
