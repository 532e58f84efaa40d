"""The root of this engine's chains: the store's generation and the version of the weights.

A reset here, a reset of the fleet and new weights change the root, so that nothing stored before is
found. vLLM's own pages are not under the root: `ChainRoot` has them forgotten, and knows when they
may be outdated all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero_connector.artifacts.chain import ChainHasher
from hetero_connector.engine.scheduler.own_pages import forget_own_pages, forget_pages_of
from hetero_connector.engine.scheduler.request_identifier import adapter_name
from hetero_connector.engine.scheduler.weight_updates import Weights
from hetero_connector.store.artifact_store import ArtifactStore

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.heterocache")


@dataclass(frozen=True)
class Cleared:
    """The requests whose state an operator had forgotten: those of a salt, or of a model."""

    salt: str | None = None
    model: str | None = None
    """An adapter's name; "" for the model without one."""

    def includes(self, request: Request) -> bool:
        if self.salt is not None:
            return bool(request.cache_salt == self.salt)
        return adapter_name(request) == self.model


class ChainRoot:
    """Follows resets and new weights, and names chains accordingly. Used on one thread only."""

    def __init__(
        self,
        hasher: ChainHasher,
        store: ArtifactStore,
        on_change: Callable[[ChainHasher], None],
        has_outdated_requests: Callable[[], bool],
    ) -> None:
        """`hasher`: the model's, under any root. `on_change` gets the hasher of each new root.

        `has_outdated_requests` returns True while a request has state from before a change: vLLM
        publishes that state together with the pages that the request fills later.
        """
        self._store = store
        self._on_change = on_change
        self._has_outdated_requests = has_outdated_requests
        self._generation = store.generation
        self._weights = Weights()
        self._manager: KVCacheManager | None = None
        self._has_outdated_pages = False
        """True from a change until vLLM's cache is empty, unless its pages have been forgotten."""
        self._has_outdated_hits = False
        """True from a change amid a step's matching to the step's end: vLLM has matched a request
        with its own pages before the connector was asked."""
        self._cleared: set[Cleared] = set()
        """Clearings whose pages could not be forgotten; until vLLM's own cache is empty."""
        self.hasher = hasher.with_root(self._generation.tag, self._weights.tag)
        """Names chains under the present root."""

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Take vLLM's own prefix cache."""
        self._manager = kv_cache_manager

    @property
    def is_shared(self) -> bool:
        """True if other engines can find what is stored here."""
        return not (self._generation.private or self._weights.nonce)

    def reset(self) -> bool:
        """Forget everything stored. Returns False in the case that `Store.reset` does."""
        kept = self._store.reset()
        if self._weights.nonce:  # a trainer that shares the weights' memory resets after a change
            self._weights = self._weights.with_nonce()
        self._change()
        logger.info(
            "reset, sleep or pause: everything stored is forgotten, in every tier. Other engines "
            "do not find what this one stores from now on until the fleet is reset"
        )
        return kept

    def on_weights_changed(self, version: str | None) -> None:
        """Name chains after the weights' new `version`; None: they changed to an unknown one.

        State of other weights stays stored. It is found again when those weights are back. vLLM's
        pages are forgotten with a version, not with each call that may change the weights.
        """
        before = self._weights
        self._weights = before.with_nonce() if version is None else Weights(version)
        if self._weights == before:
            return
        self._change(keeps_pages=version is None)
        if version is None:
            logger.info(
                "a call to the workers may have changed the weights: stored state is found again "
                "when the weights have a version, and only if it was stored under that version"
            )
        else:
            logger.info("the weights have version %r: only state of this version is found", version)

    @property
    def is_behind(self) -> bool:
        """True if the store has another generation than the present root. Any thread may ask."""
        return self._store.generation is not self._generation

    def adopt_fleet_reset(self, *, is_matching: bool = False) -> None:
        """Change the root if the fleet was reset, which another thread notices.

        `is_matching`: vLLM is admitting requests, one of which it has matched with its own pages.
        """
        if not is_matching:
            self._has_outdated_hits = False
        if (self._has_outdated_pages or self._cleared) and not self._has_pages():
            self._on_empty()
        latest = self._store.generation
        if latest is self._generation:
            return
        if latest.tag == self._generation.tag:
            self._generation = latest
            return
        self._weights = self._weights.without_nonce()
        self._change()
        self._has_outdated_hits = is_matching
        logger.info("the fleet was reset: everything stored before is forgotten, in every tier")

    def on_cleared(self, what: Cleared) -> None:
        """Have vLLM's pages forgotten; those of these requests are from before a clearing."""
        if self._has_pages():
            self._cleared.add(what)  # first: to forget them may fail
            self._forget_pages()

    def empty_pages(self) -> bool:
        """Let no request hit what is in vLLM's own prefix cache.

        False if that is not possible while requests hold its pages, see `forget_own_pages`.
        """
        manager = self._manager
        if manager is None:
            return False
        is_unused = manager.block_pool.get_usage() == 0  # else vLLM warns that it cannot
        if is_unused and manager.reset_prefix_cache():
            self._on_empty()
            return True
        return self._forget_pages()

    def on_admitted(self, request: Request) -> None:
        """Have the pages of a request forgotten that vLLM has matched with outdated ones."""
        if self._has_outdated_hits and self._manager is not None:
            forget_pages_of(self._manager, request.request_id)

    def may_be_outdated(self, request: Request, local_tokens: int) -> bool:
        """True if a hit of `local_tokens` in vLLM's own cache may be from before the last change.

        vLLM's pages do not tell when they were computed.
        """
        if local_tokens <= 0:
            return False
        is_outdated = self._has_outdated_pages or self._has_outdated_hits
        return is_outdated or any(x.includes(request) for x in self._cleared)

    def _change(self, *, keeps_pages: bool = False) -> None:
        self._generation = self._store.catch_up()
        self.hasher = self.hasher.with_root(self._generation.tag, self._weights.tag)
        self._on_change(self.hasher)
        self._has_outdated_pages = self._has_pages()  # first: to forget them may fail
        if self._has_outdated_pages and not keeps_pages:
            self._forget_pages()

    def _forget_pages(self) -> bool:
        """Forget what vLLM's own cache has; False if that is not possible while requests run."""
        is_empty = self._manager is not None and forget_own_pages(self._manager)
        if is_empty:
            self._on_empty()
        return is_empty

    def _on_empty(self) -> None:
        """Note that nothing from before can be found in vLLM's own cache."""
        self._has_outdated_pages = False
        self._cleared.clear()

    def _has_pages(self) -> bool:
        """Return whether vLLM's own cache may have pages from before now.

        Also while any request has pages: a request that is not cached here, of which nothing is
        known, has vLLM publish its pages as it fills them.
        """
        if self._manager is None:
            return False
        pool = self._manager.block_pool
        is_used = len(pool.cached_block_hash_to_block) > 0 or pool.get_usage() > 0
        return is_used or self._has_outdated_requests()
