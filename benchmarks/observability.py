"""`python -m benchmarks.observability [--json]`: the cost of telling others what is stored.

`events_per_s`: chunks of 256 tokens that one core announces in a second, from the request's hashes
to vLLM's events. Each is announced for the first time; seconds to withdraw them for other weights
(one event for many) and to announce them again are in the details.
`event_us_step`: microseconds of a step without news.
`event_bytes_chunk`: memory of one announced chunk.

These are over a real store; only the request is a stand-in.

`status_ms_p99`: milliseconds from a client's question to the whole status, at the socket of an
engine whose store has a million chunks; `live_ms_p99` and `sessions_ms_p99` are the answers for the
live page and about sessions.

`decode_ratio_observed`: seconds of a batch of decodes on a real server, from their first tokens,
while a viewer takes the live page's events, over the seconds without one; `..._least` and
`..._most` of its turns.
"""

from __future__ import annotations

import argparse
import statistics
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from benchmarks import live_page, status_latency
from benchmarks.measure import machine_line, publish, rounded, table, timed
from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from hetero_connector.artifacts.record import ChunkRange
from hetero_connector.metrics import Recorder
from hetero_connector.spec import LayerSpec, ModelSpec, RestoreRule, StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig

CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
CHUNKS = 4096
_PAGE_BYTES = 64
_LAYER = LayerSpec(
    layer="full",
    group=0,
    state_type=StateType.DENSE_KV,
    tokens_per_state=1,
    block_tokens=BLOCK_TOKENS,
    page_bytes=_PAGE_BYTES,
    page_stride_bytes=_PAGE_BYTES,
    dtype="uint8",
    restore_rule=RestoreRule.EVERY_TOKEN,
)
_SLOT_BYTES = CHUNK_TOKENS // BLOCK_TOKENS * _PAGE_BYTES


@dataclass(frozen=True)
class EventTiming:
    """One round over `CHUNKS` chunks of one prompt."""

    stored_s: float
    """To publish all chunks once they are sealed."""
    withdrawn_s: float
    """To withdraw them when the weights change."""
    repeated_s: float
    """To announce them again when the weights are back."""
    idle_s: float
    """A step without news."""
    chunk_bytes: float

    @property
    def events_per_s(self) -> float:
        return CHUNKS / self.stored_s


def measure(*, memory: bool = False) -> EventTiming:
    """Time one round; with `memory` its times are those of a traced run and of no use."""
    with _stored() as (events, tracker, chunks):
        if memory:
            tracemalloc.start()
        for chunk in chunks:
            events.on_stored(tracker, chunk)
        stored_s = timed(lambda: _publish(events))
        held_bytes = 0
        if memory:
            held_bytes = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
        idle_s = timed(lambda: [events.take() for _ in range(1000)]) / 1000
        events.on_new_root(b"other weights")
        withdrawn_s = timed(lambda: _publish(events))
        events.on_new_root(tracker.chain.root)
        repeated_s = timed(lambda: _publish(events))
    return EventTiming(stored_s, withdrawn_s, repeated_s, idle_s, held_bytes / CHUNKS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observability")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    arguments = parser.parse_args()
    rounds = [measure() for _ in range(5)]
    status = status_latency.measure()
    page = live_page.measure()
    figures = rounded(
        {
            "events_per_s": statistics.median(x.events_per_s for x in rounds),
            "event_us_step": 1e6 * statistics.median(x.idle_s for x in rounds),
            "event_bytes_chunk": measure(memory=True).chunk_bytes,
            **{f"{name}_ms_p99": ms for name, ms in status.p99_ms.items()},
            **page.figures(),
        }
    )
    rows = [
        [name, f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"]
        for name, value in figures.items()
    ]
    note = (
        f"`decode_ratio_observed`: {len(page.ratios)} turns, "
        f"an event of {page.event_bytes:,} bytes a second; the viewer draws nothing"
    )
    text = f"{machine_line()}; medians\n\n{table(['figure', 'value'], rows)}\n{note}"
    publish(
        "observability",
        text,
        figures,
        {
            "rounds": [vars(x) for x in rounds],
            "status": vars(status),
            "live_page": vars(page),
        },
        as_json=arguments.json,
    )


def _publish(events: Any) -> None:
    while events.has_news:
        events.take()


@contextmanager
def _stored() -> Iterator[tuple[Any, Any, list[ChunkRange]]]:
    """Yield the maker of events over a store with one long prompt, a tracker and its chunks."""
    from hetero_connector.engine.scheduler.block_events import BlockEvents, EventGroup

    model = ModelSpec((_LAYER,), alignment=BLOCK_TOKENS)
    hasher = ChainHasher(b"benchmark", CHUNK_TOKENS)
    tokens = list(range(CHUNKS * CHUNK_TOKENS))
    tracker = _tracker(hasher, tokens)
    store = ArtifactStore.open(
        {StateType.DENSE_KV: _SLOT_BYTES},
        StoreConfig(dram_bytes=2 * CHUNKS * 4096, shared=False),
        Recorder(),
        chunk_tokens=CHUNK_TOKENS,
        fingerprint=b"benchmark",
        description={},
    )
    try:
        group = EventGroup(0, "full_attention", BLOCK_TOKENS, BLOCK_TOKENS)
        events = BlockEvents(group, model, store, None)
        events.on_new_root(hasher.root)
        chunks = list(tracker.chain.chunks())
        for chunk in chunks:
            save = store.begin_save(chunk, {StateType.DENSE_KV: _SLOT_BYTES})
            if save is None:
                raise RuntimeError("the store is too small for the benchmark")
            store.complete_save(save)
        yield events, tracker, chunks
    finally:
        store.close()


def _tracker(hasher: ChainHasher, tokens: list[int]) -> Any:
    """Return a stand-in for a request's tracker, with the hashes that vLLM makes."""
    chain = RequestChain(hasher)
    chain.extend(tokens)
    hashes = [(at * 0x9E3779B97F4A7C15).to_bytes(32, "big") for at in tokens[::BLOCK_TOKENS]]
    request = SimpleNamespace(
        all_token_ids=tokens,
        block_hashes=hashes,
        lora_request=None,
        cache_salt=None,
        mm_features=[],
        prompt_embeds=None,
    )
    return SimpleNamespace(chain=chain, request=request)


if __name__ == "__main__":
    main()
