"""Build wheel and sdist into `dist`, check them, and write what they bring along as an SBOM.

    python scripts/build_package.py

Needs build, twine and cyclonedx-bom: `make package` installs them into an environment of their own.
The SBOM (CycloneDX, JSON) lists what `pip install heterocache[redis]` installs. vLLM and NIXL are
the user's choice, so they are not in it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
_ALLOWED = ("hetero_connector/", "ownership/", "cuda/", "heterocache.egg-info/")
_TOP = {"LICENSE", "PKG-INFO", "README.md", "CHANGELOG.md", "SECURITY.md", "MANIFEST.in"}
_TOP |= {"pyproject.toml", "setup.cfg"}


def main() -> int:
    """Build, check, and name what was written."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        _copy_tracked(source)
        _run(sys.executable, "-m", "build", "--quiet", "--outdir", str(DIST), str(source))
        (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
        _run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
        _check_sdist(sdist, wheel)
        _write_sbom(wheel, Path(folder) / "installed")
    for path in sorted(DIST.iterdir()):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")
    return 0


def _copy_tracked(target: Path) -> None:
    """Copy the files of the repository: a build leaves its own folders in the tree."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in found.stdout.splitlines():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)


def _check_sdist(sdist: Path, wheel: Path) -> None:
    """Raise SystemExit if the sdist has what it should not, or lacks a file of the wheel."""
    with tarfile.open(sdist) as archive:
        names = {x.name.partition("/")[2] for x in archive.getmembers() if x.isfile()}
    extra = {x for x in names if x not in _TOP and not x.startswith(_ALLOWED)}
    packed = {x for x in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in x}
    missing = packed - {x.removeprefix("cuda/") for x in names}
    if extra or missing:
        raise SystemExit(f"{sdist.name} has {sorted(extra)} too much and lacks {sorted(missing)}")


def _write_sbom(wheel: Path, environment: Path) -> None:
    """Install the wheel into a new environment, use it, and list what is there."""
    venv.create(environment, with_pip=True)
    python = environment / "bin/python"
    quiet = ("--quiet", "--disable-pip-version-check")
    _run(str(python), "-m", "pip", "install", *quiet, f"{wheel}[redis]")
    _run(str(environment / "bin/heterocache"), "--version")
    path = DIST / "heterocache.cdx.json"
    tool = (sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible")
    _run(*tool, "--pyproject", str(ROOT / "pyproject.toml"), "-o", str(path), str(python))
    document = json.loads(path.read_text())
    tools = {"pip", "setuptools", "wheel"}
    document["components"] = [x for x in document["components"] if x["name"] not in tools]
    refs = {x["bom-ref"] for x in (document["metadata"]["component"], *document["components"])}
    document["dependencies"] = [x for x in document["dependencies"] if x["ref"] in refs]
    path.write_text(json.dumps(document, indent=2) + "\n")
    names = {x["name"] for x in document["components"]}
    if not {"numpy", "redis", "xxhash"} <= names:
        raise SystemExit(f"{path.name} lacks requirements of the package: {sorted(names)}")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
