"""Replacements of vLLM's objects for the scheduler side, for tests without an engine."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hetero_connector.spec import LayerSpec, ModelSpec, RestoreRule, StateType


@dataclass
class FakeRequest:
    """The attributes of `vllm.v1.request.Request` that the scheduler side reads."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    cache_salt: str | None = None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    pooling_params: Any = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    status: Any = None
    session_id: str | None = None
    kv_transfer_params: Any = None
    arrival_time: float = field(default_factory=time.time)
    trace_headers: dict[str, str] | None = None

    def get_finished_reason(self) -> Any:
        from vllm.v1.request import RequestStatus

        return RequestStatus.get_finished_reason(self.status)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        """vLLM's hashes of the whole blocks of 16 tokens, chained; adapters are not in them."""
        hashes, above = list[bytes](), repr(self.cache_salt).encode()
        for start in range(0, self.num_tokens - 15, 16):
            above = hashlib.sha256(above + repr(self.all_token_ids[start:][:16]).encode()).digest()
            hashes.append(above)
        return hashes


class FakeBlockTables:
    """A `KVCacheManager`: block ids by request and group, which tests set, and the prefix cache."""

    def __init__(self) -> None:
        self.ids: dict[str, tuple[list[int], ...]] = {}
        self.evicted: set[int] = set()
        """Blocks taken out of the prefix cache."""
        self.published: tuple[dict[str, int], ...] = ({}, {})
        """Number of a request's blocks in the prefix cache, by group."""
        self.prefixes: dict[bytes, int] = {}
        """The blocks in the prefix cache, by hash."""
        self.has_partial_hits = True
        """Blocks that are partly full are published, too."""
        self.usage = 0.0
        """Share of the blocks that requests have; a test sets it."""
        self.resets = 0

    def evict(self, ids: set[int]) -> None:
        self.evicted |= ids
        for name in [name for name, block in self.prefixes.items() if block in ids]:
            del self.prefixes[name]

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        self.prefixes.clear()
        return True

    @property
    def coordinator(self) -> SimpleNamespace:
        managers = [
            SimpleNamespace(
                req_to_blocks={
                    name: [SimpleNamespace(block_id=i, is_null=not i) for i in ids[group]]
                    for name, ids in self.ids.items()
                    if group < len(ids)
                },
                num_cached_block=published,
            )
            for group, published in enumerate(self.published)
        ]
        return SimpleNamespace(
            single_type_managers=managers, enable_partial_hash_hits=self.has_partial_hits
        )

    @property
    def block_pool(self) -> SimpleNamespace:
        return SimpleNamespace(
            evict_blocks=self.evict,
            blocks=[
                SimpleNamespace(block_id=block, block_hash=name)
                for name, block in self.prefixes.items()
            ],
            cached_block_hash_to_block=self.prefixes,
            get_usage=lambda: self.usage,
        )

    def get_blocks(self, request_id: str) -> SimpleNamespace:
        blocks = tuple(
            [SimpleNamespace(block_id=i) for i in group] for group in self.ids[request_id]
        )
        return SimpleNamespace(blocks=blocks)


def scheduled(**num_tokens: int) -> SimpleNamespace:
    """Return a `SchedulerOutput` that schedules these requests."""
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[]),
        total_num_scheduled_tokens=sum(num_tokens.values()),
        num_scheduled_tokens=num_tokens,
        scheduled_spec_decode_tokens={},
        kv_connector_block_state=None,
        preempted_req_ids=None,
        has_sync_kv_loads=False,
        new_block_ids_to_zero=None,
        kv_cache_block_copies=None,
    )


def layer(
    name: str,
    group: int,
    state_type: StateType = StateType.DENSE_KV,
    *,
    block: int = 16,
    page_bytes: int = 256,
    window: int | None = None,
) -> LayerSpec:
    """Return a small layer; with a window its state is boundary state."""
    return LayerSpec(
        layer=name,
        group=group,
        state_type=state_type,
        tokens_per_state=1,
        block_tokens=block,
        page_bytes=page_bytes,
        page_stride_bytes=page_bytes,
        dtype="uint8",
        restore_rule=RestoreRule.WINDOW if window else RestoreRule.EVERY_TOKEN,
        window=window,
        boundary_tokens=window - 1 if window else 0,
    )


HYBRID = ModelSpec(
    (layer("full", 0), layer("swa", 1, StateType.WINDOW_SWA, window=32)), alignment=16
)
DENSE = ModelSpec((layer("full", 0),), alignment=16)
