"""The prefix that each worker could resume from, by the directory's records."""

from __future__ import annotations

import pytest

from hetero_connector.artifacts.record import ArtifactId, ChunkKey
from hetero_connector.spec import StateType
from ownership.directory import Claim, Copy, Directory, Worker
from ownership.directory.identifiers import Epoch
from ownership.directory.memory import MemoryDirectory
from ownership.scheduling import WorkerPrefix
from ownership.scheduling.prefixes import worker_prefixes
from tests.planner.chains import DENSE, HYBRID, KV, LLAMA4, LOCAL, SWA

CHAIN = [ChunkKey(bytes([i + 1] * 16)) for i in range(4)]
ENDS = [64, 128, 192, 224]
DRAM, SSD = Copy(10, bytes(16), 0), Copy(10, bytes(16), on_ssd=True)


@pytest.fixture
def directory() -> Directory:
    return MemoryDirectory(lambda: 1_000.0)


def register(directory: Directory, name: str) -> Epoch:
    return directory.register(Worker(name), 60.0).epoch


def claim(
    directory: Directory, epoch: Epoch, chunks: str, state_type: StateType = KV
) -> list[Claim]:
    """One letter per chunk: d for DRAM, s for SSD, a dot for nothing."""
    copies = {"d": DRAM, "s": SSD}
    claims = [
        Claim(ArtifactId(key, state_type), copies[place])
        for key, place in zip(CHAIN, chunks, strict=False)
        if place in copies
    ]
    directory.claim_owner(epoch, claims)
    return claims


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ("dddd", WorkerPrefix(0, 224, 224)),
        ("ddss", WorkerPrefix(0, 128, 224)),
        ("dsdd", WorkerPrefix(0, 64, 224)),
        ("d.dd", WorkerPrefix(0, 64, 64)),
        ("ssss", WorkerPrefix(0, 0, 224)),
        (".ddd", None),
        ("", None),
    ],
)
def test_a_prefix_is_unbroken(
    directory: Directory, chunks: str, expected: WorkerPrefix | None
) -> None:
    claim(directory, register(directory, "a"), chunks)
    found = worker_prefixes(directory.lookup(CHAIN), DENSE, ENDS)
    assert found == ({} if expected is None else {"a": expected})


@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [
        ("....", None),
        (".d..", WorkerPrefix(0, 128, 128)),
        ("dsd.", WorkerPrefix(0, 192, 192)),
        ("d..s", WorkerPrefix(0, 64, 224)),
    ],
)
def test_a_request_resumes_only_at_a_checkpoint(
    directory: Directory, checkpoints: str, expected: WorkerPrefix | None
) -> None:
    epoch = register(directory, "a")
    claim(directory, epoch, "dddd")
    claim(directory, epoch, checkpoints, SWA)
    found = worker_prefixes(directory.lookup(CHAIN), HYBRID, ENDS)
    assert found == ({} if expected is None else {"a": expected})


def test_a_request_resumes_at_the_start_of_a_local_chunk_without_its_state(
    directory: Directory,
) -> None:
    epoch = register(directory, "a")
    claim(directory, epoch, "dddd")
    claim(directory, epoch, "s", LOCAL)
    found = worker_prefixes(directory.lookup(CHAIN), LLAMA4, ENDS)
    assert found == {"a": WorkerPrefix(0, 192, 192)}, "chunks of 192 tokens"


def test_replicas_count_and_ended_workers_do_not(directory: Directory) -> None:
    owner, reader = register(directory, "a"), register(directory, "b")
    claims = claim(directory, owner, "dddd")
    directory.replicate_readonly(reader, claims[:2], 30.0)
    view = directory.lookup(CHAIN)
    assert worker_prefixes(view, DENSE, ENDS) == {
        "a": WorkerPrefix(0, 224, 224),
        "b": WorkerPrefix(0, 128, 128),
    }
    directory.end_lease(owner)
    assert worker_prefixes(directory.lookup(CHAIN), DENSE, ENDS) == {"b": WorkerPrefix(0, 128, 128)}


def test_every_chunk_needs_an_end(directory: Directory) -> None:
    with pytest.raises(ValueError, match="4 chunks need as many ends, got 1"):
        worker_prefixes(directory.lookup(CHAIN), DENSE, [64])
