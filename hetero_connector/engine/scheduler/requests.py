"""What the scheduler side remembers of one request."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.engine.scheduler.request_identifier import RequestIdentity, extra_keys
from hetero_connector.planner.checkpoints import Reuse
from hetero_connector.planner.plan import RestorePlan
from hetero_connector.store.base import Restore

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class PendingRestore:
    """A plan whose artifacts are being brought to DRAM, or are there."""

    plan: RestorePlan
    handle: Restore
    local_tokens: int
    beside_decodes: int = 0
    """Requests that decoded when it began, if the engine did nothing else."""
    ranks_left: int = 0
    """Reports still to come: one of each tensor-parallel rank for each load ordered."""
    cut: int | None = None
    """vLLM admitted fewer tokens than the plan has: it computes from this one on."""

    def fits(self, local_tokens: int) -> bool:
        """Whether the plan still says what to load on top of `local_tokens`."""
        return self.local_tokens <= local_tokens < self.plan.resume_tokens


@dataclass
class Attempts:
    """What has been tried to restore of a request since it last held pages.

    It outlives an answer: vLLM asks again, step by step, while there are no pages for the request.
    """

    begun_s: float
    staged_s: float | None = None
    """Seconds from `begun_s` to the answer; None while there is none."""
    count: int = 0
    """Of those that failed."""
    failed: set[ArtifactId] = field(default_factory=set)
    """What they could not get."""

    def begin(self, now_s: float) -> None:
        """A restore begins. After an answer it is staged anew, and has time of its own."""
        if self.staged_s is not None:
            self.begun_s, self.staged_s = now_s, None

    def seconds(self, now_s: float) -> float:
        """What staging takes, or took; waiting for pages with an answer does not count."""
        return now_s - self.begun_s if self.staged_s is None else self.staged_s


@dataclass
class RequestTracker:
    """One request's chain, its restore in progress, and how far it has been saved."""

    request: Request
    chain: RequestChain
    next_chunk: int = 0
    """Index of the first full chunk that has not been looked at for saving."""
    matched_chunks: int = 0
    """Leading full chunks the store held when the request was last matched."""
    local_tokens: int = 0
    """What the engine's own prefix cache held when it was last matched."""
    reuse: Reuse | None = None
    """What it found stored when it was first admitted."""
    missed_chunks: int = 0
    """Chunks it then had to compute anew though they were stored, for want of a checkpoint."""
    undecided: int = 0
    """Save id of a checkpoint that stays only if the request ends there; 0 for none."""
    session: Hashable | None = None
    """Whose turn it is; None until it has been matched."""
    restore: PendingRestore | None = None
    attempts: Attempts | None = None
    """None where nothing was tried."""
    admitting: bool = False
    """Admitted since its last scheduled step: `next_chunk` is to be found anew."""
    windows_from: int = 0
    """The first boundary whose windows are exact; those before it must not be saved."""
    handoff_tokens: int = 0
    """Up to where it is kept for the engine that it is handed off to; 0: nothing is."""
    outdated: bool = False
    """The store was reset, or the weights changed, since it was admitted: its pages must not be
    saved."""

    @classmethod
    def of(cls, request: Request, hasher: ChainHasher, identity: RequestIdentity) -> RequestTracker:
        """Start tracking; hashes nothing yet."""
        return cls(request, RequestChain(hasher, extra_keys(request, identity)))

    def begin_anew(self, hasher: ChainHasher) -> None:
        """Nothing from before counts any more: pages it has are neither saved nor handed off."""
        self.chain = self.chain.under(hasher)
        self.outdated = True
        self.handoff_tokens = 0

    @property
    def left_to_compute(self) -> int:
        """Tokens after those it holds, is to hold, or was found to hold when last asked about."""
        if self.restore is not None:
            resume = self.restore.plan.resume_tokens
        else:
            resume = max(self.local_tokens, int(self.request.num_computed_tokens))
        return max(0, int(self.request.num_tokens) - resume)

    def grow(self) -> int:
        """Take over the tokens that arrived since the last call; returns how many are known."""
        known = int(self.request.num_tokens)
        if known > self.chain.num_tokens:
            self.chain.extend(self.request.all_token_ids[self.chain.num_tokens : known])
        return known


def replayable(request: Request) -> bool:
    """Whether each token sees only tokens before it, as the replay length takes for granted.

    Images may be attended to in both directions; embeddings have no token ids to replay.
    """
    return not request.mm_features and request.prompt_embeds is None
