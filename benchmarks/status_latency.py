"""Time the answers of an engine's socket while its store has a million chunks.

Store, scheduler's bookkeeping and socket are real. The reports of its newest requests are copies of
one, and nothing computes meanwhile.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange
from hetero_connector.metrics import Recorder
from hetero_connector.spec import StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.journal_format import JournalRow

CHUNKS = 1_000_000
CHUNK_TOKENS = 256
SESSIONS = 4_000
"""About as many as an engine remembers; each has a chain of its own."""
QUESTIONS = 300
_SLOTS = {StateType.DENSE_KV: 4096}
_FINGERPRINT = b"status benchmark"
_SSD_BYTES = CHUNKS * 4096 * 5 // 4


@dataclass(frozen=True)
class StatusTiming:
    """Milliseconds from a client's question to the whole answer, and the sizes of answers."""

    p99_ms: dict[str, float]
    """By question."""
    answer_bytes: dict[str, int]


def measure() -> StatusTiming:
    """Ask a socket about a store of `CHUNKS` chunks, `QUESTIONS` times each."""
    from hetero_connector.engine.scheduler.status_socket import StatusServer, ask

    p99_ms, answer_bytes = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _write_journal(root / "ssd")
        with _store(root / "ssd") as store:
            answers = _answers(store)
            server = StatusServer(root / "status", answers)
            try:
                for name in ("status", "sessions", "live"):
                    seconds = []
                    for _ in range(QUESTIONS):
                        began_s = time.perf_counter()
                        answer = ask(root / "status", {"get": name})
                        seconds.append(time.perf_counter() - began_s)
                        if "error" in answer:
                            raise RuntimeError(answer["error"])
                    p99_ms[name] = 1e3 * float(np.quantile(seconds, 0.99))
                    answer_bytes[name] = len(str(answer))
            finally:
                server.close()
    return StatusTiming(p99_ms, answer_bytes)


def _key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(16, "big"))


def _chain(session: int) -> Sequence[int]:
    """Return the numbers of a session's chunks."""
    length = CHUNKS // SESSIONS
    return range(1 + session * length, 1 + (session + 1) * length)


def _write_journal(root: Path) -> None:
    """Write the rows of a store with chains of equal length, as an engine left them."""
    directory = SsdDirectory.open(root, _FINGERPRINT, _SLOTS, _SSD_BYTES, {})
    try:
        for session in range(SESSIONS):
            rows, parent = [], ROOT
            for at, number in enumerate(_chain(session)):
                chunk = ChunkRange(_key(number), parent, at * CHUNK_TOKENS, (at + 1) * CHUNK_TOKENS)
                rows.append(JournalRow(chunk, StateType.DENSE_KV, number, 1, 4000, bytes(16), 1e9))
                parent = chunk.key
            directory.journal.record(rows)
    finally:
        directory.close()


@contextmanager
def _store(root: Path) -> Iterator[ArtifactStore]:
    store = ArtifactStore.open(
        _SLOTS,
        StoreConfig(dram_bytes=64 << 20, ssd_dir=root, ssd_bytes=_SSD_BYTES, shared=False),
        Recorder(),
        chunk_tokens=CHUNK_TOKENS,
        fingerprint=_FINGERPRINT,
        description={},
    )
    try:
        if len(store.catalog.tiers.index.nodes) != CHUNKS + 1:
            raise RuntimeError("not every chunk was found again")
        yield store
    finally:
        store.close()


def _answers(store: ArtifactStore) -> dict[str, Any]:
    """Return the answers of an engine with that store and as much to tell as it remembers."""
    from hetero_connector.engine.scheduler.predictions import RECENT
    from hetero_connector.engine.scheduler.request_report import RequestReport
    from hetero_connector.engine.scheduler.restore_counter import TokenSources
    from hetero_connector.engine.scheduler.session_book import SessionBook
    from hetero_connector.engine.scheduler.status import EngineStatus
    from hetero_connector.planner.compute_model import ComputeRegression
    from hetero_connector.planner.cost_model import CostModel
    from hetero_connector.planner.load_model import LoadModel
    from hetero_connector.planner.profile import CostProfile, ProfileSubject
    from hetero_connector.session_ids import session_key

    book = SessionBook()
    for session in range(SESSIONS):
        name, leaves = session_key(None, f"session {session}"), (_key(_chain(session)[-1]),)
        book.on_turn_start(name, b"")
        book.on_turn_end(name, leaves, len(_chain(session)) * CHUNK_TOKENS, (0.0, 60.0))
    values: dict[str, Any] = dict.fromkeys(RequestReport._fields, 0.123456)
    values |= {"request_id": "cmpl-" + "0" * 32, "restored_tokens": {"dram": 4096, "ssd": 512}}
    values |= {"read_s": {"ssd": 0.123456}, "reason": None, "choice": "load"}
    values |= {"chain": ("0" * 32, 4096)}
    report = RequestReport(**values)
    predictions: Any = SimpleNamespace(recent=lambda: [report] * RECENT)
    costs = CostModel(ComputeRegression(), LoadModel(list(_SLOTS)))
    subject = ProfileSubject("Model", "digest", "bfloat16", "", "auto", 1, "")
    return EngineStatus(
        {"model": "model", "engine": "engine"},
        store,
        predictions,
        lambda: CostProfile.of(costs, "model", subject),
        book,
        TokenSources(),
        lambda: {"draining": False, "scrub": None},
        Recorder(),
    ).answers()
