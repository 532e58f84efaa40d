"""The Lua scripts are complete, and a wheel contains them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from ownership.directory.redis.scripts import script_named

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "ownership/directory/redis"
SCRIPTS = sorted((FOLDER / "lua").glob("*.lua"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_has_its_header_and_its_libraries(path: Path) -> None:
    lines = path.read_text().splitlines()
    for at, field in ((1, "KEYS"), (2, "ARGV")):
        assert lines[at].startswith(f"-- {field}: ")
    assert any(line.startswith("-- Returns: ") for line in lines)
    assert script_named(path.stem).keys


def test_every_script_is_package_data() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    globs = settings["tool"]["setuptools"]["package-data"]["ownership.directory.redis"]
    packaged = {path for glob in globs for path in FOLDER.glob(glob)}
    assert packaged == set((FOLDER / "lua").rglob("*.lua"))
