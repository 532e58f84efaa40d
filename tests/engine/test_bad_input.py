"""Errors at start are one clear message; errors while serving are counted misses.

On the real engine. The same faults without an engine: `tests/test_config.py`,
`tests/store/test_ssd_directory.py`, `tests/store/test_store_ssd.py`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from examples.checkpoints import write_checkpoint
from examples.serving import Server, kv_transfer_config
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.journal_format import meta_digest
from hetero_connector.tools.verification import verify_model
from hetero_connector.units import GIB
from tests.engine.harness import (
    CHECKPOINTS,
    Completion,
    delta,
    engine,
    forget_local,
    generate,
    make_llm,
    prompt_tokens,
    settle,
    shutdown,
)
from tests.engine.process_group import assert_gone, run_apart

pytestmark = pytest.mark.engine

MODEL = "gemma3"
PROMPT = prompt_tokens(1390, seed=61)
BOUNDARY = 1376
TIERS = {"dram_gib": 0.03, "ssd_gib": 0.06}
TOLERANCE = 1e-4

Spoil = Callable[[Path], None]


def extra(ssd_dir: Path, **more: Any) -> dict[str, Any]:
    return {**TIERS, "ssd_dir": str(ssd_dir), **more}


@pytest.fixture(scope="module")
def cold() -> Completion:
    """Return the answers of an engine without the connector."""
    with engine(MODEL) as llm:
        return generate(llm, PROMPT, max_tokens=8)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, cold: Completion) -> Path:
    """Return an ssd_dir in which an engine has stored PROMPT before it ended."""
    root = tmp_path_factory.mktemp("filled")
    with engine(MODEL, extra(root)) as llm:
        same(generate(llm, PROMPT, max_tokens=8), cold)
        settle(llm)
    return root


@pytest.fixture
def ssd_dir(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "ssd"))


def same(answer: Completion, cold: Completion) -> None:
    assert answer.tokens == cold.tokens
    assert delta(answer, cold) <= TOLERANCE


def model_directory(root: Path) -> Path:
    (path,) = (p for p in root.iterdir() if p.is_dir())
    return path


def rows(root: Path, query: str) -> list[Any]:
    journal = sqlite3.connect(model_directory(root) / "journal.sqlite")
    try:
        with journal:
            return journal.execute(query).fetchall()
    finally:
        journal.close()


def offsets(root: Path, state_type: StateType) -> list[int]:
    """Return where every artifact of a type begins in the slab."""
    journal = Journal.open_copy(model_directory(root) / "journal.sqlite")
    cut, found = journal.meta.geometry, [r for r in journal.load() if r.state_type is state_type]
    journal.close()
    return [cut.offset(state_type, row.slot) for row in found]


# At start


def refused(given: dict[str, Any], message: str) -> None:
    """Check that the engine does not start, says why, and leaves no DRAM tier behind."""
    before = arenas()
    with pytest.raises(Exception, match=message):
        shutdown(make_llm(MODEL, given))
    assert arenas() == before


def arenas() -> list[str]:
    """Return the DRAM tiers that this process has open."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(fd))
    return sorted(name for name in found if "memfd" in name)


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"dram_gib": 1e-6}, "dram_gib"),
        ({"chunk_tokens": 100}, "chunk_tokens"),
        pytest.param({"dram_gb": 1}, "dram_gb", marks=pytest.mark.slow),
        pytest.param({"ssd_gib": 1e-6}, "ssd_gib", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_value_is_refused_by_name(wrong: dict[str, Any], key: str, tmp_path: Path) -> None:
    refused(extra(tmp_path) | wrong, rf"kv_connector_extra_config\['{key}'\]")
    assert not list(tmp_path.rglob("*.slab"))


def test_an_ssd_dir_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = SsdDirectory.open

    def without_root(*arguments: Any) -> SsdDirectory:
        with as_ordinary_user():
            return opened(*arguments)

    monkeypatch.setattr(SsdDirectory, "open", without_root)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        refused(extra(Path(folder)), r"\['ssd_dir'\]: .* cannot be written .*choose a directory")


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Run as an ordinary user on this thread: root may write anywhere."""
    libc = ctypes.CDLL(None)
    mine = libc.setfsuid(65534) if os.geteuid() == 0 else None
    try:
        yield
    finally:
        if mine is not None:
            libc.setfsuid(mine)


def test_a_disk_with_too_little_space(tmp_path: Path) -> None:
    disk = shutil.disk_usage(tmp_path)
    asked = (disk.free + disk.total) / 2 / GIB
    refused(extra(tmp_path, ssd_gib=asked), r"\['ssd_gib'\]: .*GiB are free; lower ssd_gib")


def test_a_file_system_that_refuses_the_slab(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, hard))
    try:
        refused(extra(tmp_path, ssd_gib=0.3), r"\['ssd_gib'\]: .*lower ssd_gib, free space")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.rglob("*.slab"))


def change_meta(root: Path, key: str, value: str) -> None:
    """Change a value of the meta table, and its digest: it is of something else, not damaged."""
    rows(root, f"UPDATE meta SET value='{value}' WHERE key='{key}'")
    digest = meta_digest(dict(rows(root, "SELECT key, value FROM meta")))
    rows(root, f"UPDATE meta SET value='{digest}' WHERE key='digest'")


def older_format(root: Path) -> None:
    change_meta(root, "format_version", "0")


def foreign_model(root: Path) -> None:
    change_meta(root, "fingerprint", "ab" * 32)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (older_format, "has format version 0, this release writes .*; use another ssd_dir"),
        (foreign_model, "holds state of another model .*; use another ssd_dir"),
    ],
)
def test_a_directory_of_something_else_is_refused_and_kept(
    spoil: Spoil, message: str, ssd_dir: Path
) -> None:
    spoil(ssd_dir)
    before = rows(ssd_dir, "SELECT * FROM artifacts")
    assert before
    refused(extra(ssd_dir), message)
    assert rows(ssd_dir, "SELECT * FROM artifacts") == before


def test_a_wrong_key_ends_the_server_with_one_error_and_no_process(tmp_path: Path) -> None:
    log = server_ends(tmp_path, extra(tmp_path, load_deadline_s=-1))
    assert "kv_connector_extra_config['load_deadline_s']: expected a finite number" in log


def test_a_second_engine_gets_the_name_of_the_directorys_owner(
    ssd_dir: Path, cold: Completion
) -> None:
    with engine(MODEL, extra(ssd_dir)) as first:
        second = run_apart(
            "import json, sys; from tests.engine.harness import make_llm;"
            "make_llm(sys.argv[1], json.loads(sys.argv[2]))",
            MODEL,
            json.dumps(extra(ssd_dir)),
        )
        assert second.returncode != 0
        assert f"is in use by process {os.getpid()} on " in second.stdout
        restored = generate(first, PROMPT, max_tokens=8)
        assert restored.num_cached_tokens == BOUNDARY
        same(restored, cold)


def server_ends(folder: Path, given: dict[str, Any]) -> str:
    """Return the log of a server that does not start; its process group must have ended."""
    checkpoint = write_checkpoint(MODEL, CHECKPOINTS)
    server = Server(checkpoint, folder / "server.log", kv_transfer_config(given))
    with pytest.raises(RuntimeError, match="the server ended at start"):
        server.start()
    group = server.group
    assert_gone(group)
    return server.log_path.read_text()


# Between two runs


def journal_deleted(root: Path) -> None:
    (model_directory(root) / "journal.sqlite").unlink()


def journal_corrupted(root: Path) -> None:
    path = model_directory(root) / "journal.sqlite"
    path.write_bytes(path.read_bytes()[:100] + b"\xff" * 8000)


def slab_truncated(root: Path) -> None:
    os.truncate(model_directory(root) / "slots.slab", min(offsets(root, StateType.DENSE_KV)))


def slab_deleted(root: Path) -> None:
    (model_directory(root) / "slots.slab").unlink()


@pytest.mark.parametrize(
    "spoil",
    [
        journal_corrupted,
        slab_truncated,
        pytest.param(journal_deleted, marks=pytest.mark.slow),
        pytest.param(slab_deleted, marks=pytest.mark.slow),
    ],
)
def test_state_that_was_lost_between_two_runs_is_computed_again(
    spoil: Spoil, ssd_dir: Path, cold: Completion
) -> None:
    spoil(ssd_dir)
    with engine(MODEL, extra(ssd_dir)) as llm:
        answer = generate(llm, PROMPT, max_tokens=8)
        assert answer.num_cached_tokens == 0
        same(answer, cold)
        settle(llm)
        forget_local(llm)
        restored = generate(llm, PROMPT, max_tokens=8)
        assert restored.num_cached_tokens == BOUNDARY
        same(restored, cold)
    assert not verify_model(model_directory(ssd_dir)).bad
