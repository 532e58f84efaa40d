"""`heterocache export|import`: a store is moved, and nothing that exists is lost on the way."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero_connector.artifacts.generation import FIRST, Generation
from hetero_connector.artifacts.record import ROOT, ArtifactId, ChunkKey, ChunkRange
from hetero_connector.engine.scheduler.clearings import Clearings
from hetero_connector.errors import StoreError
from hetero_connector.planner.compute_model import ComputeCoefficients
from hetero_connector.planner.profile import CostProfile, ProfileSubject
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.generation_file import (
    GENERATION_NAME,
    GenerationFile,
    read_generation,
)
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.journal_format import JournalRow
from hetero_connector.tools import cli, exporting, importing
from hetero_connector.tools.export_format import ExportedArtifact, ExportIndex, segments
from hetero_connector.transfer.checksum import checksum
from hetero_connector.units import GIB

KV, SWA = StateType.DENSE_KV, StateType.WINDOW_SWA
SLOTS = {KV: 64 << 10, SWA: 8 << 10}
MODEL = b"\xaa" * 16
NAME = "aa" * 8
CHUNK = 256
SSD_BYTES = 8 << 20
DESCRIPTION = {"chunk_tokens": CHUNK, "model_name": "tiny"}

LEARNED = CostProfile(
    "tiny", ProfileSubject("Tiny", "c0ffee", "bfloat16", "", "auto", 1, "some machine"),
    ComputeCoefficients(1e-3, 1e-5, 0.0), learned_until=1.7e9,
)  # fmt: skip

Stored = Mapping[tuple[bytes, StateType], bytes]
Run = Callable[..., tuple[int, str, str]]


def key(n: int) -> ChunkKey:
    return ChunkKey(n.to_bytes(16))


def content(n: int, kind: StateType) -> np.ndarray[Any, np.dtype[np.uint8]]:
    size = 50_000 if kind is KV else 8192
    return np.random.default_rng(n).integers(0, 256, size, dtype=np.uint8)


def open_directory(
    root: Path, ssd_bytes: int = SSD_BYTES, model: bytes = MODEL, slots: Any = SLOTS
) -> SsdDirectory:
    return SsdDirectory.open(root, model, slots, ssd_bytes, DESCRIPTION)


def put(
    directory: SsdDirectory, n: int, parent: int, depth: int, kind: StateType, slot: int
) -> None:
    data = content(n, kind)
    with (directory.path / "slots.slab").open("r+b") as slab:
        slab.seek(directory.geometry.offset(kind, slot))
        slab.write(data.tobytes())
    above = key(parent) if parent else ROOT
    chunk = ChunkRange(key(n), above, depth * CHUNK, (depth + 1) * CHUNK)
    digest = checksum(data, ArtifactId(key(n), kind).seed)
    when = 1.7e9 + n
    directory.journal.record([JournalRow(chunk, kind, slot, 1, data.size, digest, when, n)])


def fill(root: Path, chunks: int = 6, ssd_bytes: int = SSD_BYTES, first: int = 1) -> Path:
    """Store a chain of chunks, the odd ones with a checkpoint, in slots that lie apart."""
    directory = open_directory(root, ssd_bytes)
    zone = directory.geometry.first_slot(KV, 3)
    for depth in range(chunks):
        n = first + depth
        put(directory, n, n - 1 if depth else 0, depth, KV, zone + depth)
        if n % 2:
            put(directory, n, n - 1 if depth else 0, depth, SWA, first_swa(directory) + depth)
    directory.close()
    return directory.path


def first_swa(directory: SsdDirectory) -> int:
    return directory.geometry.first_slot(SWA, 6)


def stored(path: Path) -> Stored:
    """Read what a directory has, past every check of the code under test."""
    journal = Journal.open_copy(path / "journal.sqlite")
    slab = (path / "slots.slab").read_bytes()
    found = {}
    for row in journal.load():
        at = journal.meta.geometry.offset(row.state_type, row.slot)
        found[bytes(row.chunk.key), row.state_type] = slab[at : at + row.size_bytes]
    journal.close()
    return found


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fill(tmp_path / "source").parent


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "exported"


@pytest.fixture
def exported(source: Path, target: Path) -> Path:
    """The folder of the exported model."""
    exporting.export_model(source / NAME, target / NAME)
    return target / NAME


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: object) -> tuple[int, str, str]:
        code = cli.main([str(a) for a in argv])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


SIZE = ("--ssd-gib", SSD_BYTES / GIB)


def test_a_store_arrives_elsewhere_as_it_was(
    source: Path, target: Path, tmp_path: Path, run: Run
) -> None:
    before = snapshot(source)
    code, out, _ = run("export", source, target)
    assert (code, snapshot(source)) == (0, before)
    assert "9 artifacts" in out
    code, out, _ = run("import", target, tmp_path / "new", *SIZE)
    assert code == 0
    assert "9 artifacts imported" in out
    assert stored(tmp_path / "new" / NAME) == stored(source / NAME)
    code, out, _ = run("verify", tmp_path / "new")
    assert (code, "9 artifacts" in out) == (0, True)
    rows = [
        list(Journal.open_copy(r / NAME / "journal.sqlite").load())
        for r in (source, tmp_path / "new")
    ]
    theirs, ours = (
        {(r.id, r.chunk, r.size_bytes, r.checksum, r.last_access, r.reuse_count) for r in x}
        for x in rows
    )
    assert theirs == ours
    directory = open_directory(tmp_path / "new")  # its engine finds it cut as it needs it
    assert (directory.warnings, directory.journal.count()) == ([], 9)
    directory.close()


def test_files_can_be_read_by_this_user_alone(exported: Path) -> None:
    modes = {p.name: p.stat().st_mode & 0o777 for p in (exported, *exported.iterdir())}
    assert modes == {NAME: 0o700, "index": 0o600, "segment-000001": 0o600, "lock": 0o600}


def test_an_export_has_no_space_of_what_is_gone(exported: Path) -> None:
    size = sum(content(1, KV).size for _ in range(6)) + 3 * content(1, SWA).size
    assert (exported / "segment-000001").stat().st_size == size


def identity(file: Path) -> tuple[int, int, int]:
    """The file's inode, size and time of its last write in nanoseconds; reading it changes none."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def test_a_later_export_adds_only_what_is_new(source: Path, target: Path, run: Run) -> None:
    run("export", source, target)
    first = identity(target / NAME / "segment-000001")
    directory = open_directory(source)
    put(directory, 7, 6, 6, KV, 0)
    directory.close()
    _, out, _ = run("export", source, target, "--json")
    (report,) = json.loads(out)
    assert (report["artifacts"], report["new_artifacts"]) == (10, 1)
    assert identity(target / NAME / "segment-000001") == first
    assert sorted(segments(target / NAME)) == [1, 2]
    _, out, _ = run("export", source, target, "--json")
    assert json.loads(out)[0]["new_artifacts"] == 0


def test_segments_of_what_is_gone_are_removed(source: Path, exported: Path) -> None:
    directory = open_directory(source)
    gone = [row.id for row in directory.journal.load() if row.chunk.start >= CHUNK]
    directory.journal.forget(gone)
    directory.close()
    report = exporting.export_model(source / NAME, exported)
    assert (report.artifacts, report.new_artifacts) == (2, 2)
    assert list(segments(exported)) == [2]


def test_a_damaged_segment_is_mended_by_the_next_export(source: Path, exported: Path) -> None:
    with (exported / "segment-000001").open("r+b") as file:
        file.seek(10)
        file.write(b"xx")
    assert exporting.export_model(source / NAME, exported).new_artifacts == 1
    assert not importing.import_model(exported, source.parent / "new", SSD_BYTES / GIB).bad


def test_what_is_damaged_in_the_store_is_named_and_left_out(
    source: Path, target: Path, tmp_path: Path, run: Run
) -> None:
    directory = open_directory(source)
    at = directory.geometry.offset(SWA, first_swa(directory) + 2)
    directory.close()
    with (source / NAME / "slots.slab").open("r+b") as slab:
        slab.seek(at)
        slab.write(b"damage")
    code, out, _ = run("export", source, target)
    assert code == 1
    assert f"BAD window_swa {key(3).hex()}: its bytes do not match" in out
    assert run("import", target, tmp_path / "new", *SIZE)[0] == 0
    assert len(stored(tmp_path / "new" / NAME)) == 8


def test_a_directory_in_use_can_be_exported(source: Path, target: Path) -> None:
    """Artifacts that its engine replaces meanwhile are left out."""
    directory = open_directory(source)
    rows = list(directory.journal.load())

    def replace_one(rows_to_read: list[JournalRow]) -> list[JournalRow]:
        lost = next(r for r in rows if r.state_type is KV and r.chunk.start == 5 * CHUNK)
        directory.journal.forget([lost.id])
        put(directory, 99, 5, 5, KV, lost.slot)
        return rows_to_read

    report = exporting.export_model(source / NAME, target / NAME, replace_one)
    directory.close()
    assert (report.artifacts, report.replaced, report.bad) == (8, 1, [])


def test_what_is_cleared_while_it_is_exported_is_not_in_it(source: Path, target: Path) -> None:
    """The engine has not used its slot again, so the bytes are still there."""
    directory = open_directory(source)
    rows = list(directory.journal.load())

    def clear_after(rows_to_read: list[JournalRow]) -> Iterator[JournalRow]:
        yield from rows_to_read
        directory.journal.forget([rows[-1].id])

    report = exporting.export_model(source / NAME, target / NAME, clear_after)
    directory.close()
    assert (report.artifacts, report.replaced, report.bad) == (len(rows) - 1, 1, [])
    assert rows[-1].id not in {x.id for x in ExportIndex.read(target / NAME).artifacts}


def test_a_reset_while_it_is_exported_ends_the_export(source: Path, target: Path) -> None:
    def reset(rows: list[JournalRow]) -> list[JournalRow]:
        change_generation(source, FIRST.after_own_reset())
        return rows

    with pytest.raises(StoreError, match="was reset while it was exported"):
        exporting.export_model(source / NAME, target / NAME, reset)
    assert not (target / NAME / "index").exists()


def change_generation(root: Path, generation: Generation) -> None:
    file = GenerationFile.open(root / NAME / GENERATION_NAME, is_new=False)
    file.write(generation)
    file.close()


def take_over(root: Path, generation: Generation) -> None:
    """Let what is stored be of this generation."""
    change_generation(root, generation)
    directory = open_directory(root)
    rows = list(directory.journal.load())
    directory.journal.clear(generation.tag)
    directory.journal.record(rows)
    directory.close()


def test_what_is_from_before_a_reset_is_not_exported(source: Path, target: Path) -> None:
    change_generation(source, Generation(fleet=3))
    assert exporting.export_model(source / NAME, target / NAME).artifacts == 0


@pytest.mark.parametrize("generation", [Generation(fleet=3), FIRST.after_own_reset()])
def test_a_new_directory_takes_over_the_generation(
    source: Path, target: Path, tmp_path: Path, generation: Generation
) -> None:
    take_over(source, generation)
    exporting.export_model(source / NAME, target / NAME)
    report = importing.import_model(target / NAME, tmp_path / "new", SSD_BYTES / GIB)
    assert (report.artifacts, report.is_complete) == (9, True)
    moved = open_directory(tmp_path / "new")
    assert moved.generations.latest == generation
    assert not moved.is_outdated
    moved.close()


def test_a_store_that_was_reset_apart_is_refused(exported: Path, tmp_path: Path, run: Run) -> None:
    path = fill(tmp_path / "other", chunks=2, first=50)
    before = stored(path)
    change_generation(path.parent, FIRST.after_own_reset())
    code, _, err = run("import", exported, path.parent)
    assert code == 2
    assert "were not reset together" in err
    assert stored(path) == before


def test_the_engine_of_a_private_generation_must_be_stopped(source: Path, target: Path) -> None:
    change_generation(source, FIRST.after_own_reset())
    directory = open_directory(source)
    with pytest.raises(StoreError, match="Stop it to export"):
        exporting.export_model(source / NAME, target / NAME)
    directory.close()


def test_what_is_stored_already_stays_and_the_rest_is_added(
    exported: Path, source: Path, tmp_path: Path, run: Run
) -> None:
    path = fill(tmp_path / "other", chunks=3, ssd_bytes=16 << 20)
    directory = open_directory(path.parent, 16 << 20)
    put(directory, 80, 0, 0, KV, 0)
    directory.close()
    before = stored(path)
    code, out, _ = run("import", exported, path.parent, "--json")
    assert code == 0
    (report,) = json.loads(out)
    assert (report["artifacts"], report["present"]) == (4, 5)
    assert stored(path) == {**before, **stored(source / NAME)}
    code, out, _ = run("import", exported, path.parent, "--json")
    assert (code, json.loads(out)[0]["artifacts"]) == (0, 0)


def test_what_finds_no_room_is_the_end_of_chains(exported: Path, tmp_path: Path, run: Run) -> None:
    """Nothing is evicted for it; what is stored begins at the root."""
    small = 1 << 20
    path = fill(tmp_path / "other", chunks=0, ssd_bytes=small)
    directory = open_directory(path.parent, small)
    slots = directory.geometry.num_slots(KV)
    taken = range(slots - 4)
    for n in taken:
        put(directory, 100 + n, 99 + n if n else 0, n, KV, n)
    directory.close()
    before = stored(path)
    code, out, _ = run("import", exported, path.parent)
    assert code == 1
    assert "no room for" in out
    after = stored(path)
    assert before.items() <= after.items()
    chunks = {int.from_bytes(chunk) for chunk, kind in after.keys() - before.keys()}
    assert chunks == set(range(1, len(chunks) + 1))
    assert 0 < len(chunks) < 6
    assert run("verify", path.parent)[0] == 0


def test_no_checkpoint_is_imported_without_its_chunk(
    exported: Path, tmp_path: Path, run: Run
) -> None:
    """All slots of one type are taken; of the other there is a free one."""
    small = 1 << 20
    directory = open_directory(tmp_path / "other", small)
    for n in range(directory.geometry.num_slots(KV)):
        put(directory, 100 + n, 99 + n if n else 0, n, KV, n)
    directory.close()
    code, out, _ = run("import", exported, tmp_path / "other")
    assert code == 1
    assert "0 artifacts imported" in out
    assert "no room for 9" in out


def test_the_latest_chains_come_first() -> None:
    def artifact(n: int, parent: int, start: int, used: float) -> Any:
        return ExportedArtifact(
            bytes(key(n)), bytes(key(parent)), start, start + 1, KV, 1, b"c" * 16, used, 0, 1, 0
        )

    old, new = artifact(1, 0, 0, 5.0), artifact(2, 0, 0, 3.0)
    fork, later = artifact(3, 2, 1, 4.0), artifact(4, 2, 1, 9.0)
    order = importing._by_recency([fork, old, later, new])
    assert order == [new, later, old, fork]


def test_an_engine_keeps_the_directory_to_itself(exported: Path, tmp_path: Path, run: Run) -> None:
    path = fill(tmp_path / "other", chunks=2)
    directory = open_directory(path.parent)
    code, _, err = run("import", exported, path.parent)
    directory.close()
    assert code == 2
    assert f"in use by process {os.getpid()}" in err
    assert "ssd_dir" not in err, "a tool has none"


def test_state_of_other_models_is_not_deleted_for_it(
    exported: Path, tmp_path: Path, run: Run
) -> None:
    other = open_directory(tmp_path / "ssd", model=b"\xbb" * 16)
    other.close()
    before = snapshot(other.path)
    code, _, err = run("import", exported, tmp_path / "ssd", *SIZE)
    assert code == 2
    assert f"are in use by another model ({'bb' * 8})" in err
    assert not (tmp_path / "ssd" / NAME).exists()
    assert run("import", exported, tmp_path / "ssd", "--ssd-gib", 3 * SSD_BYTES / GIB)[0] == 0
    assert snapshot(other.path) == before
    assert len(stored(tmp_path / "ssd" / NAME)) == 9


def test_salts_that_were_cleared_there_are_cleared_here(
    source: Path, target: Path, tmp_path: Path
) -> None:
    for salt in ("a", "b", "b"):
        Clearings.in_folder(source / NAME).count_salt(salt)
    path = fill(tmp_path / "other", chunks=1)
    for salt in ("a", "a", "c"):
        Clearings.in_folder(path).count_salt(salt)
    exporting.export_model(source / NAME, target / NAME)
    importing.import_model(target / NAME, path.parent)
    found = Clearings.in_folder(path)
    assert [found.of_salt(salt) for salt in "abcd"] == [2, 2, 1, 0]


def test_what_was_learned_comes_along_but_replaces_nothing(
    source: Path, target: Path, tmp_path: Path
) -> None:
    LEARNED.write(source / NAME / "learned.json")
    exporting.export_model(source / NAME, target / NAME)
    importing.import_model(target / NAME, tmp_path / "new", SSD_BYTES / GIB)
    assert (tmp_path / "new" / NAME / "learned.json").read_bytes() == LEARNED.as_bytes()
    path = fill(tmp_path / "other", chunks=1)
    (path / "learned.json").write_text("its own")
    importing.import_model(target / NAME, path.parent)
    assert (path / "learned.json").read_text() == "its own"
    (source / NAME / "learned.json").write_text("{")
    exporting.export_model(source / NAME, target / NAME)
    assert not (target / NAME / "learned.json").exists()


# Damaged, unfinished and hostile exports


def write_index(exported: Path, change: Callable[[list[Any]], None]) -> None:
    """Rewrite the index with changed lines and a digest that matches them."""
    import xxhash

    lines = [json.loads(x) for x in (exported / "index").read_text().splitlines()][:-1]
    change(lines)
    text = b"".join(json.dumps(x).encode() + b"\n" for x in lines)
    end = {"artifacts": len(lines) - 1, "xxh3": xxhash.xxh3_128_hexdigest(text)}
    (exported / "index").write_bytes(text + json.dumps(end).encode() + b"\n")


def test_good_artifacts_of_a_damaged_export_are_imported(
    exported: Path, source: Path, tmp_path: Path, run: Run
) -> None:
    """One is flipped, and those at the end of the segment were not copied."""
    segment = exported / "segment-000001"
    with segment.open("r+b") as file:
        file.seek(60_000)
        file.write(b"xx")
        file.truncate(segment.stat().st_size - 9000)
    code, out, _ = run("import", exported, tmp_path / "new", *SIZE)
    assert code == 1
    bad = [line.split()[2] for line in out.splitlines() if "BAD" in line]
    assert "its bytes do not match its checksum" in out
    assert "segment-000001 is too short" in out
    there = stored(tmp_path / "new" / NAME)
    assert there.items() < stored(source / NAME).items()
    assert len(there) + len(bad) == 9
    assert len(bad) >= 2
    exporting.export_model(source / NAME, exported)
    assert run("import", exported, tmp_path / "new")[0] == 0
    assert stored(tmp_path / "new" / NAME) == stored(source / NAME)


def test_a_missing_segment_is_named(exported: Path, tmp_path: Path, run: Run) -> None:
    (exported / "segment-000001").unlink()
    code, out, _ = run("import", exported, tmp_path / "new", *SIZE)
    assert (code, out.count("segment-000001 is missing")) == (1, 9)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda p: p.unlink(), "no export"),
        (lambda p: p.write_bytes(b""), "damaged"),
        (lambda p: p.write_bytes(p.read_bytes()[:-40]), "damaged"),
        (lambda p: p.write_bytes(p.read_bytes()[:700]), "damaged"),
        (lambda p: p.write_bytes(p.read_bytes().replace(b"dense_kv", b"densekv", 1)), "damaged"),
        (lambda p: p.write_bytes(p.read_bytes() + b"x"), "damaged"),
        (lambda p: p.write_bytes(b"[" * (1 << 20)), "damaged"),
        (lambda p: p.write_bytes(b'{"format": 2}\n'), "has format 2, this release reads 1"),
        (lambda p: (p.rename(p.with_name("x")), p.symlink_to("x")), "cannot be read"),
        (lambda p: (p.unlink(), os.mkfifo(p)), "cannot be read"),
        (lambda p: (p.unlink(), p.mkdir()), "cannot be read"),
    ],
)
def test_an_index_that_cannot_be_read_changes_nothing(
    exported: Path, tmp_path: Path, run: Run, spoil: Callable[[Path], object], complaint: str
) -> None:
    path = fill(tmp_path / "other", chunks=2, first=50)
    before = snapshot(path.parent)
    spoil(exported / "index")
    code, _, err = run("import", exported, path.parent)
    assert code == 2
    assert complaint in err
    assert snapshot(path.parent) == before


@contextmanager
def as_another_user() -> Iterator[None]:
    """Root may read what nobody may."""
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(me)


@pytest.fixture
def received(exported: Path) -> Iterator[Path]:
    """The export, and one of data-parallel engines, in a folder that everyone may enter."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        for part in ("bb" * 8, f"dp0/{NAME}"):
            shutil.copytree(exported, root / part)
        (root / "lost+found").mkdir()
        for path in root.rglob("*"):
            path.chmod(0o755)
        (root / "lost+found").chmod(0)
        yield root


@pytest.mark.parametrize("closed", ["", "bb" * 8, "dp0", f"dp0/{NAME}"])
def test_an_export_that_may_not_be_read_is_not_passed_over(received: Path, closed: str) -> None:
    with as_another_user():
        found = importing.find_exports(received)
    assert found == [(received / ("bb" * 8), ""), (received / "dp0" / NAME, "dp0")]
    (received / closed).chmod(0)
    with as_another_user(), pytest.raises(StoreError, match=r"cannot be read.*rsync --chown") as e:
        importing.find_exports(received)
    assert str(received / closed) in str(e.value)
    (received / closed).chmod(0o755)


@pytest.mark.parametrize("name", ["lock", "index"])
def test_a_file_that_may_not_be_read_is_named_with_what_to_do(received: Path, name: str) -> None:
    folder = received / ("bb" * 8)
    (folder / name).chmod(0)
    with as_another_user(), pytest.raises(StoreError, match=r"cannot be read.*rsync --chown") as e:
        importing.import_model(folder, received / "new")
    assert str(folder / name) in str(e.value)


@pytest.mark.parametrize("size", ["nan", "inf", "-1", "0", "much"])
def test_a_size_that_is_none_is_refused(
    exported: Path, tmp_path: Path, run: Run, size: str
) -> None:
    code, _, err = run("import", exported, tmp_path / "new", "--ssd-gib", size)
    assert code == 2
    assert "'--ssd-gib': expected a number from 0.001" in " ".join(err.replace("│", "").split())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("cleared", [{"no digest": 1}, {"ab": 0}, {"": 1}, {"\u00e4": 1}])
def test_cleared_salts_that_no_store_has_change_nothing(
    exported: Path, tmp_path: Path, run: Run, cleared: dict[str, int]
) -> None:
    path = fill(tmp_path / "other", chunks=2, first=50)
    before = snapshot(path.parent)
    write_index(exported, lambda lines: lines[0].update(cleared_salts=cleared))
    code, _, err = run("import", exported, path.parent)
    assert (code, snapshot(path.parent)) == (2, before)
    assert "impossible salts" in err
    Clearings.in_folder(path)  # an engine still starts


LINE = {"chunk": 0, "parent": 1, "start": 2, "end": 3, "type": 4, "size": 5, "segment": 9, "at": 10}


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("size", 60_000, "its bytes do not match"),
        ("size", (64 << 10) + 1, "malformed"),
        ("size", 1 << 40, "malformed"),
        ("end", 0, "malformed"),
        ("start", 5, "contradicts"),
        ("type", "window_swa", "malformed"),
        ("segment", 7, "segment-000007 is missing"),
        ("at", 1, "its bytes do not match"),
        ("at", 1 << 30, "too short"),
        ("at", 1 << 52, "cannot be read"),
    ],
)
def test_a_line_that_lies_is_left_out(
    exported: Path, tmp_path: Path, run: Run, field: str, value: Any, reason: str
) -> None:
    def change(lines: list[Any]) -> None:
        lies = next(x for x in lines[1:] if x[4] == "dense_kv" and x[2] == 5 * CHUNK)
        lies[LINE[field]] = value

    write_index(exported, change)
    code, out, _ = run("import", exported, tmp_path / "new", *SIZE)
    assert code == 1
    (bad,) = [line for line in out.splitlines() if "BAD" in line]
    assert reason in bad
    assert len(stored(tmp_path / "new" / NAME)) == 8


def test_a_line_that_contradicts_the_store_harms_nothing(
    exported: Path, tmp_path: Path, run: Run
) -> None:
    """It comes before a stored one in its chain, and has another place for it."""
    path = fill(tmp_path / "other", chunks=6)
    directory = open_directory(path.parent)
    directory.journal.forget([ArtifactId(key(2), KV)])
    directory.close()
    before = stored(path)

    def change(lines: list[Any]) -> None:
        second = next(x for x in lines[1:] if x[2] == CHUNK)
        second[3] += 7

    write_index(exported, change)
    code, out, _ = run("import", exported, path.parent)
    assert code == 1
    assert "contradicts" in out
    directory = open_directory(path.parent)
    directory.close()
    assert stored(path) == before


def test_a_duplicate_is_imported_once(exported: Path, tmp_path: Path, run: Run) -> None:
    write_index(exported, lambda lines: lines.extend(lines[1:]))
    code, out, _ = run("import", exported, tmp_path / "new", *SIZE, "--json")
    assert (code, json.loads(out)[0]["artifacts"], json.loads(out)[0]["present"]) == (0, 9, 9)


def test_segments_that_are_no_files_are_not_read(exported: Path, tmp_path: Path, run: Run) -> None:
    segment = exported / "segment-000001"
    segment.rename(tmp_path / "elsewhere")
    segment.symlink_to(tmp_path / "elsewhere")
    code, out, _ = run("import", exported, tmp_path / "new", *SIZE)
    assert (code, out.count("cannot be read")) == (1, 9)
    segment.unlink()
    os.mkfifo(segment)
    code, out, _ = run("import", exported, tmp_path / "new")
    assert (code, out.count("no regular file")) == (1, 9)
    (exported / "lock").unlink()
    os.mkfifo(exported / "lock")
    assert run("import", exported, tmp_path / "new")[0] == 1


def test_slots_of_other_sizes_are_refused(exported: Path, tmp_path: Path, run: Run) -> None:
    directory = open_directory(tmp_path / "other", slots={KV: 128 << 10, SWA: 8 << 10})
    directory.close()
    code, _, err = run("import", exported, tmp_path / "other")
    assert code == 2
    assert "slots of other sizes" in err


def test_a_directory_that_cannot_be_so_large_is_refused(
    exported: Path, tmp_path: Path, run: Run
) -> None:
    code, _, err = run("import", exported, tmp_path / "new", "--ssd-gib", 1e6)
    assert code == 2
    assert "more than the file system's" in err
    write_index(exported, lambda lines: lines[0]["slot_bytes"].update(dense_kv=1 << 40))
    code, _, err = run("import", exported, tmp_path / "new", *SIZE)
    assert code == 2
    assert "does not hold one artifact" in err


places = st.tuples(st.integers(0, 9), st.integers(0, 10))
values = st.one_of(
    st.integers(), st.floats(), st.text(max_size=20), st.none(), st.lists(st.integers(), max_size=3)
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(line=st.integers(1, 9), field=st.integers(0, 10), value=values)
def test_whatever_a_line_says_the_store_stays_and_starts(
    exported: Path, tmp_path_factory: pytest.TempPathFactory, line: int, field: int, value: Any
) -> None:
    folder = tmp_path_factory.mktemp("lies")
    shutil.copytree(exported, folder / "exported")
    path = fill(folder / "ssd", chunks=2, first=50)
    before = stored(path)

    def change(lines: list[Any]) -> None:
        lines[line][field] = value

    write_index(folder / "exported", change)
    code = cli.main(["import", str(folder / "exported"), str(path.parent)])
    assert code in (0, 1, 2)
    after = stored(path)
    assert before.items() <= after.items()
    assert cli.main(["verify", str(path)]) == 0
    directory = open_directory(path.parent)
    assert (directory.warnings, directory.journal.count()) == ([], len(after))
    directory.close()
    shutil.rmtree(folder)


# Ended in the middle


_SLOW_IMPORT = """
import sys, time
from hetero_connector.tools import cli, importing
importing._BATCH_BYTES = 50_000
commit = importing._Import._commit
def slow(self):
    commit(self)
    print("batch", flush=True)
    time.sleep(0.2)
importing._Import._commit = slow
cli.main(sys.argv[1:])
"""


def test_a_killed_import_leaves_whole_artifacts_and_goes_on(
    exported: Path, source: Path, tmp_path: Path, run: Run
) -> None:
    path = fill(tmp_path / "other", chunks=2, first=50)
    before = stored(path)
    for batches in (1, 3):
        command = [sys.executable, "-c", _SLOW_IMPORT, "import", exported, path.parent]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(batches):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert run("verify", path)[0] == 0
        assert before.items() < stored(path).items()
    assert len(stored(path)) < 12
    assert run("import", exported, path.parent)[0] == 0
    assert stored(path) == {**before, **stored(source / NAME)}


_KILLED_WHILE_MAKING = """
import os, sys
from hetero_connector.store.ssd import directory, journal
from hetero_connector.tools import cli
def kill(*args, **kwargs):
    if args[-1:] != (8192,):  # the generation's file is allocated, too
        os._exit(9)
{point} = kill
sys.exit(cli.main(sys.argv[1:]))
"""
KILLED_AT = (
    "directory.GenerationFile.open",
    "directory.Journal.open",
    "journal.parse_meta",
    "os.posix_fallocate",
    "directory.sync_folder",
    "journal.Journal.clear",
)


@pytest.mark.parametrize("point", KILLED_AT)
def test_an_import_that_was_killed_while_it_made_the_directory_goes_on(
    source: Path, target: Path, tmp_path: Path, run: Run, point: str
) -> None:
    generation = FIRST.after_own_reset()
    take_over(source, generation)
    exporting.export_model(source / NAME, target / NAME)
    path = tmp_path / "new" / NAME
    script = _KILLED_WHILE_MAKING.format(point=point)
    command = [sys.executable, "-c", script, "import", target, path.parent, *map(str, SIZE)]
    assert subprocess.run(command, check=False).returncode == 9
    assert path.exists()
    code, _, err = run("import", target, path.parent, *SIZE)
    assert (code, err) == (0, "")
    assert stored(path) == stored(source / NAME)
    assert read_generation(path / GENERATION_NAME) == generation


def test_an_import_that_found_no_space_for_the_slab_goes_on(
    exported: Path, source: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = os.posix_fallocate

    def full(fd: int, offset: int, size: int) -> None:
        if size > 1 << 20:
            raise OSError(28, "No space left on device")
        allocate(fd, offset, size)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert run("import", exported, tmp_path / "new", *SIZE)[0] == 2
    assert run("import", exported, tmp_path / "new", *SIZE)[0] == 0
    assert stored(tmp_path / "new" / NAME) == stored(source / NAME)


def test_a_directory_that_lost_its_slab_is_left_to_its_engine(
    exported: Path, tmp_path: Path, run: Run
) -> None:
    path = fill(tmp_path / "other", chunks=2, first=50)
    (path / "slots.slab").unlink()
    code, _, err = run("import", exported, path.parent, *SIZE)
    assert code == 2
    assert "start its engine once" in err
    journal = Journal.open_copy(path / "journal.sqlite")
    assert journal.count() == 3
    journal.close()


def test_first_exports_that_were_interrupted_do_not_pile_up(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ExportIndex, "write", interrupt)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                exporting.export_model(source / NAME, target / NAME)
            assert len(list(segments(target / NAME))) == 1
    assert exporting.export_model(source / NAME, target / NAME).artifacts == 9
    assert len(list(segments(target / NAME))) == 1


def test_a_killed_export_leaves_the_earlier_one(source: Path, exported: Path, run: Run) -> None:
    before = snapshot(exported)
    directory = open_directory(source)
    put(directory, 7, 6, 6, KV, 0)
    directory.close()
    script = (
        "import sys, time\nfrom hetero_connector.tools import cli, export_format\n"
        "def hang(*args):\n    print('now', flush=True)\n    time.sleep(60)\n"
        "export_format.ExportIndex.write = hang\ncli.main(sys.argv[1:])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, "export", source, exported.parent], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait()
    left = snapshot(exported)
    assert {k: v for k, v in left.items() if k not in ("lock", "segment-000002")} == {
        k: v for k, v in before.items() if k != "lock"
    }
    report = exporting.export_model(source / NAME, exported)
    assert (report.artifacts, report.new_artifacts) == (10, 1)
    assert sorted(segments(exported)) == [1, 2]


def test_a_full_disk_ends_an_import_with_what_came_so_far(
    exported: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fill(tmp_path / "other", chunks=2, first=50)
    before = stored(path)
    record, calls = Journal.record, []

    def full(self: Journal, rows: Any) -> None:
        calls.append(rows)
        if len(calls) > 3:
            raise StoreError("database or disk is full")
        record(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "record", full)
        patch.setattr(importing, "_BATCH_BYTES", 1)
        code, out, _ = run("import", exported, path.parent)
    assert code == 1
    assert "stopped: database or disk is full" in out
    assert "3 artifacts imported" in out
    assert len(stored(path)) == len(before) + 3
    assert run("verify", path)[0] == 0
    assert run("import", exported, path.parent)[0] == 0


def test_a_full_disk_ends_an_export_and_leaves_the_earlier_one(
    source: Path, exported: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ExportIndex.read(exported)
    directory = open_directory(source)
    put(directory, 7, 6, 6, KV, 0)
    directory.close()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        code, _, err = run("export", source, exported.parent)
    assert code == 2
    assert "No space left" in err
    assert ExportIndex.read(exported) == before


def test_wrong_places_are_refused(source: Path, exported: Path, tmp_path: Path, run: Run) -> None:
    before = snapshot(source)
    assert "is an SSD directory" in run("export", source, source)[2]
    assert "name the ssd_dir that it is in" in run("import", exported, source / NAME)[2]
    assert "contains no export" in run("import", source, tmp_path / "new")[2]
    assert "not a directory" in run("export", tmp_path / "none", tmp_path / "x")[2]
    assert snapshot(source) == before
    other = fill(tmp_path / "more").parent
    (other / NAME).rename(other / ("cc" * 8))
    directory = open_directory(other, model=b"\xdd" * 16)
    directory.close()
    code, _, err = run("export", directory.path, exported.parent)
    assert code == 0
    shutil.copytree(exported, exported.parent / ("dd" * 8), dirs_exist_ok=True)
    code, _, err = run("export", directory.path, exported.parent)
    assert (code, "another model" in err) == (2, True)


def test_the_guides_commands_move_a_store(source: Path, tmp_path: Path, run: Run) -> None:
    """`rsync` copies the files; here `cp` does."""
    guide = Path(__file__).parents[2] / "docs/guides/move-a-store.md"
    blocks = re.findall(r"^```bash\n(.*?)^```", guide.read_text(), re.DOTALL | re.MULTILINE)
    export, copy, load = "".join(blocks).splitlines()
    store, files, new = source, tmp_path / "backup", tmp_path / "new"
    export = export.replace("/nvme/kv", str(store)).replace("/backup/kv", str(files))
    load = load.replace("/backup/kv", f"{files}-there").replace("/nvme/kv", str(new))
    load = load.replace("--ssd-gib 200", f"--ssd-gib {SSD_BYTES / GIB}")
    assert copy.startswith("rsync -a ")
    assert run(*export.split()[1:])[0] == 0
    shutil.copytree(files, f"{files}-there")
    assert run(*load.split()[1:])[0] == 0
    assert stored(new / NAME) == stored(source / NAME)
