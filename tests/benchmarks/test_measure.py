"""References that benchmarks compare with."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import DirectDisk


def test_a_verified_limit_reads_the_whole_file_into_the_memory_given(tmp_path: Path) -> None:
    disk = DirectDisk(tmp_path, 5 << 20)
    memory = disk.memory()
    assert disk.verified_limit(memory) > 0
    assert memory.tobytes() == (tmp_path / "dd.reference").read_bytes()
    assert len(memory) == 8 << 20, "whole blocks of dd"
    disk.close()
