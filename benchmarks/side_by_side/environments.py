"""Environments of the contestants below `.cache/side_by_side`, made once for a set of pins.

Each is a virtual environment over the one that runs this, so vLLM is not installed again: pip adds
what a contestant needs and finds the rest. Shared libraries that the machine lacks are taken from
Debian packages, without installing them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2] / ".cache" / "side_by_side"
_STAMP = "pins.json"


class EnvironmentFailedError(Exception):
    """The environment of a contestant could not be made."""


@dataclass(frozen=True)
class Environment:
    """A folder with a contestant's Python and libraries."""

    folder: Path
    """It is this run's own environment for a contestant that needs nothing more."""

    @property
    def bin(self) -> Path:
        """The folder of Python and of the contestant's commands."""
        return self.folder / "bin"

    @property
    def variables(self) -> dict[str, str]:
        """Variables for processes that run in this environment."""
        machine = f"{os.uname().machine}-linux-gnu"
        paths = [self.folder / part / machine for part in ("usr/lib", "lib")]
        paths = [path for path in paths if path.is_dir() and self.folder != Path(sys.prefix)]
        if not paths:
            return {}
        found = os.environ.get("LD_LIBRARY_PATH", "").split(":")
        return {"LD_LIBRARY_PATH": ":".join([*map(str, paths), *filter(None, found)])}


def run_command(*command: str, cwd: Path | None = None) -> None:
    """Run a command to its end. Raises EnvironmentFailedError with its last line."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise EnvironmentFailedError(f"{command[0]} is not installed") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise EnvironmentFailedError(f"{' '.join(command)}: {lines[-1] if lines else 'failed'}")


def environment_of(
    name: str,
    pins: tuple[str, ...],
    debian: tuple[str, ...],
    root: Path = ROOT,
    run: Callable[..., None] = run_command,
) -> Environment:
    """Return the environment `name` with these packages; make it unless it has them already.

    `pins`: pip requirements, installed without what they depend on, because that would bring
    another torch. `debian`: packages with shared libraries. Raises EnvironmentFailedError.
    """
    if not pins and not debian:
        return Environment(Path(sys.prefix))
    folder = root / name
    wanted = json.dumps({"pins": pins, "debian": debian, "python": sys.prefix})
    stamp = folder / _STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        return Environment(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    ours, theirs = (_site_packages(Path(x)) for x in (sys.prefix, folder))
    (theirs / "engine.pth").write_text(f"import site; site.addsitedir({str(ours)!r})\n")
    python = str(folder / "bin/python")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-qq", "--no-deps")
    run(*pip, "--disable-pip-version-check", *pins)
    if debian:
        try:
            run("apt-get", "download", "-qq", *debian, cwd=folder)
        except EnvironmentFailedError:
            run("apt-get", "update", "-qq")
            run("apt-get", "download", "-qq", *debian, cwd=folder)
        for package in folder.glob("*.deb"):
            run("dpkg", "-x", str(package), str(folder))
            package.unlink()
    stamp.write_text(wanted)
    return Environment(folder)


def _site_packages(prefix: Path) -> Path:
    scheme = {"base": str(prefix), "platbase": str(prefix)}
    return Path(sysconfig.get_path("purelib", "venv", vars=scheme))
