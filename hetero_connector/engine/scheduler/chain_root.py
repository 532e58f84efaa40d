"""The root of this engine's chains: the store's generation and the weights' version.

A reset, the fleet's reset and new weights change the root, so nothing from before is found. Pages
that vLLM itself kept from before are told apart here, too: the root cannot do that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from hetero_connector.artifacts.chain import ChainHasher
from hetero_connector.engine.scheduler.weight_updates import Weights
from hetero_connector.store.base import Store

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

logger = logging.getLogger("vllm.heterocache")


class ChainRoot:
    """Owned by the scheduler side, used on its thread."""

    def __init__(
        self,
        hasher: ChainHasher,
        store: Store,
        changed: Callable[[ChainHasher], None],
        has_old_requests: Callable[[], bool],
    ) -> None:
        """`hasher`: of the model, under any root. `changed`: called with the one to use instead.

        `has_old_requests`: True while a request has state from before: vLLM publishes it with the
        pages that the request fills later.
        """
        self._store = store
        self._changed = changed
        self._has_old_requests = has_old_requests
        self._generation = store.generation
        self._weights = Weights()
        self._manager: KVCacheManager | None = None
        self._has_old_pages = False
        self.hasher = hasher.under(self._generation.tag, self._weights.tag)
        """Names chains under the root as it is now."""

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """vLLM's own prefix cache."""
        self._manager = kv_cache_manager

    @property
    def is_shared(self) -> bool:
        """True if other engines can find what is stored here."""
        return not (self._generation.private or self._weights.nonce)

    def reset(self) -> bool:
        """Forget everything stored, for good; False as `Store.reset`."""
        kept = self._store.reset()
        if self._weights.nonce:  # a trainer who shares their memory changed them again
            self._weights = self._weights.unnamed()
        self._change()
        logger.info(
            "reset, sleep or pause: everything stored is forgotten, in every tier. What is stored "
            "from now on is found by no other engine until the fleet is reset"
        )
        return kept

    def weights_changed(self, version: str | None) -> None:
        """The weights are `version` now; None: they may have changed, nobody says to which.

        What was stored with others stays where it is: it is found again with those alone.
        """
        before = self._weights
        self._weights = before.unnamed() if version is None else Weights(version)
        if self._weights == before:
            return
        self._change()
        if version is None:
            logger.info(
                "a call to the workers may have changed the weights: what is stored is found again "
                "once they have a version, and only if it was stored under that"
            )
        else:
            logger.info("the weights are version %r: only its own state is found", version)

    def follow_fleet(self) -> None:
        """Adopt a reset of the fleet, if another thread has heard of one."""
        if self._has_old_pages:
            self._has_old_pages = self._holds_prefixes() or self._has_old_requests()
        latest = self._store.generation
        if latest is self._generation:
            return
        if latest.tag == self._generation.tag:
            self._generation = latest
            return
        self._weights = self._weights.agreed()
        self._change()
        logger.info("the fleet was reset: everything stored before is forgotten, in every tier")

    def may_be_old(self, local_tokens: int) -> bool:
        """Return True if so many tokens of vLLM's own prefix hit may be from before.

        vLLM's own cache is not reset while requests run, nor where nobody asks for it, and its
        pages from before cannot be told from newer ones.
        """
        return self._has_old_pages and local_tokens > 0

    def _change(self) -> None:
        self._generation = self._store.catch_up()
        self.hasher = self.hasher.under(self._generation.tag, self._weights.tag)
        self._changed(self.hasher)
        self._has_old_pages = self._holds_prefixes() or self._has_old_requests()

    def _holds_prefixes(self) -> bool:
        manager = self._manager
        return manager is not None and len(manager.block_pool.cached_block_hash_to_block) > 0
