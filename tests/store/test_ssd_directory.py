from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import re
import signal
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.generation import FIRST
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import (
    ROOT,
    ArtifactId,
    ChunkKey,
    ChunkRange,
    SlotRef,
    Tier,
)
from hetero_connector.errors import (
    ConfigError,
    FormatError,
    HeteroCacheError,
    StoreError,
    StoreInUseError,
    TransferError,
)
from hetero_connector.spec.presets import PRESETS
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog import slot_geometry
from hetero_connector.store.catalog.slot_geometry import SlotGeometry
from hetero_connector.store.catalog.slots import SlotPool
from hetero_connector.store.ssd import directory as ssd_directory
from hetero_connector.store.ssd import space as ssd_space
from hetero_connector.store.ssd.directory import SsdDirectory, ssd_geometry
from hetero_connector.store.ssd.directory_lock import DirectoryLock, is_locked
from hetero_connector.store.ssd.journal_connection import connect
from hetero_connector.store.ssd.journal_format import JournalRow
from hetero_connector.store.ssd.space import make_room
from hetero_connector.units import GIB

KV, SWA = StateType.DENSE_KV, StateType.WINDOW_SWA
SLOTS = {KV: 64 << 10, SWA: 8 << 10}
MODEL, OTHER, THIRD = b"\xaa" * 16, b"\xbb" * 16, b"\xcc" * 16
MIB = 1 << 20


def open_at(root: Path, fingerprint: bytes = MODEL, ssd_bytes: int = 4 * MIB) -> SsdDirectory:
    return SsdDirectory.open(root, fingerprint, SLOTS, ssd_bytes, {"model": "tiny"})


def row(n: int, state_type: StateType, slot: int) -> JournalRow:
    chunk = ChunkRange(ChunkKey(n.to_bytes(16, "little")), ROOT, 0, 256)
    return JournalRow(chunk, state_type, slot, 1, 4096, bytes(16), 1.0)


def disk_bytes(folder: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[SsdDirectory]:
    directory = open_at(tmp_path)
    yield directory
    directory.close()


def test_a_new_directory_is_laid_out_preallocated_and_within_its_budget(
    directory: SsdDirectory, tmp_path: Path
) -> None:
    assert directory.path == tmp_path / ("aa" * 8)
    assert {p.name for p in directory.path.iterdir()} >= {
        "lock",
        "journal.sqlite",
        "slots.slab",
    }
    (file,) = directory.files
    stat = os.fstat(file.fd)
    assert stat.st_size == file.size_bytes == directory.geometry.size_bytes
    assert stat.st_blocks * 512 >= stat.st_size
    flags = fcntl.fcntl(file.fd, fcntl.F_GETFL)
    assert bool(flags & os.O_DIRECT) == directory.direct
    assert disk_bytes(tmp_path) <= 4 * MIB
    assert file.size_bytes > 4 * MIB * 13 // 16
    assert directory.warnings == []


SIZES = st.dictionaries(
    st.sampled_from(StateType), st.integers(1, 900).map(lambda n: n * 4096), min_size=1
)


@given(slot_bytes=SIZES, room=st.integers(0, 1 << 40))
def test_slots_and_their_rows_fit_or_the_key_is_named(
    slot_bytes: Mapping[StateType, int], room: int
) -> None:
    one_of_each = sum(slot_bytes.values())
    if room < one_of_each:
        with pytest.raises(ConfigError, match="ssd_gib"):
            ssd_geometry(slot_bytes, room)
    elif room >= one_of_each * 1.25:
        geometry = ssd_geometry(slot_bytes, room)
        most_rows = max(sum(geometry.num_slots(t) for t in bundle) for bundle in geometry.bundles)
        assert geometry.size_bytes + 512 * most_rows <= room * 16 // 15
        zone = max(geometry.zone_bytes, one_of_each)
        assert geometry.size_bytes >= room / 1.25 - one_of_each - zone


def test_the_size_that_is_named_is_enough() -> None:
    with pytest.raises(ConfigError, match="ssd_gib") as refused:
        ssd_geometry(SLOTS, MIB // 32)
    (least,) = re.findall(r"at least ([0-9.e-]+)", str(refused.value))
    assert ssd_geometry(SLOTS, int(float(least) * 1.001 * (1 << 30))).count == 1


MODELS: Mapping[str, tuple[dict[str, object], int, int]] = {
    "gemma-3-27b": ({}, 38_400, 800_000),
    "deepseek-v4-flash": ({"kv_dtype": "fp8_ds_mla"}, 3_471_872, 17_000_000),
    "gpt-oss-120b": ({}, 1_242_624, 1_850_000),
    "qwen3-next-80b-a3b": ({}, 706_656, 2_700_000),
    "llama-3.1-70b": ({"tp_size": 8}, 209_664, 209_000),
}
"""The arguments of each preset; the tokens of 64 GiB in slots of equal counts, and by use."""


@pytest.mark.parametrize("name", MODELS)
def test_64_gib_hold_a_long_prompt_with_one_checkpoint(name: str) -> None:
    arguments, equally, by_use = MODELS[name]
    model = PRESETS[name](**arguments)  # type: ignore[operator]
    layout = ArtifactLayout(model, model.default_chunk_tokens())
    equal = SlotGeometry.fit(layout.max_bytes, 64 * GIB)
    assert equal.count * layout.chunk_tokens == pytest.approx(equally, abs=layout.chunk_tokens)
    pool = SlotPool(Tier.SSD, ssd_geometry(layout.max_bytes, 64 * GIB))
    after: dict[StateType, SlotRef] = {}
    for chunk in range(by_use // layout.chunk_tokens):
        for kind in model.prefix_types:
            ref = pool.take(kind, after.get(kind))
            assert ref is not None, chunk
            after[kind] = ref
    assert all(pool.take(kind) for kind in model.boundary_types)


def test_bytes_and_rows_survive_reopening(directory: SsdDirectory, tmp_path: Path) -> None:
    block = np.frombuffer(bytearray(os.urandom(8192)), np.uint8)
    at = directory.geometry.offset(SWA, 5)
    with open(directory.path / "slots.slab", "r+b") as f:
        f.seek(at)
        f.write(block.tobytes())
    directory.sync()
    directory.journal.record([row(1, SWA, 5)])
    directory.close()
    again = open_at(tmp_path)
    assert list(again.journal.load()) == [row(1, SWA, 5)]
    fd = again.files[0].fd
    assert os.path.samefile(f"/proc/self/fd/{fd}", directory.path / "slots.slab")
    assert (directory.path / "slots.slab").read_bytes()[at : at + 8192] == block.tobytes()
    again.close()


def _hold(root: Path, ready) -> None:
    open_at(root)
    ready.send(os.getpid())
    signal.pause()


@pytest.fixture
def other_engine(tmp_path: Path):
    """A process that has MODEL's directory open."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_hold, args=(tmp_path, send), daemon=True)
    process.start()
    assert receive.recv() == process.pid
    yield process
    process.kill()
    process.join()


def test_the_second_engine_is_told_who_has_it_until_that_one_is_killed(
    other_engine, tmp_path: Path
) -> None:
    with pytest.raises(StoreInUseError, match=rf"aaaa.*process {other_engine.pid} .*ssd_dir"):
        open_at(tmp_path)
    assert is_locked(tmp_path / ("aa" * 8) / "lock")
    open_at(tmp_path, OTHER, 16 * MIB).close()
    assert disk_bytes(tmp_path) <= 16 * MIB
    other_engine.kill()
    other_engine.join()
    open_at(tmp_path).close()


def test_another_models_live_directory_is_never_removed(other_engine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"ssd_gib.*in use by process {other_engine.pid}"):
        open_at(tmp_path, OTHER)
    assert (tmp_path / ("aa" * 8) / "slots.slab").exists()
    assert not list((tmp_path / ("bb" * 8)).glob("*.slab"))


def test_unused_models_go_least_recently_used_first_and_only_if_needed(tmp_path: Path) -> None:
    for age, model in ((300, OTHER), (900, MODEL)):
        folder = ssd_space.model_directory(tmp_path, model)
        folder.mkdir()
        (folder / "slots.slab").write_bytes(bytes(MIB))
        DirectoryLock.acquire(folder / "lock").release()
        os.utime(folder / "lock", (1e9, 1e9 - age))
    taken = disk_bytes(tmp_path / OTHER.hex()[:16])
    own = tmp_path / THIRD.hex()[:16]
    make_room(tmp_path, own, needed_bytes=4 * MIB, room_bytes=4 * MIB + 2 * taken, description={})
    assert (tmp_path / MODEL.hex()[:16]).exists()
    make_room(tmp_path, own, needed_bytes=4 * MIB, room_bytes=4 * MIB + taken, description={})
    assert not (tmp_path / MODEL.hex()[:16]).exists(), "the least recently used one goes"
    assert (tmp_path / OTHER.hex()[:16]).exists()
    open_at(tmp_path, THIRD, 4 * MIB).close()
    assert not (tmp_path / OTHER.hex()[:16]).exists()
    assert disk_bytes(tmp_path) <= 4 * MIB


TINY = {"model_name": "tiny", "weights": "aa", "model_dtype": "float32", "extras": {"x": "1"}}


@pytest.mark.parametrize(
    ("present", "said"),
    [
        (TINY | {"model_name": "big", "weights": "bb"}, "of the model tiny, not in use"),
        (TINY | {"model_dtype": "float16", "extras": {"x": "2", "y": "1"}}, "model_dtype, x, y)"),
        (TINY | {"model_name": "moved"}, "of this model with other settings: its configuration"),
    ],
)
def test_the_log_says_what_differs_in_a_directory_that_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, present: dict[str, Any], said: str
) -> None:
    SsdDirectory.open(tmp_path, OTHER, SLOTS, 4 * MIB, TINY).close()
    SsdDirectory.open(tmp_path, MODEL, SLOTS, 4 * MIB, present).close()
    (removed,) = (x.getMessage() for x in caplog.records if "removing" in x.getMessage())
    assert said in removed


def test_a_directory_whose_journal_cannot_be_read_is_removed_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SsdDirectory.open(tmp_path, OTHER, SLOTS, 4 * MIB, TINY).close()
    (tmp_path / OTHER.hex()[:16] / "journal.sqlite").write_bytes(b"damaged" * 1000)
    SsdDirectory.open(tmp_path, MODEL, SLOTS, 4 * MIB, TINY).close()
    assert not (tmp_path / OTHER.hex()[:16]).exists()
    assert "of a model or settings not in use" in caplog.text


def test_foreign_files_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    open_at(tmp_path, OTHER).close()
    mine = tmp_path / ("bb" * 8) / "thesis.txt"
    mine.write_text("do not delete")
    (tmp_path / "photos").mkdir()
    open_at(tmp_path, MODEL).close()
    assert mine.read_text() == "do not delete"
    assert not (mine.parent / "slots.slab").exists()
    assert (tmp_path / "photos").exists()


def tree(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_directory_that_is_not_ours_is_never_removed(tmp_path: Path) -> None:
    """Its name alone, 16 hexadecimal digits, makes no directory a model's."""
    root, elsewhere = tmp_path / "ssd", tmp_path / "elsewhere"
    foreign = root / "deadbeefdeadbeef"
    foreign.mkdir(parents=True)
    elsewhere.mkdir()
    (foreign / "lock").write_text("another program's lock, 42")
    (foreign / "generation").write_text("mine")
    for folder in (foreign, elsewhere):
        (folder / "slots.slab").write_bytes(bytes(3 * MIB))
    DirectoryLock.acquire(elsewhere / "lock").release()
    (root / "0123456789abcdef").symlink_to(elsewhere)
    before = tree(foreign), tree(elsewhere)
    open_at(root).close()
    assert (tree(foreign), tree(elsewhere)) == before
    assert (root / "0123456789abcdef").is_symlink()


@pytest.mark.parametrize("name", ["journal.sqlite", "slots.slab", "generation", "lock"])
@pytest.mark.parametrize("replace", [Path.mkdir, os.mkfifo], ids=["directory", "pipe"])
def test_what_is_no_file_in_a_files_place_is_named(tmp_path: Path, name: str, replace) -> None:
    open_at(tmp_path).close()
    path = tmp_path / ("aa" * 8) / name
    path.unlink()
    replace(path)
    with pytest.raises(ConfigError, match=rf"'ssd_dir'.*{name} is .*; remove it"):
        open_at(tmp_path)
    assert path.exists(), "it is not ours"


def test_a_slab_of_no_state_type_is_left_alone(tmp_path: Path) -> None:
    open_at(tmp_path, OTHER).close()
    foreign = tmp_path / ("bb" * 8) / "my_data.slab"
    foreign.write_text("mine")
    open_at(tmp_path, MODEL).close()
    assert tree(foreign.parent) == {foreign.name: b"mine"}


def test_a_full_disk_speaks_of_mebibytes_below_a_gibibyte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssd_space, "free_bytes", lambda root: MIB)
    with pytest.raises(ConfigError, match=r"asks for 3\.\d+ MiB more in .*, where 1 MiB are free"):
        open_at(tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_full_disk_at_start_names_the_key_and_leaves_no_slab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"ssd_gib.*GiB are free") as caught:
        open_at(tmp_path, ssd_bytes=1 << 60)
    assert caught.value.key == "ssd_gib"
    fallocate = os.posix_fallocate

    def breaks_off(fd: int, offset: int, size: int) -> None:
        if not os.readlink(f"/proc/self/fd/{fd}").endswith(".slab"):
            return fallocate(fd, offset, size)
        fallocate(fd, offset, size // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", breaks_off)
    with pytest.raises(ConfigError, match=r"ssd_gib.*GiB are free"):
        open_at(tmp_path)
    assert not list(tmp_path.rglob("*.slab"))
    monkeypatch.undo()
    with contextlib.closing(open_at(tmp_path)) as directory:
        assert directory.generations.latest == FIRST, "it shares with its fleet"


def test_a_full_tmpfs_at_start_names_the_key() -> None:
    """The filesystem itself refuses, after the check of free space has passed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, pytest.MonkeyPatch.context() as m:
        root = Path(folder)
        m.setattr(ssd_space, "free_bytes", lambda root: 1 << 62)
        with pytest.raises(ConfigError, match="ssd_gib"):
            open_at(root, ssd_bytes=1 << 45)
        assert not list(root.rglob("*.slab"))


def test_too_small_for_one_slot_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ssd_gib"):
        open_at(tmp_path / "new", ssd_bytes=SLOTS[KV])
    assert not (tmp_path / "new").exists()


def test_a_path_that_is_no_directory_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="ssd_dir") as caught:
            open_at(root)
        assert caught.value.key == "ssd_dir"


def _as_nobody(root: Path, verdict) -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        open_at(root)
    except HeteroCacheError as e:
        verdict.send((type(e).__name__, str(e)))
    else:
        verdict.send(("opened", ""))


@pytest.mark.parametrize("existing", [False, True])
def test_a_read_only_directory_names_the_key(existing: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        root = Path(folder) / "ssd"
        root.mkdir()
        os.chmod(folder, 0o755)
        if existing:
            open_at(root).close()
        os.chmod(root, 0o555)
        context = multiprocessing.get_context("fork")
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_as_nobody, args=(root, send))
        process.start()
        kind, message = receive.recv()
        process.join()
        os.chmod(root, 0o755)
    assert kind == "ConfigError"
    assert "'ssd_dir'" in message


def test_without_o_direct_it_works_buffered_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def no_direct(path, flags, *args, **kwargs):  # type: ignore[no-untyped-def]
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", no_direct)
    directory = open_at(tmp_path)
    assert not directory.direct
    assert any("O_DIRECT" in w for w in directory.warnings)
    directory.close()


def test_a_short_or_missing_slab_loses_only_its_rows(tmp_path: Path) -> None:
    directory = open_at(tmp_path)
    rows = [row(n, t, n) for t in (KV, SWA) for n in range(8)]
    cut = directory.geometry
    places = {r.id: cut.offset(r.state_type, r.slot) + SLOTS[r.state_type] for r in rows}
    directory.journal.record(rows)
    directory.close()
    size = places[rows[4].id] + 100
    os.truncate(directory.path / "slots.slab", size)
    again = open_at(tmp_path)
    kept = {r.id for r in again.journal.load()}
    assert kept == {i for i, end in places.items() if end <= size}
    assert any(f"{16 - len(kept)} artifacts lost" in w for w in again.warnings)
    assert os.path.getsize(again.path / "slots.slab") == cut.size_bytes
    again.close()
    (directory.path / "slots.slab").unlink()
    again = open_at(tmp_path)
    assert again.journal.count() == 0
    again.close()


@pytest.mark.parametrize("types", [(KV, SWA), (KV, StateType.MLA_LATENT)], ids=["two", "one"])
def test_another_capacity_keeps_what_still_lies_where_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: tuple[StateType, StateType]
) -> None:
    """The same holds for two bundles and for one of two types."""
    monkeypatch.setattr(slot_geometry, "_ZONE_BYTES", 64 << 10)
    slots = dict(zip(types, SLOTS.values(), strict=True))

    def opened(ssd_bytes: int) -> SsdDirectory:
        return SsdDirectory.open(tmp_path, MODEL, slots, ssd_bytes)

    def places(directory: SsdDirectory) -> dict[ArtifactId, int]:
        cut = directory.geometry
        return {r.id: cut.offset(r.state_type, r.slot) for r in directory.journal.load()}

    directory = opened(8 * MIB)
    zones = directory.geometry.num_zones
    used = [  # as a pool hands them out: no zone has slots of two bundles
        (kind, slot)
        for kind in types
        for slot in range(directory.geometry.num_slots(kind))
        if directory.geometry.zone_of(kind, slot) % 2 == directory.geometry.bundle_of[kind]
    ]
    directory.journal.record(row(n, *place) for n, place in enumerate(used))
    before = places(directory)
    directory.close()
    lower = opened(4 * MIB)
    assert lower.geometry.num_zones < zones
    whole = lower.geometry.count * lower.geometry.chunk_bytes
    whole += lower.geometry.zones_bytes // lower.geometry.zone_bytes * lower.geometry.zone_bytes
    ends = {r: at + slots[r.state_type] for r, at in before.items()}
    assert places(lower) == {r: at for r, at in before.items() if ends[r] <= whole}
    assert len(places(lower)) > 10
    assert any("another size" in w for w in lower.warnings)
    assert os.path.getsize(lower.path / "slots.slab") == lower.geometry.size_bytes
    kept = places(lower)
    lower.close()
    higher = opened(16 * MIB)
    assert higher.geometry.num_zones > zones
    assert places(higher) == kept
    assert higher.warnings == []
    assert os.path.getsize(higher.path / "slots.slab") == higher.geometry.size_bytes
    higher.close()


def test_another_cut_of_the_zones_forgets_everything(tmp_path: Path) -> None:
    """A tier of less than 2 GiB has smaller zones."""
    directory = open_at(tmp_path, ssd_bytes=4 * MIB)
    directory.journal.record([row(1, KV, 0), row(2, SWA, 9)])
    directory.close()
    larger = open_at(tmp_path, ssd_bytes=64 * MIB)
    assert larger.geometry.zone_bytes != directory.geometry.zone_bytes
    assert larger.journal.count() == 0
    assert ["2 artifacts lost" in w for w in larger.warnings] == [True]
    larger.close()


def test_another_slot_size_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    directory = open_at(tmp_path)
    directory.journal.record([row(1, KV, 0)])
    directory.close()
    before = {p.name: p.stat().st_size for p in directory.path.glob("*.slab")}
    with pytest.raises(FormatError, match="chunk_tokens"):
        SsdDirectory.open(tmp_path, MODEL, {**SLOTS, KV: 4096}, 4 * MIB)
    assert {p.name: p.stat().st_size for p in directory.path.glob("*.slab")} == before
    again = open_at(tmp_path)
    assert list(again.journal.load()) == [row(1, KV, 0)]
    again.close()


def test_fingerprints_that_share_a_prefix_do_not_share_state(tmp_path: Path) -> None:
    open_at(tmp_path).close()
    with pytest.raises(FormatError, match="another model"):
        open_at(tmp_path, MODEL[:8] + b"\x00" * 8)


def test_a_damaged_journal_starts_empty_with_a_warning(tmp_path: Path) -> None:
    directory = open_at(tmp_path)
    directory.journal.record([row(1, KV, 0)])
    directory.close()
    (directory.path / "journal.sqlite").write_bytes(b"junk" * 4096)
    again = open_at(tmp_path)
    assert list(again.journal.load()) == []
    assert any("journal.corrupt-" in w for w in again.warnings)
    again.close()


@pytest.mark.parametrize("works", [0, 1], ids=["opened", "checked"])
@pytest.mark.parametrize("is_sqlites", [True, False], ids=["sqlite", "os"])
def test_a_journal_that_cannot_be_read_is_an_error_that_says_what_to_do(
    tmp_path: Path, works: int, is_sqlites: bool
) -> None:
    directory = open_at(tmp_path)
    directory.close()
    modes = list[str]()

    def bad_sector(path: Path, mode: str) -> sqlite3.Connection:
        modes.append(mode)
        if len(modes) <= works:
            return connect(path, mode)
        if not is_sqlites:
            raise OSError(errno.EIO, "disk I/O error")
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ
        raise error

    advice = f"disk I/O error.*delete {re.escape(str(directory.path))} .*another ssd_dir"
    with pytest.raises(StoreError, match=advice):
        SsdDirectory.open(tmp_path, MODEL, SLOTS, 4 * MIB, connect=bad_sector)
    open_at(tmp_path).close()


@pytest.mark.parametrize(
    "error",
    [sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, errno.EACCES, errno.EROFS],
)
def test_no_error_but_the_disks_own_says_that_a_store_should_be_deleted(
    tmp_path: Path, error: int
) -> None:
    open_at(tmp_path).close()

    def refuses(path: Path, mode: str) -> sqlite3.Connection:
        if error in (errno.EACCES, errno.EROFS):
            raise OSError(error, "refused")
        refusal = sqlite3.OperationalError("refused")
        refusal.sqlite_errorcode = error
        raise refusal

    with pytest.raises(StoreError, match="refused") as caught:
        SsdDirectory.open(tmp_path, MODEL, SLOTS, 4 * MIB, connect=refuses)
    assert "delete" not in str(caught.value)


def test_a_failed_sync_is_a_transfer_error(directory: SsdDirectory) -> None:
    read_end, write_end = os.pipe()
    with contextlib.ExitStack() as stack:
        for end in (read_end, write_end):
            stack.callback(os.close, end)
        os.dup2(read_end, directory.files[0].fd)  # a pipe cannot be synced
        with pytest.raises(TransferError, match=r"slots\.slab"):
            directory.sync()


def test_the_lock_names_its_holder_and_is_not_fooled_by_a_removed_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = DirectoryLock.acquire(path)
    assert json.loads(path.read_text())["pid"] == os.getpid()
    assert DirectoryLock.try_acquire(path) is None
    path.unlink()  # as when a directory is removed: a new file is a new lock
    second = DirectoryLock.try_acquire(path)
    assert second is not None
    lock.release()
    lock.release()
    assert is_locked(path)
    second.release()
    assert not is_locked(path)


def test_opening_waits_for_another_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_directory, "_OPEN_WAIT_S", 0.1)
    opening = DirectoryLock.acquire(tmp_path / ".lock")
    with pytest.raises(StoreInUseError, match=f"process {os.getpid()}"):
        open_at(tmp_path)
    opening.release()
    open_at(tmp_path).close()


def modes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mode & 0o777 for p in folder.rglob("*")}


@pytest.fixture
def usual_umask() -> Iterator[None]:
    """The one under which files are made that everybody can read."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("usual_umask")
def test_only_this_user_can_open_what_is_made(tmp_path: Path) -> None:
    directory = open_at(tmp_path / "ssd")
    directory.journal.record([row(1, SWA, 5)])
    assert (tmp_path / "ssd").stat().st_mode & 0o777 == 0o700
    found = modes(tmp_path / "ssd")
    assert len(found) >= 7, "the journal's WAL is there, too"
    assert set(found.values()) == {0o600, 0o700}
    assert directory.warnings == []
    directory.close()


@pytest.mark.usefixtures("usual_umask")
def test_what_others_could_open_is_closed_to_them_and_said_once(tmp_path: Path) -> None:
    open_at(tmp_path).close()
    model = tmp_path / ("aa" * 8)
    model.chmod(0o755)
    (tmp_path / ".lock").chmod(0o644)
    (model / "journal.corrupt-1").touch()
    (model / "notes.txt").touch()
    for path in model.iterdir():
        path.chmod(0o644)
    directory = open_at(tmp_path)
    assert len(directory.warnings) == 1
    assert "other users could open" in directory.warnings[0]
    directory.close()
    assert modes(tmp_path) == {
        name: mode if name.endswith("notes.txt") else mode & 0o700
        for name, mode in modes(tmp_path).items()
    }
    assert modes(tmp_path)[f"{model.name}/notes.txt"] == 0o644
    again = open_at(tmp_path)
    assert again.warnings == []
    again.close()


@pytest.mark.parametrize("name", ["slots.slab", "journal.sqlite", "journal.sqlite-wal", "lock"])
def test_a_symbolic_link_in_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    open_at(tmp_path).close()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path = tmp_path / ("aa" * 8) / name
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    with pytest.raises(ConfigError, match=r"ssd_dir.*remove it"):
        open_at(tmp_path)
    assert victim.read_bytes() == b"precious"


def test_a_symbolic_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ssd").mkdir()
    (tmp_path / "ssd" / ("aa" * 8)).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="ssd_dir"):
        open_at(tmp_path / "ssd")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_root_that_others_can_write_to_is_warned_of(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    directory = open_at(tmp_path)
    assert ["other users can write to" in warning for warning in directory.warnings] == [True]
    directory.close()
    tmp_path.chmod(0o1777)  # as /tmp: nobody removes what is another's
    directory = open_at(tmp_path)
    assert directory.warnings == []
    directory.close()


def test_the_directory_itself_is_synced_as_an_entry_of_its_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a power cut right after the first start may lose it with all it holds."""
    synced: list[str] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    open_at(tmp_path / "ssd").close()
    assert str(tmp_path / "ssd") in synced
    assert str(tmp_path / "ssd" / ("aa" * 8)) in synced
