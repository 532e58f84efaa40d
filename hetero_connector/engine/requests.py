"""What the scheduler side remembers of one request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from hetero_connector.artifacts.canonical import encode
from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from hetero_connector.artifacts.identity import locate_model, lora_digest
from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.errors import IdentityError
from hetero_connector.planner.checkpoint_policy import Reuse
from hetero_connector.planner.restore_plan import RestorePlan
from hetero_connector.store.base import Restore

if TYPE_CHECKING:
    from vllm.v1.request import Request


logger = logging.getLogger("vllm.heterocache")


class LoraDigests:
    """Content digest of each adapter, as long as its id stands for the same content.

    vLLM loads an adapter's files when it first needs them, again after it had to drop the weights,
    and in place of them where a request says so. Once files were seen to differ from those that
    the id stood for first, nobody can say here which of them an engine computes with: requests
    with that id are not cached any more.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, bytes | None] = {}
        """None: it has stood for different content."""
        self._said: set[tuple[int, str]] = set()

    def of(self, request: Request) -> bytes | None:
        """b"" for a request without an adapter; None if the adapter cannot be identified."""
        lora = request.lora_request
        if lora is None:
            return b""
        number, known = lora.lora_int_id, self._by_id.get(lora.lora_int_id, b"")
        if known is None:
            return None
        try:
            digest = lora_digest(locate_model(lora.lora_path).path)  # of each file once
        except (IdentityError, OSError) as error:  # it may be on its way: asked again next time
            self._say(number, lora.lora_name, str(error))
            return None
        if known not in (b"", digest):
            self._by_id[number] = None
            self._say(number, lora.lora_name, "its files changed; load them under another name")
            return None
        self._by_id[number] = digest
        return digest

    def _say(self, number: int, name: str, reason: str) -> None:
        if (number, reason) not in self._said:
            self._said.add((number, reason))
            logger.warning("requests with adapter %r are not cached: %s", name, reason)


def extra_keys(request: Request, lora: bytes) -> Callable[[int, int], bytes]:
    """What besides tokens identifies this request's state (vLLM's own extra keys, and LoRA)."""
    if not (lora or request.mm_features or request.cache_salt or request.prompt_embeds is not None):
        return lambda start, end: b""

    def keys(start: int, end: int) -> bytes:
        own, _ = generate_block_hash_extra_keys(request, start, end, 0)
        return encode([lora, own or ()])

    return keys


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
    """Up to where it is kept for the engine that it is handed over to; 0: nothing is."""
    outdated: bool = False
    """The store was reset since it was admitted: its pages must not be saved."""

    @classmethod
    def of(cls, request: Request, hasher: ChainHasher, lora: bytes) -> RequestTracker:
        """Start tracking; hashes nothing yet."""
        return cls(request, RequestChain(hasher, extra_keys(request, lora)))

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


def cacheable(request: Request) -> bool:
    """Whether this request's state may be stored and restored at all.

    Pooling reads hidden states of every token, and a streaming session rewrites its own
    past: neither resumes from a prefix.
    """
    return request.pooling_params is None and not request.resumable


def replayable(request: Request) -> bool:
    """Whether each token sees only tokens before it, as the replay length takes for granted.

    Images may be attended to in both directions; embeddings have no token ids to replay.
    """
    return not request.mm_features and request.prompt_embeds is None
