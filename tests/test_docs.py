"""The documents are true where a program can see it.

Links lead somewhere, commands and configurations in examples are accepted, names of keys, metrics,
tests and files exist, and generated pages are what `docs/generate.py` writes.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import yaml
from packaging.requirements import Requirement
from typer.main import get_command

from benchmarks.goals import GOALS
from hetero_connector.config import KEYS
from hetero_connector.errors import ConfigError
from hetero_connector.metrics import METRICS
from hetero_connector.tools.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("examples/**/*.md")])
PAGES.append(ROOT / "benchmarks/README.md")
MAX_README_BYTES = 8_000
MAX_DECISION_BYTES = 4_500
"""About one page."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tracked() -> tuple[str, ...]:
    """Return the files of the repository as they are now, committed or not."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(file for file in found.stdout.splitlines() if (ROOT / file).exists())


@cache
def prose(path: Path) -> str:
    """Return the page with its fenced blocks emptied: lines keep their numbers."""

    def emptied(block: re.Match[str]) -> str:
        return "\n" * block[0].count("\n")

    return re.sub(r"^```.*?^```$", emptied, path.read_text(), flags=re.DOTALL | re.MULTILINE)


def found_in(text: str, pattern: str) -> list[tuple[int, re.Match[str]]]:
    """Return the matches of a pattern, each with the line where it begins."""
    return [(text.count("\n", 0, x.start()) + 1, x) for x in re.finditer(pattern, text)]


@cache
def inline_code(path: Path) -> list[tuple[str, str]]:
    """Return each piece of code in a page's prose, after its `file:line`."""
    found = found_in(prose(path), r"`([^`\n]+)`")
    return [(f"{name(path)}:{line}", match[1]) for line, match in found]


# --- Sizes and generated pages --------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= MAX_README_BYTES


@pytest.mark.parametrize("path", sorted(DOCS.glob("decisions/0*.md")), ids=name)
def test_a_decision_is_about_one_page(path: Path) -> None:
    text = path.read_text()
    assert len(text.encode()) <= MAX_DECISION_BYTES
    for part in ("Context", "Decision", "Consequence"):
        assert f"**{part}" in text, f"no part is named {part}"


def test_ci_runs_what_the_readme_tells_to_run_first() -> None:
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"^make (\w+)", text, re.MULTILINE)
    assert targets == ["demo", "test"]
    ci = (ROOT / ".ci/run").read_text()
    for target in targets:
        assert re.search(rf"^make (--keep-going )?{target}\b", ci, re.MULTILINE), target


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date() -> None:
    outdated = [name(p) for p, text in generator().pages().items() if p.read_text() != text]
    assert not outdated, "run: .venv/bin/python docs/generate.py"


def test_the_versions_that_are_called_refused_are_refused() -> None:
    from hetero_connector.errors import UnsupportedVersionError
    from hetero_connector.supported_vllm import check_version

    page = (DOCS / "reference/compatibility.md").read_text()
    (row,) = re.findall(r"^\| (.*) \| refused \|", page, re.MULTILINE)
    versions = re.findall(r"\d+\.\d+", row)
    assert len(versions) == 2
    for version in versions:
        with pytest.raises(UnsupportedVersionError):
            check_version(f"{version}.0")
    (expected,) = re.findall(r"^\| patch releases of (.*) \| expected", page, re.MULTILINE)
    for version in expected.split(" and "):
        check_version(f"{version}.1")


def test_every_result_is_of_a_benchmark_that_exists() -> None:
    for benchmark in generator().FIGURES:
        assert benchmark in {x.stem for x in (ROOT / "benchmarks").iterdir()}, benchmark
        assert generator().results(benchmark), f"no result of {benchmark}"


def test_every_goal_of_a_benchmark_is_on_the_page_of_figures() -> None:
    for benchmark, goals in GOALS.items():
        if benchmark == "shared_prefixes":  # no result of it is kept
            continue
        assert goals.keys() <= generator().FIGURES[benchmark].keys(), benchmark


def test_a_figure_is_on_the_page_if_any_result_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sys.modules[generator().figures.__module__]
    given = {"surely_over": "Only one machine has it", "of_no_result": "None has it"}
    monkeypatch.setattr(made, "FIGURES", {"planner_grid": given})
    page = made.figures()
    assert "| `surely_over`: Only one machine has it |" in page
    assert "of_no_result" not in page


def test_machines_with_and_without_avx512_have_columns_of_their_own() -> None:
    machines = [x.machine for x in generator().results("router")]
    assert {"AMD EPYC", "AMD EPYC without AVX-512"} <= set(machines)
    assert len(machines) == len(set(machines))


def test_a_model_that_a_cpu_cannot_run_has_no_row() -> None:
    made = sys.modules[generator().figures.__module__]
    ways = dict.fromkeys(("cold", "local", "dram", "ssd"), 1.0)
    seconds = dict.fromkeys(made._TTFT_ROWS, ways)
    whole = dataclasses.replace(generator().results("restore")[0], details={"restore": seconds})
    assert "DeepSeek-V4" in made._ttft(whole)
    left = {model: ways for model in seconds if model != "deepseek_v4"}
    without = made._ttft(dataclasses.replace(whole, details={"restore": left}))
    assert "DeepSeek-V4" not in without
    assert without.count("\n") == made._ttft(whole).count("\n") - 1


def test_intervals_in_the_text_are_those_of_the_newest_campaign() -> None:
    """Tables are made from it, so a page that is up to date has its intervals and no others."""
    page = (DOCS / "evidence/simulated-fleets.md").read_text()
    file = max((ROOT / "benchmarks/results").glob("simulated_fleets-????-??-??.md"))
    interval = re.compile(r"\d+\.\d+\*{0,2} \[\d+\.\d+, \d+\.\d+\]")
    shown = set(interval.findall(page))
    assert len(shown) > 100
    assert not shown - set(interval.findall(file.read_text()))


UNPLAIN = (
    r"(?i)\b(beside|somebody|nobody|lets? go|gives? back|given back|stands? back|hand-?over"
    r"|hand-off|spills?|spilled|dear(er|est)?|untold|adrift)\b"
)
"""Words that are hard to understand, or for which the glossary has another."""


def test_the_pages_are_in_plain_words() -> None:
    found = []
    for path in PAGES:
        if path.name != "CHANGELOG.md":
            text = re.sub(r"`[^`\n]*`|\]\([^)\n]*\)", "", prose(path))
            found += [f"{name(path)}:{line}: {word[0]}" for line, word in found_in(text, UNPLAIN)]
    assert not found, "\n".join(found)


# --- Links ----------------------------------------------------------------------------------------


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", title).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


def test_every_relative_link_leads_somewhere() -> None:
    found = []
    for path in PAGES:
        for line, match in found_in(prose(path), r"\]\(([^)\s]+)\)"):
            link = match[1]
            if "://" in link or link.startswith("mailto:"):
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            if not target.exists():
                found.append(f"{name(path)}:{line}: {link}: there is no {target}")
            elif anchor and anchor not in anchors(target):
                found.append(f"{name(path)}:{line}: {link}: {name(target)} has no such heading")
    assert not found, "\n".join(found)


def test_every_page_that_code_names_exists() -> None:
    for file in tracked():
        if file.endswith((".py", ".lua", ".yml", ".toml")) and not file.startswith("tests/"):
            for line in (ROOT / file).read_text().splitlines():
                for page in re.findall(r"\bdocs/[\w/-]+\.md", line):
                    elsewhere = "://" in line  # a file of another repository
                    assert elsewhere or (ROOT / page).exists(), f"{file} names {page}"


# --- Examples -------------------------------------------------------------------------------------


class Example(NamedTuple):
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str


def examples(*languages: str) -> Iterator[Any]:
    for path in PAGES:
        text = path.read_text()
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            if found[1] in languages:
                line = text[: found.start()].count("\n") + 1
                example = Example(name(path), line, found[1], found[2])
                yield pytest.param(example, id=f"{example.page}:{line}")


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, without variables that are set for it."""
    for line in text.replace("\\\n", " ").splitlines():
        if re.fullmatch(r"\w+=\$\(.*\)", line):
            continue  # a test that runs the example runs it
        words = shlex.split(line, comments=True)
        while words and (words[0] == "export" or re.match(r"\w+=", words[0])):
            words = words[1:]
        if words:
            yield words


@pytest.mark.parametrize("example", examples("bash"))
def test_every_command_is_one_that_is_accepted(example: Example) -> None:
    for program, *arguments in commands(example.text):
        check = CHECKS.get(Path(program).name)
        assert check is not None, f"this test knows no {program!r}"
        check(arguments)


def test_a_server_on_a_cpu_is_told_its_memory() -> None:
    """Without a size vLLM wants nearly all memory, and does not start."""
    pages = [x for x in PAGES if "VLLM_CPU_OMP_THREADS_BIND=" in x.read_text()]
    assert {"README.md", "docs/start.md"} <= {name(x) for x in pages}
    for page in pages:
        for line in page.read_text().splitlines():
            if "VLLM_CPU_OMP_THREADS_BIND=" in line:
                assert "VLLM_CPU_KVCACHE_SPACE=" in line, f"{name(page)}: {line}"


def has_target(name: str) -> bool:
    makefile = (ROOT / "Makefile").read_text()
    return re.search(rf"^{name}:", makefile, re.MULTILINE) is not None


def check_make(arguments: list[str]) -> None:
    for target in arguments:
        assert has_target(target), f"no target {target}"


def check_heterocache(arguments: list[str]) -> None:
    command: Any = get_command(app)
    context = None
    while hasattr(command, "commands"):
        name, *arguments = arguments
        command, context = command.commands[name], command.make_context("heterocache", [name])
    command.make_context(name, arguments, parent=context)  # raises for a wrong argument


def check_vllm(arguments: list[str]) -> None:
    from vllm.config import KVEventsConfig

    assert arguments[0] == "serve"
    given = dict(zip(arguments[2::2], arguments[3::2], strict=True))
    assert given.keys() & {"--kv-transfer-config", "--kv-events-config"}
    if events := given.get("--kv-events-config"):
        KVEventsConfig(**json.loads(events))
    if transfer := given.get("--kv-transfer-config"):
        check_transfer_config(json.loads(transfer))


def check_python(arguments: list[str]) -> None:
    if arguments[0] != "-m":
        assert (ROOT / arguments[0]).exists(), f"there is no {arguments[0]}"
        return
    assert can_run(arguments[1]), arguments[1]


def can_run(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    is_ours = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
    return is_ours or module in ("pip", "venv", "pytest")


def check_pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"  # the arguments are checked below


def check_curl(arguments: list[str]) -> None:
    from hetero_connector.engine.api.routes import PREFIX, make_router

    (url,) = [x for x in arguments if x.startswith("localhost:")]
    if url.startswith("localhost:8080/"):  # tests/ownership/router/test_guide.py sends it
        return
    route = url.removeprefix("localhost:8000")
    has_body = "--json" in arguments or "POST" in arguments
    known = {(method, x.path) for x in make_router().routes for method in x.methods}
    if route.startswith(PREFIX):
        assert ("POST" if has_body else "GET", route) in known
    if "--json" in arguments:
        body = json.loads(arguments[arguments.index("--json") + 1])
        assert isinstance(body, dict)
        check_request(body.get("kv_transfer_params", {}))


def check_source(arguments: list[str]) -> None:
    assert arguments == [".venv/bin/activate"]


CHECKS = {
    "curl": check_curl,
    "make": check_make,
    "heterocache": check_heterocache,
    "vllm": check_vllm,
    "python": check_python,
    "python3.11": check_python,
    "pip": check_pip,
    "cd": lambda arguments: None,
    "git": lambda arguments: None,
    "docker": lambda arguments: None,
    "rsync": lambda arguments: None,
    "source": check_source,
}


def check_transfer_config(config: Mapping[str, Any]) -> None:
    assert config["kv_connector"] == "HeteroConnector"
    assert config["kv_role"] == "kv_both"
    check_extra_config(config.get("kv_connector_extra_config", {}))


DEPEND_ON_MACHINE = ("planner_profile", "peer_host")


def check_extra_config(config: Mapping[str, Any]) -> None:
    by_name = {key.name: key for key in KEYS}
    for key, value in config.items():
        assert key in by_name, f"there is no key {key!r}"
        if key not in DEPEND_ON_MACHINE:
            by_name[key].parse(key, value)


@pytest.mark.parametrize("example", examples("json"))
def test_every_json_example_is_one_that_is_accepted(example: Example) -> None:
    value = json.loads(example.text)
    if "kv_connector" in value:
        check_transfer_config(value)
    elif "loggers" in value:
        assert "vllm" in value["loggers"]  # test_tracing.py starts a server with it
    elif "kv_transfer_params" in value:
        check_request(value["kv_transfer_params"])
    else:
        check_extra_config(value)


def check_request(params: Mapping[str, Any]) -> None:
    from hetero_connector.engine.scheduler.request_params import ParamsReader

    reader = ParamsReader()
    reader.read(dict(params), "")
    assert not reader.warned


@pytest.mark.parametrize("example", examples("python"))
def test_every_python_example_runs(example: Example, tmp_path: Path) -> None:
    """With a MODEL of the reader's, only its configuration is checked."""
    if "MODEL" in example.text:
        calls = [x for x in ast.walk(ast.parse(example.text)) if isinstance(x, ast.Call)]
        given = {k.arg: k.value for call in calls for k in call.keywords if k.arg}
        names = ("kv_connector", "kv_role", "kv_connector_extra_config")
        check_transfer_config({name: ast.literal_eval(given[name]) for name in names})
        return
    code = [sys.executable, "-c", example.text]
    done = subprocess.run(code, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def envoy_filter() -> dict[str, Any]:
    """Return the router's filter in the Envoy of `deploy`."""
    envoy = yaml.safe_load((ROOT / "deploy/envoy/envoy.yaml").read_text())
    [listener] = envoy["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return dict(manager["http_filters"][0]["typed_config"])


@pytest.mark.parametrize("example", examples("yaml"))
def test_every_fleet_file_describes_a_fleet(example: Example, tmp_path: Path) -> None:
    from ownership.router.config import read_config
    from ownership.router.ray_serve.placing import replica_config
    from ownership.simulator.fleet_file import read_fleet

    fleet, *others = yaml.safe_load_all(example.text)
    assert isinstance(fleet, dict)
    if others:  # tests/ownership/router/test_kubernetes.py asks for what the role allows
        account, role, binding = (fleet, *others)
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]}
        ]
        name = role["metadata"]["name"]
        assert binding["roleRef"] == {
            "apiGroup": role["apiVersion"].partition("/")[0],
            "kind": role["kind"],
            "name": name,
        }
        # The router may have another namespace than the Service, where its role must be.
        assert binding["subjects"] == [{"kind": account["kind"], **account["metadata"]}]
        assert binding["metadata"]["namespace"] == role["metadata"]["namespace"]
        assert account["metadata"]["namespace"] != role["metadata"]["namespace"]
        return
    if "processing_mode" in fleet:  # tests/deploy/test_envoy.py runs that file
        assert fleet.items() <= envoy_filter().items()
        return
    if "deployment_config" in fleet:  # `make test-ray` runs such a deployment
        router = fleet["deployment_config"]["request_router_config"]
        file = yaml.safe_load((ROOT / "examples/ray_serve/fleet.yaml").read_text())
        [config] = file["applications"][0]["args"]["llm_configs"]
        run = config["deployment_config"]["request_router_config"]
        assert router["request_router_class"] == run["request_router_class"]
        assert router["request_router_kwargs"].keys() == run["request_router_kwargs"].keys()
        assert replica_config(router["request_router_kwargs"]).directory
        return
    path = tmp_path / "fleet.yaml"  # the example's profile exists nowhere
    if "model" not in fleet:
        path.write_text(example.text)
        assert len(read_config(path).workers) > 1
        return
    path.write_text(example.text.replace("profile: profile.json", "hardware: h200"))
    assert len(read_fleet(path).workers) > 1


def test_the_simulator_s_page_has_every_option() -> None:
    from ownership.simulator import policies
    from ownership.simulator.sweeps import running

    text = (DOCS / "internals/simulator.md").read_text()
    section = text.partition("## Policies")[2].partition("\n## ")[0]
    shown = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert shown == set(policies._OPTIONS)
    swept = re.search(r"`--sweep` takes (.*?)\.\n", section, re.DOTALL)
    assert swept is not None
    assert set(re.findall(r"`(\w+)`", swept[1])) == set(running.SWEPT)


def pip_arguments() -> set[str]:
    """Return everything that the documents and the examples tell to install with pip."""
    found: set[str] = set()
    for path in [*PAGES, *(ROOT / "examples").rglob("*.*")]:
        if path.suffix in (".md", ".sh", ".yml", ".yaml"):
            for line in re.findall(r"pip install ([^\n`]*)", path.read_text()):
                found.update(shlex.split(line, comments=True))
    return {argument for argument in found if not argument.startswith("-")}


@pytest.mark.parametrize("argument", sorted(pip_arguments()))
def test_pip_understands_what_the_documents_tell_to_install(argument: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = set(project["optional-dependencies"])
    local = re.fullmatch(r"\.(\[([\w,-]+)\])?", argument)
    if local:  # this directory, which pip takes as a path and no requirement
        assert set((local[2] or "").split(",")) - {""} <= optional
        return
    requirement = Requirement(argument)
    assert requirement.url is None or "://" in requirement.url, f"{argument} names no URL"
    if requirement.name == project["name"]:
        assert requirement.extras <= optional


# --- Names ----------------------------------------------------------------------------------------

HISTORY = ("CHANGELOG.md", "docs/decisions/")
"""Pages that may name what existed once."""


PRESENT = [path for path in PAGES if not name(path).startswith(HISTORY)]


@cache
def router_metrics() -> frozenset[str]:
    from ownership.router.metrics import RouterMetrics

    return frozenset(metric.name for metric in RouterMetrics().registry.collect())


def code_of(pages: Iterable[Path]) -> list[tuple[str, str]]:
    return [place_and_code for path in pages for place_and_code in inline_code(path)]


def test_every_metric_that_is_named_exists() -> None:
    found = []
    for place, code in code_of(PAGES):
        if re.match(r"heterocache_(?!cuda\b)[a-z]", code):  # that one is a package
            metric = re.split(r"[{ ]", code)[0].removesuffix("_total")
            if metric not in METRICS.keys() | router_metrics():
                found.append(f"{place}: there is no metric {metric}")
    assert not found, "\n".join(found)


def test_every_configuration_that_is_named_is_accepted() -> None:
    """Such as `verify: all`, or "the key `directory`"."""
    by_name = {key.name: key for key in KEYS}
    found = []
    for path in PRESENT:
        for line, match in found_in(prose(path), r"\bkeys? `(\w+)`"):
            if match[1] not in by_name:
                found.append(f"{name(path)}:{line}: there is no key {match[1]!r}")
        for line, match in found_in(prose(path), r"`(\w+): ([\w:]+)`"):
            key, value = match.groups()
            if key in by_name and value != "periodic:N":
                try:
                    by_name[key].parse(key, value)
                except ConfigError as error:
                    found.append(f"{name(path)}:{line}: {error}")
    assert not found, "\n".join(found)


def test_every_target_of_make_that_is_named_exists() -> None:
    found = [
        f"{place}: no target {word}"
        for place, code in code_of(PRESENT)
        for word in code.split()[1:]
        if code.startswith("make ") and "=" not in word and not has_target(word)
    ]
    assert not found, "\n".join(found)


def test_every_module_that_is_named_can_be_run() -> None:
    found = [
        f"{place}: there is no module {code.split()[2]}"
        for place, code in code_of(PRESENT)
        if code.startswith("python -m ") and not can_run(code.split()[2])
    ]
    assert not found, "\n".join(found)


ELSEWHERE = ("toy_proxy_server.py", "report.md")
"""A file of vLLM, and one that a command writes."""


def test_every_file_that_is_named_exists() -> None:
    found = [
        f"{place}: there is no {code}"
        for place, code in code_of(PRESENT)
        if re.fullmatch(r"[\w./-]*\w\.(py|lua|toml|md)", code)
        and code not in ELSEWHERE
        and not any(f"/{file}".endswith(f"/{code}") for file in tracked())
    ]
    assert not found, "\n".join(found)


@cache
def known_words() -> frozenset[str]:
    """Return every word of the code: identifiers, keys, values and file names."""
    found: set[str] = set()
    for file in tracked():
        if file.endswith((".py", ".lua", ".toml", "Makefile", "_venv.py")):
            found.update(re.findall(r"\w+", (ROOT / file).read_text()))
            found.update(re.findall(r"\w+", file))
    return frozenset(found)


NOT_OURS = frozenset(
    {"NixlConnector", "kv_load_failure_policy", "int8_", "fp8_", "int4_per_token_head"}
    | {"AMX_MLA", "VLLM_NIXL_SIDE_CHANNEL_HOST", "_PORT"}
    | {"no_new_privs", "CAP_SYS_PTRACE", "yama", "ptrace_scope"}
    | {"override_host", "endpointPickerRef", "InferencePool"}
)
"""Names of vLLM, of Linux, and of Envoy and its gateways."""


def test_every_name_of_the_code_exists() -> None:
    """Such as `Catalog.seal`, `begin_restore` or `LongName`; plain words are not checked."""
    found = []
    for place, code in code_of(x for x in PRESENT if x.stem != "metrics"):
        is_name = re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", code)
        if is_name and re.search(r"_|[a-z][A-Z]", code) and not code.startswith("heterocache_"):
            unknown = set(re.findall(r"\w+", code.partition("(")[0])) - known_words() - NOT_OURS
            if unknown:
                found.append(f"{place}: {code}: there is no {unknown}")
    assert not found, "\n".join(found)


@cache
def known_tests() -> frozenset[str]:
    found: set[str] = set()
    for file in tracked():
        if file.startswith("tests/") and file.endswith(".py"):
            found.add(Path(file).stem)
            found.update(re.findall(r"def (test_\w+)\(", (ROOT / file).read_text()))
    return frozenset(found)


def test_every_test_that_is_named_exists() -> None:
    found = [
        f"{place}: there is no {code}"
        for place, code in code_of(PRESENT)
        if re.fullmatch(r"test_\w+", code) and code not in known_tests()
    ]
    assert not found, "\n".join(found)


def failures() -> list[list[str]]:
    """Return the cells of each row of the tables of failures."""
    lines = (DOCS / "guides/failures.md").read_text().splitlines()
    rows = [[cell.strip() for cell in x.strip("|").split(" | ")] for x in lines if x[:2] == "| "]
    return [row for row in rows if row[0] != "failure"]


def test_every_failure_in_the_table_has_a_test() -> None:
    rows = failures()
    assert len(rows) > 50
    for what, *_, tests in rows:
        named = re.findall(r"`([\w/]+\.py)::(?:\w+::)?(test_\w+)`", tests)
        assert named, f"no test is named for: {what}"
        for file, test in named:
            source = (ROOT / "tests" / file).read_text()
            assert f"def {test}(" in source, f"{file} has no {test}, named for: {what}"
