"""The rules of packages: their imports, and the size of files."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hetero_connector"


def files_in(folder: str) -> list[Path]:
    """Return the Python files in a folder of the repository, at any depth."""
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"{folder} has no Python files: name the folder that has them now"
    return found


SOURCES = [*files_in("hetero_connector"), *files_in("ownership")]
MAX_LINES = 500
LONG = {"hetero_connector/store/catalog/catalog.py": 840}
"""The one lock of the store: every call that holds it is in one file."""

ONLY_IN = {
    "vllm": (
        "hetero_connector/engine/",
        "hetero_connector/connector.py",
    ),
    "nixl": ("hetero_connector/transfer/",),
    "redis": ("ownership/directory/redis/",),
    "fastapi": ("hetero_connector/engine/api/",),
    "opentelemetry": (
        "hetero_connector/engine/api/server_spans.py",
        "hetero_connector/engine/scheduler/spans.py",
        "ownership/router/spans.py",
    ),
    "starlette": (
        "hetero_connector/engine/api/",
        "hetero_connector/live_page/",
        "ownership/router/",
    ),
    "uvicorn": ("ownership/router/",),
    "aiohttp": ("ownership/router/",),
    "ray": ("ownership/router/ray_serve/router.py",),
    "zmq": ("ownership/router/view/event_reader.py",),
    "prometheus_client": ("hetero_connector/engine/", "ownership/router/"),
    "torch": ("hetero_connector/engine/", "hetero_connector/connector.py"),
}
BELOW = {
    "spec": {"spec"},
    "artifacts": {"artifacts", "spec"},
    "transfer": {"transfer"},
    "store": {"store", "transfer", "artifacts", "spec"},
    "planner": {"planner", "artifacts", "spec"},
}
"""Packages that each package may import. All may import single files (errors, metrics, ...)."""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def numbered_imports(path: Path) -> list[tuple[int, str]]:
    """Return the line and the name of each module that a file imports."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{relative(path)}:{node.lineno}: import by the full name"
            found.append((node.lineno, node.module or ""))
    return found


def imports(path: Path) -> list[str]:
    return [name for _, name in numbered_imports(path)]


def test_heavy_libraries_are_imported_only_where_allowed() -> None:
    found = [
        f"{relative(path)}:{line} imports {name}"
        for path in SOURCES
        for line, name in numbered_imports(path)
        if (allowed := ONLY_IN.get(name.split(".")[0])) and not relative(path).startswith(allowed)
    ]
    assert not found, "\n".join(found)


def test_dependencies_point_down() -> None:
    packages = {p.name for p in PACKAGE.iterdir() if p.is_dir()}
    found = []
    for path in SOURCES:
        package = path.relative_to(ROOT).parts[1]
        above = packages - BELOW.get(package, packages)
        for line, name in numbered_imports(path):
            parts = name.split(".")
            if parts[0] == "hetero_connector" and len(parts) > 1 and parts[1] in above:
                found.append(f"{relative(path)}:{line} imports {name}")
    assert not found, "\n".join(found)


def test_nothing_imports_the_command_line() -> None:
    for path in SOURCES:
        if not relative(path).startswith("hetero_connector/tools/"):
            assert not any(n.startswith("hetero_connector.tools") for n in imports(path)), path


def test_only_the_command_line_and_the_simulator_draw_on_a_terminal() -> None:
    """An engine's process must not load what only people at a terminal need."""
    for path in SOURCES:
        if not relative(path).startswith(("hetero_connector/tools/", "ownership/simulator/")):
            assert not {"typer", "rich"} & {x.split(".")[0] for x in imports(path)}, path


def test_spans_are_not_loaded_by_an_engine_that_makes_none() -> None:
    path = PACKAGE / "engine/scheduler/spans.py"
    at_the_top = [x for x in ast.parse(path.read_text()).body if isinstance(x, ast.ImportFrom)]
    assert not any((x.module or "").startswith("opentelemetry") for x in at_the_top)
    users = [x for x in SOURCES if "hetero_connector.engine.api.server_spans" in imports(x)]
    assert [relative(x) for x in users] == ["hetero_connector/engine/api/plugin.py"]


def test_the_two_sides_of_the_connector_share_only_messages() -> None:
    """They run in different processes; `engine/startup` alone builds both."""
    sides = {side: f"hetero_connector.engine.{side}" for side in ("scheduler", "worker", "startup")}
    for side in ("scheduler", "worker"):
        others = tuple(name for other, name in sides.items() if other != side)
        for path in files_in(f"hetero_connector/engine/{side}"):
            assert not any(name.startswith(others) for name in imports(path)), relative(path)


JOINS = (
    "hetero_connector/tools/cli.py",
    "hetero_connector/tools/doctor.py",
    "hetero_connector/tools/simulation_commands.py",
    "hetero_connector/engine/startup/start.py",
)
"""The command line serves both packages; an engine joins a fleet if its configuration says so."""


def test_an_engine_by_itself_imports_nothing_of_a_fleet() -> None:
    """Only `JOINS` import `ownership`, inside functions: its requirements may not be installed."""
    for path in files_in("hetero_connector"):
        if not any(name.split(".")[0] == "ownership" for name in imports(path)):
            continue
        assert relative(path) in JOINS
        at_the_top = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ImportFrom)]
        assert not any((n.module or "").startswith("ownership") for n in at_the_top)


def test_only_its_command_imports_the_router() -> None:
    """No engine, simulator or policy may need a web framework."""
    for path in SOURCES:
        if not relative(path).startswith("ownership/router/"):
            imported = any(name.startswith("ownership.router") for name in imports(path))
            assert not imported or relative(path) == "hetero_connector/tools/cli.py", path


def test_traces_do_not_import_the_simulator() -> None:
    for path in files_in("ownership/simulator/traces"):
        ours = {n for n in imports(path) if n.startswith(("hetero_connector", "ownership"))}
        allowed = (
            *("hetero_connector.errors", "hetero_connector.containers"),
            *("ownership.simulator.traces", "ownership.decisions", "ownership.scheduling"),
        )
        assert all(name.startswith(allowed) for name in ours), relative(path)


def test_scheduling_is_pure() -> None:
    """A router and a simulator run the same policies, so these import no clock and no I/O."""
    packages = ("containers", "errors", "units", "spec", "artifacts", "planner")
    ours = [f"hetero_connector.{package}" for package in packages]
    ours += ["ownership.scheduling", "ownership.directory"]
    plain = {"__future__", "collections", "dataclasses", "enum", "functools", "math"}
    plain |= {
        "itertools",
        "numpy",
        "operator",
        "random",
        "typing",
    }  # random: its generators are passed in
    for path in files_in("ownership/scheduling"):
        for name in imports(path):
            mine = any(name == package or name.startswith(f"{package}.") for package in ours)
            assert mine or name.split(".")[0] in plain, f"{relative(path)} imports {name}"


def test_scheduling_draws_from_no_generator_of_its_own() -> None:
    for path in files_in("ownership/scheduling"):
        assert not re.search(r"\brandom\.(?!Random\b)|random\.Random\(", path.read_text()), path


def test_no_file_is_longer_than_the_limit() -> None:
    lines = {relative(path): len(path.read_text().splitlines()) for path in SOURCES}
    found = [
        f"{file}: {count} lines"
        for file, count in lines.items()
        if count > LONG.get(file, MAX_LINES)
    ]
    assert not found, "\n".join(found)


def test_numba_is_never_imported() -> None:
    """Importing numba before vLLM registers its kernels crashes vLLM."""
    found = [
        f"{relative(path)}:{line} imports {name}"
        for path in SOURCES
        for line, name in numbered_imports(path)
        if name.split(".")[0] == "numba"
    ]
    assert not found, "\n".join(found)


def test_every_package_says_what_it_owns() -> None:
    for package in (p for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"):
        docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
        assert docstring, f"{package.name}/__init__.py has no docstring"
        assert len(docstring) > 80, f"{package.name}/__init__.py says too little"


def test_no_file_has_a_name_without_meaning() -> None:
    for path in SOURCES:
        assert not re.search(r"utils|helpers|common|misc|manager2", path.name), path
