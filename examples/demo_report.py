"""The demo's tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from examples.demo import Outcome
    from examples.stored_bytes import StoredBytes

_WAYS = {
    "cold": "computed cold",
    "local": "the engine's own prefix hit",
    "dram": "restored from DRAM",
    "ssd": "restored from SSD after kill -9",
}


def print_report(outcome: Outcome) -> None:
    """Everything about one model."""
    print(f"\n== {outcome.model}: next turn of {outcome.prompt_tokens:,} tokens ==")
    print_ways(outcome)
    print_restored(outcome)
    if outcome.stored is not None:
        print_stored(outcome.stored)


def print_ways(outcome: Outcome) -> None:
    """TTFT, cached tokens and distance from the engine's own prefix hit."""
    rows = []
    for way, title in _WAYS.items():
        reply = outcome.replies[way][0]
        speedup = outcome.ttft_s("cold") / outcome.ttft_s(way)
        rows.append(
            (
                title,
                f"{outcome.ttft_s(way) * 1e3:,.0f} ms",
                f"{speedup:.1f} x",
                f"{reply.cached_tokens or 0:,}",
                f"{outcome.delta(way):.1e}",
            )
        )
    header = ("way to the first token", "TTFT", "faster", "tokens cached", "max |delta logprob|")
    print_table(header, rows)


def print_restored(outcome: Outcome) -> None:
    """Tokens restored by one request, by state type and tier."""
    kinds = {kind for tokens in outcome.restored.values() for kind in tokens}
    rows = [
        (kind, *(f"{outcome.restored[tier].get(kind, 0):,}" for tier in ("dram", "ssd")))
        for kind in sorted(kinds)
    ]
    print_table(("tokens restored", "from DRAM", "from SSD"), rows)


def print_stored(stored: StoredBytes) -> None:
    """Bytes per token, measured against the arithmetic."""

    def per_token(size: float) -> str:
        return f"{size / stored.num_tokens:,.1f}"

    columns = ("stored", "useful", "padded")
    rows = [
        (state.state_type, *(per_token(getattr(state, column)) for column in columns))
        for state in stored.states
    ]
    totals = (sum(getattr(state, column) for state in stored.states) for column in columns)
    rows.append(("all", *map(per_token, totals)))
    print_table(
        ("bytes stored per token", "measured", "useful, by arithmetic", "at padded page stride"),
        rows,
    )
    print(
        f"(a checkpoint every {stored.chunk_tokens} tokens included; "
        f"the engine's own blocks take {stored.engine_bytes_per_token:,.0f} B/token)"
    )


def print_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Columns padded to their widest cell; the first is left-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    print()
    for row in (header, *rows):
        cells = [
            row[0].ljust(widths[0]),
            *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells))
