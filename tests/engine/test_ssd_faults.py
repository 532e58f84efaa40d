"""The SSD fails under a running engine: each fault is a counted miss and the answer is right."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hetero_connector.spec import StateType
from hetero_connector.store.catalog.nodes import Artifact
from tests.engine.harness import (
    Completion,
    delta,
    engine,
    forget,
    forget_local,
    generate,
    leave_on_ssd_only,
    metric,
    prompt_tokens,
    scheduler_side,
    sealed,
    settle,
)

pytestmark = pytest.mark.engine

MODEL = "gemma3"
PROMPT = prompt_tokens(1390, seed=61)
BOUNDARY = 1376
CHUNK = 256
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def cold() -> Completion:
    """Return the answers of an engine without the connector."""
    with engine(MODEL) as llm:
        return generate(llm, PROMPT, max_tokens=8)


@pytest.fixture(scope="module")
def llm(cold: Completion, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    extra = {"dram_gib": 0.03, "ssd_dir": str(tmp_path_factory.mktemp("ssd")), "ssd_gib": 0.06}
    with engine(MODEL, extra, disable_log_stats=False) as llm:
        yield llm


@pytest.fixture
def on_ssd(llm: Any, cold: Completion) -> Any:
    """Return the engine with PROMPT's state on SSD only."""
    forget(llm)
    generate(llm, PROMPT, max_tokens=8)
    leave_on_ssd_only(llm)
    forget_local(llm)
    return llm


def same(answer: Completion, cold: Completion) -> None:
    assert answer.tokens == cold.tokens
    assert delta(answer, cold) <= TOLERANCE


@contextmanager
def counted(cause: str) -> Iterator[None]:
    before = metric("heterocache_failures_total", cause=cause, tier="ssd")
    yield
    assert metric("heterocache_failures_total", cause=cause, tier="ssd") > before


def chunk_at(llm: Any, state_type: StateType, end: int) -> Artifact:
    """Return the artifact of the prompt's chunk or boundary that ends at `end` tokens."""
    (found,) = (a for a in sealed(llm) if a.state_type is state_type and a.node.chunk.end == end)
    return found


class Slab:
    """The slab file, to be damaged from outside."""

    def __init__(self, llm: Any) -> None:
        tiers = scheduler_side(llm).store.catalog.tiers
        directory = scheduler_side(llm).store.io_thread.ssd.rows.directory
        self.path: Path = directory.path / "slots.slab"
        self.fd: int = directory.files[0].fd
        self._offset = tiers.ssd.offset

    def read(self, artifact: Artifact) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self._offset(artifact.ssd))
            return file.read(artifact.size_bytes)

    def write(self, artifact: Artifact, data: bytes, at: int = 0) -> None:
        with self.path.open("r+b") as file:
            file.seek(self._offset(artifact.ssd) + at)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


Spoil = Callable[[Any, Slab, StateType, int], None]


def flip_one_bit(llm: Any, slab: Slab, state_type: StateType, end: int) -> None:
    artifact = chunk_at(llm, state_type, end)
    slab.write(artifact, bytes([slab.read(artifact)[-1] ^ 1]), at=artifact.size_bytes - 1)


def tear(llm: Any, slab: Slab, state_type: StateType, end: int) -> None:
    artifact = chunk_at(llm, state_type, end)
    half = artifact.size_bytes // 2
    slab.write(artifact, bytes(artifact.size_bytes - half), at=half)


def anothers_bytes(llm: Any, slab: Slab, state_type: StateType, end: int) -> None:
    other = chunk_at(llm, state_type, end - CHUNK)
    slab.write(chunk_at(llm, state_type, end), slab.read(other))


def test_without_a_fault_all_of_it_is_restored(on_ssd: Any, cold: Completion) -> None:
    before = metric("heterocache_failures_total")
    restored = generate(on_ssd, PROMPT, max_tokens=8)
    assert restored.num_cached_tokens == BOUNDARY
    same(restored, cold)
    assert metric("heterocache_failures_total") == before


@pytest.mark.parametrize("state_type", [StateType.DENSE_KV, StateType.WINDOW_SWA])
@pytest.mark.parametrize("spoil", [flip_one_bit, tear, anothers_bytes])
def test_wrong_bytes_shorten_the_prefix(
    on_ssd: Any, cold: Completion, spoil: Spoil, state_type: StateType
) -> None:
    # The window is needed only where the request resumes: the tail's must be bad as well.
    end = BOUNDARY // CHUNK * CHUNK
    if state_type is StateType.WINDOW_SWA:
        flip_one_bit(on_ssd, Slab(on_ssd), state_type, BOUNDARY)
    spoil(on_ssd, Slab(on_ssd), state_type, end)
    with counted("checksum"):
        answer = generate(on_ssd, PROMPT, max_tokens=8)
    assert answer.num_cached_tokens == end - CHUNK
    same(answer, cold)


def test_a_slab_cut_off_under_the_engine(on_ssd: Any, cold: Completion) -> None:
    slab = Slab(on_ssd)
    content = slab.path.read_bytes()
    os.truncate(slab.path, 0)
    try:
        with counted("io_error"):
            answer = generate(on_ssd, PROMPT, max_tokens=8)
    finally:
        with slab.path.open("r+b") as file:
            file.write(content)
    assert answer.num_cached_tokens == 0
    same(answer, cold)


def test_a_slab_that_cannot_be_written_is_only_read(
    on_ssd: Any, cold: Completion, caplog: pytest.LogCaptureFixture
) -> None:
    """This must be the last test: after it the SSD tier is not written."""
    store = scheduler_side(on_ssd).store
    slab = Slab(on_ssd)
    read_only = os.open(slab.path, os.O_RDONLY)
    kept = os.dup(slab.fd)
    os.dup2(read_only, slab.fd)
    try:
        with counted("io_error"):  # published by the engine's next steps
            for seed in range(6):
                generate(on_ssd, prompt_tokens(600, seed=seed))
                settle(on_ssd)
                if not store.flush(30.0):
                    break
            forget_local(on_ssd)
            restored = generate(on_ssd, PROMPT, max_tokens=8)
        assert not store.catalog.writes.is_writable
        (line,) = (r for r in caplog.records if "writing is tried again" in r.getMessage())
        assert str(slab.path.parent) in line.getMessage()
    finally:
        os.dup2(kept, slab.fd)
        os.close(kept)
        os.close(read_only)
    assert restored.num_cached_tokens == BOUNDARY
    same(restored, cold)
    forget_local(on_ssd)
    again = generate(on_ssd, PROMPT, max_tokens=8)
    assert again.num_cached_tokens == BOUNDARY
    same(again, cold)
    store.check_integrity()
