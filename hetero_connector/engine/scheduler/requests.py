"""The state that the scheduler side keeps for one request."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from hetero_connector.artifacts.record import ArtifactId, ChunkKey, StoredChunk
from hetero_connector.engine.scheduler.clearings import Clearings
from hetero_connector.engine.scheduler.request_identifier import RequestIdentity, extra_keys
from hetero_connector.engine.scheduler.request_params import PLAIN, RequestParams
from hetero_connector.planner.checkpoints import Reuse
from hetero_connector.planner.plan import RestorePlan
from hetero_connector.store.catalog.restore import Restore

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from hetero_connector.engine.scheduler.predictions import Wait
    from hetero_connector.engine.scheduler.request_report import RequestReport


@dataclass
class PendingRestore:
    """A plan whose artifacts are in DRAM or being staged there."""

    plan: RestorePlan
    handle: Restore
    local_tokens: int
    loads_left: int = 0
    """Ordered loads that some rank has not reported yet."""
    loaded_s: float | None = None
    """Clock time at which all ranks had loaded it; None before."""
    shared: StoredChunk | None = None
    """A chunk at whose end others leave the chain. Its boundary state is staged, too, for vLLM's
    own prefix cache (`SharedBoundaries`)."""

    def fits(self, local_tokens: int) -> bool:
        """True if the plan can still be loaded after `local_tokens` in the engine's own cache."""
        return self.local_tokens <= local_tokens < self.plan.resume_tokens


@dataclass
class Attempts:
    """The attempts to restore a request since it last had pages.

    They remain after an answer: vLLM asks again in every step while it has no pages for the
    request.
    """

    begun_s: float
    staged_s: float | None = None
    """Seconds from `begun_s` to the answer; None while there is no answer."""
    count: int = 0
    """Failed attempts."""
    failed: set[ArtifactId] = field(default_factory=set)
    """Artifacts that could not be read."""

    def begin(self, now_s: float) -> None:
        """Begin an attempt. The first one after an answer starts the clock again."""
        if self.staged_s is not None:
            self.begun_s, self.staged_s = now_s, None

    def seconds(self, now_s: float) -> float:
        """Seconds of staging so far, or in total; waiting for pages does not count."""
        return now_s - self.begun_s if self.staged_s is None else self.staged_s


@dataclass
class RequestTracker:
    """One request's chain, its restore in progress, and its progress in saving."""

    request: Request
    chain: RequestChain
    params: RequestParams = PLAIN
    new_chunks: list[ChunkKey] = field(default_factory=list)
    """Chunks that it was the first to store, parents first, if its parameters limit their lives."""
    next_chunk: int = 0
    """Index of the first full chunk that the saver has not handled."""
    has_matched: bool = False
    """True once its chain was compared with what is stored."""
    matched_chunks: int = 0
    """Leading full chunks that were stored at the last match."""
    local_tokens: int = 0
    """Tokens in the engine's own prefix cache at the last match, in whole blocks."""
    restored_tokens: int = 0
    """Tokens that its last admission counted as restored."""
    stored_tokens: int = 0
    """The end of what was stored of it at the last match."""
    lacks_answer: bool = False
    """True if the directory did not tell in time, or could not be asked, what peers store of it."""
    asked_s: float = 0.0
    """Clock time of vLLM's first question."""
    wait: Wait | None = None
    """Its wait for the first token, kept by `Predictions`."""
    report: RequestReport | None = None
    """Made after its first token."""
    preemptions: int = 0
    reuse: Reuse | None = None
    """The chunks found stored when it was first admitted; None before."""
    missed_chunks: int = 0
    """Stored chunks that it then had to compute again because no checkpoint was there, or, 64 at
    most, would have had to without the engine's own cache."""
    passes_match: bool = False
    """True until its first step, if the engine's own cache has all that was stored of it, and the
    end of that has no checkpoint."""
    lacks_parent: bool = False
    """True, until the next admission, if a chunk of a model without prefix-proportional state found
    no place: its state has left the pages, so its chain cannot go on."""
    unplaced: ChunkKey | None = None
    """The latest chunk that found no place in the store, which is tried in every step but counted
    once."""
    undecided: int = 0
    """Save id of a checkpoint that is kept only if the request ends there; 0: none."""
    session: Hashable | None = None
    """The session that the request is a turn of; None until it has been matched."""
    restore: PendingRestore | None = None
    awaits: str | None = None
    """A request whose load this one has waited for, by id; it waits for one at most."""
    attempts: Attempts | None = None
    """None if no restore was tried."""
    admitting: bool = False
    """True from its admission to its next scheduled step, which sets `next_chunk` again."""
    windows_from: int = 0
    """First boundary whose windows are exact; those before it must not be saved."""
    handoff_tokens: int = 0
    """Tokens stored for the engine that will decode the request; 0: none."""
    is_lost: bool = False
    """True if a load of it could not be ordered: from then on it is computed. What failed would
    fail again, and vLLM asks again for a request that was parked."""
    outdated: bool = False
    """True if its pages may not hold what its chain names; nothing of them is saved. Decided anew
    at each admission."""

    @classmethod
    def of(
        cls,
        request: Request,
        hasher: ChainHasher,
        identity: RequestIdentity,
        clearings: Clearings,
        params: RequestParams = PLAIN,
    ) -> RequestTracker:
        """Return a tracker for the request, with nothing hashed yet."""
        chain = RequestChain(hasher, extra_keys(request, identity, clearings))
        return cls(request, chain, params)

    def change_root(self, hasher: ChainHasher) -> None:
        """Name the chain under another root: the pages it has are not saved or handed off."""
        self.chain = self.chain.rehashed(hasher)
        self.outdated = True
        self.handoff_tokens = 0

    @property
    def decodes_from(self) -> int:
        """The number of computed tokens from which on the request decodes.

        A preempted request computes its answer again, too, before it decodes its last token.
        """
        return max(int(self.request.num_prompt_tokens), int(self.request.num_tokens) - 1)

    @property
    def local_hit(self) -> int:
        """Tokens that the engine's own prefix cache had, in the first step after an admission.

        A hit may end inside a block: `local_tokens` leaves that part out.
        """
        return int(self.request.num_computed_tokens) - self.restored_tokens

    @property
    def left_to_compute(self) -> int:
        """Tokens after those that are computed, will be restored, or were in pages at the match."""
        if self.restore is not None:
            resume = self.restore.plan.resume_tokens
        else:
            resume = max(self.local_tokens, int(self.request.num_computed_tokens))
        return max(0, int(self.request.num_tokens) - resume)

    def last_to_restore(self, local_tokens: int) -> int:
        """Return the last token at which the request may resume.

        One at least is computed, and `max_load_tokens` counts from what the engine has itself.
        """
        limit, most = int(self.request.num_tokens) - 1, self.params.max_load_tokens
        return limit if most is None else min(limit, local_tokens + most)

    @property
    def last_to_store(self) -> int:
        """Return the token beyond which nothing of the request is stored."""
        if self.params.no_store:
            return 0
        most = self.params.max_offload_tokens
        return sys.maxsize if most is None else most

    def grow(self) -> int:
        """Add new tokens to the chain; return the number of known tokens."""
        known = int(self.request.num_tokens)
        if known > self.chain.num_tokens:
            self.chain.extend(self.request.all_token_ids[self.chain.num_tokens : known])
        return known


def replayable(request: Request) -> bool:
    """True if each token sees only tokens before it, as the length of a replay assumes.

    Attention to an image may go in both directions; embeddings have no token ids to replay.
    """
    return not request.mm_features and request.prompt_embeds is None
