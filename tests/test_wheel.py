"""The wheel has what users run: no stand-ins for tests, and no plugin but the connector's."""

from __future__ import annotations

import ast
import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PUBLIC = {"hetero_connector", "ownership", "heterocache_cuda"}
FOR_A_ROUTER = {"ownership.router.ray_serve.router"}
"""Modules that nothing in the wheel imports: a router needs them, or Ray Serve names them."""
FOR_CHECKS_OF_A_GPU = {f"heterocache_cuda.{name}" for name in ("ahead_of_time", "reference")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel from a copy, because a build leaves its own folders in the source tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "results")
    shutil.copytree(ROOT, source, ignore=left_out)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True
    )
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def entry_points(wheel: zipfile.ZipFile) -> dict[str, dict[str, str]]:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(name).decode())
    return {group: dict(parser[group]) for group in parser.sections()}


def modules(wheel: zipfile.ZipFile) -> dict[str, str]:
    """Return the source of each module, by its dotted name."""
    names = [n for n in wheel.namelist() if n.endswith(".py")]
    return {
        n.removesuffix(".py").removesuffix("/__init__").replace("/", "."): wheel.read(n).decode()
        for n in names
    }


def mentioned(source: str) -> set[str]:
    """Return the dotted names that a module imports, or starts as `python -m`, or names to vLLM."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_the_wheel_has_the_public_packages_only(wheel: zipfile.ZipFile) -> None:
    roots = {name.split("/")[0] for name in wheel.namelist()}
    assert {root for root in roots if not root.endswith(".dist-info")} == PUBLIC


def test_the_wheel_names_no_plugin_but_the_connector(wheel: zipfile.ZipFile) -> None:
    assert entry_points(wheel) == {
        "console_scripts": {"heterocache": "hetero_connector.tools.cli:main"},
        "vllm.endpoint_plugins": {"heterocache": "hetero_connector.engine.api.plugin:HeteroRoutes"},
        "vllm.general_plugins": {"heterocache": "hetero_connector.engine.plugin:register"},
    }


def test_every_module_of_the_wheel_has_a_caller_in_it(wheel: zipfile.ZipFile) -> None:
    sources = modules(wheel)
    called = {point.partition(":")[0] for g in entry_points(wheel).values() for point in g.values()}
    for name, source in sources.items():
        called |= mentioned(source) - {name}
    packages = {name for name in sources if any(n.startswith(f"{name}.") for n in sources)}
    uncalled = sources.keys() - called - packages
    assert uncalled == FOR_A_ROUTER | FOR_CHECKS_OF_A_GPU


def test_types_and_scripts_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {f"{package}/py.typed" for package in PUBLIC} <= names
    scripts = {p.relative_to(ROOT).as_posix() for p in (ROOT / "ownership").rglob("*.lua")}
    assert scripts
    assert scripts <= names


def test_the_live_page_is_in_the_wheel_with_the_licence_of_its_library(
    wheel: zipfile.ZipFile,
) -> None:
    shared, own = "hetero_connector/live_page/page", "hetero_connector/engine/api/page"
    fleet = "ownership/router/page"
    paths = [path for folder in (shared, own, fleet) for path in (ROOT / folder).iterdir()]
    files = {path.relative_to(ROOT).as_posix() for path in paths}
    assert {f"{own}/main.html", f"{shared}/uPlot.LICENSE"} <= files
    assert files <= set(wheel.namelist())
