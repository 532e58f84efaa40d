"""Compares the bytes stored per token, measured on a server, with the model's arithmetic."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.serving import Server, engine_arguments
from examples.tables import table
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.spec import ModelSpec, StateType
from hetero_connector.spec.from_config import model_spec_from_config

_SETTLE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one state type for the whole prompt."""

    state_type: str
    stored: float
    """Measured: `heterocache_saved_bytes_total`."""
    useful: int
    """Computed from config.json alone."""
    padded: int
    """Computed for the same pages at the engine's padded page stride."""


@dataclass(frozen=True)
class StoredBytes:
    """Bytes stored for a prompt of `num_tokens`, a checkpoint every `chunk_tokens` included."""

    num_tokens: int
    chunk_tokens: int
    states: tuple[StateBytes, ...]
    engine_bytes_per_token: float
    """Bytes of the engine's own KV cache over the tokens that it can hold."""

    def as_table(self) -> str:
        """Return the bytes per token, measured and computed."""

        def per_token(size: float) -> str:
            return f"{size / self.num_tokens:,.1f}"

        columns = ("stored", "useful", "padded")
        rows = [
            (state.state_type, *(per_token(getattr(state, column)) for column in columns))
            for state in self.states
        ]
        totals = (sum(getattr(state, column) for state in self.states) for column in columns)
        rows.append(("all", *map(per_token, totals)))
        header = ("bytes stored per token", "measured", "useful, computed", "with padding")
        return (
            f"{table(header, rows)}\n"
            f"(a checkpoint every {self.chunk_tokens} tokens included; "
            f"the engine's own blocks take {self.engine_bytes_per_token:,.0f} B/token)"
        )


def measure_stored_bytes(server: Server, prompt: Sequence[int], chunk_tokens: int) -> StoredBytes:
    """Serve `prompt` and compare what is stored for it.

    It must be a multiple of `chunk_tokens` long, and nothing of it may be stored yet.
    """
    spec = _model_spec(server.model)
    layout = ArtifactLayout(spec, chunk_tokens)
    before = _saved(server)
    server.complete(prompt, 1, 0)  # the one decoded token is never computed: whole chunks only
    after = _settled(server)
    states = tuple(
        StateBytes(
            kind.value,
            after.get(kind.value, 0.0) - before.get(kind.value, 0.0),
            *_arithmetic(layout, kind, len(prompt)),
        )
        for kind in spec.state_types
    )
    return StoredBytes(len(prompt), chunk_tokens, states, _engine_bytes_per_token(server))


def _model_spec(checkpoint: Path) -> ModelSpec:
    config = json.loads((checkpoint / "config.json").read_text())
    block_tokens = engine_arguments(checkpoint.name).get("block_size")
    return model_spec_from_config(config, block_tokens=block_tokens)


def _arithmetic(layout: ArtifactLayout, kind: StateType, num_tokens: int) -> tuple[int, int]:
    """Return the (useful, padded) bytes of this type's artifacts over the prompt's chunks."""
    useful = padded = 0
    for start in range(0, num_tokens, layout.chunk_tokens):
        end = start + layout.chunk_tokens
        useful += layout.artifact_bytes(kind, start, end)
        padded += sum(
            segment.num_pages * segment.layer.page_stride_bytes
            for segment in layout.segments(kind, start, end)
        )
    return useful, padded


def _saved(server: Server) -> dict[str, float]:
    series = server.series("heterocache_saved_bytes_total")
    return {labels["state_type"]: value for labels, value in series}


def _settled(server: Server) -> dict[str, float]:
    """Wait until two readings agree: the last saves are reported a step later."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    last: dict[str, float] = {}
    now = _saved(server)
    while last != now and time.monotonic() < deadline:
        time.sleep(0.5)
        last, now = now, _saved(server)
    return now


def _engine_bytes_per_token(server: Server) -> float:
    (info, _), *_ = server.series("vllm:cache_config_info")
    return float(info["kv_cache_memory_bytes"]) / float(info["kv_cache_size_tokens"])
