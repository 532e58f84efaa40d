"""The script that runs another vLLM over the installed kernels; none of this needs a network."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import with_vllm

SCRIPT = Path(with_vllm.__file__)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_network_it_says_what_it_needs_and_leaves_nothing() -> None:
    done = run("0.0.1", "pytest", PIP_NO_INDEX="1")
    assert done.returncode == 1
    assert "vllm==0.0.1" in done.stderr
    assert "needs a network" in done.stderr
    assert not list(with_vllm.CACHE.glob("0.0.1*"))
    assert not list(with_vllm.CACHE.glob("tmp*"))


@pytest.mark.parametrize("arguments", [(), ("pytest", "-q"), ("0.33", "pytest")])
def test_the_version_is_complete_and_first(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("usage:")


def test_a_wheel_is_kept_without_its_libraries_as_a_build_for_cpus(tmp_path: Path) -> None:
    wheel, tree = tmp_path / "a.whl", tmp_path / "tree"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "__version__ = '1.2.3'")
        archive.writestr("vllm/_C.abi3.so", "CUDA")
        archive.writestr(
            "vllm-1.2.3.dist-info/METADATA", "Name: vllm\nVersion: 1.2.3\n\nVersion: x"
        )
    with_vllm.extract(wheel, tree)
    assert not list(tree.rglob("*.so"))
    assert (tree / "vllm/__init__.py").exists()
    metadata = (tree / "vllm-1.2.3.dist-info/METADATA").read_text()
    assert metadata == "Name: vllm\nVersion: 1.2.3+cpu\n\nVersion: x"
    with_vllm.check("1.2.3", with_vllm.environment_of(tree))
    with pytest.raises(SystemExit, match=r"1\.2\.4 cannot be imported"):
        with_vllm.check("1.2.4", with_vllm.environment_of(tree))


def test_it_runs_on_the_installed_kernels(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    with_vllm.link_kernels(tmp_path)
    with_vllm.link_kernels(tmp_path)
    linked = {path.name for path in (tmp_path / "vllm").iterdir() if path.resolve().exists()}
    assert "_C.abi3.so" in linked
