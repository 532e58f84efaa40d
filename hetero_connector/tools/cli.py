"""The `heterocache` command: declares arguments, calls a module, prints text or JSON.

Each command imports its modules when it runs, so `--help` is quick and needs no extra.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from hetero_connector.errors import HeteroCacheError, StoreError
from hetero_connector.tools import engine_commands, simulation_commands
from hetero_connector.tools.command import (
    EXIT_BAD,
    EXIT_OK,
    FLEET,
    MAX_SECONDS,
    STATE,
    STATUS,
    Json,
    command,
    complain,
    confirm,
    note,
    number,
)

_DISTRIBUTION = "heterocache"
_ROWS = 12

_Row = TypeVar("_Row")
_Report = TypeVar("_Report")
_Stored = Annotated[
    Path, typer.Argument(metavar="DIR", help="An ssd_dir, or one model's directory in it.")
]

app = typer.Typer(
    help="Examine and manage HeteroCache's state on this machine.",
    epilog=STATUS,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
engine_commands.register(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `heterocache ARGV`. 0: all is well; 1: a problem was found; 2: the input is unusable."""
    try:
        app(args=argv, prog_name="heterocache")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_OK
    return EXIT_OK


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"heterocache {importlib.metadata.version(_DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


@command(app, STATE, "doctor --ssd-dir /nvme/kv", "doctor --directory redis://host:6379")
def doctor(
    ssd_dir: Annotated[Path, typer.Option(help="Directory to examine.")] = Path(),
    directory: Annotated[
        str, typer.Option(metavar="URL", help="Examine this directory of a fleet, too.")
    ] = "",
    as_json: Json = False,
) -> int:
    """Examine this machine and advise what to change."""
    from hetero_connector.tools import doctor as examiner

    findings = []
    for finding in examiner.examine(ssd_dir, directory):
        findings.append(finding)
        if not as_json:
            print(finding.as_text(), flush=True)
    if as_json:
        print(json.dumps([f.as_json() for f in findings], indent=2))
    failed = any(f.status is examiner.Status.FAIL for f in findings)
    return EXIT_BAD if failed else EXIT_OK


@command(app, STATE, "inspect /nvme/kv", "inspect /nvme/kv --json")
def inspect(dir: _Stored, as_json: Json = False) -> int:
    """List what is stored, by model and state type."""
    from hetero_connector.tools import inspection

    reports, code = [], EXIT_OK
    for path in inspection.find_models(dir):
        try:
            reports.append(inspection.inspect_model(path))
        except HeteroCacheError as e:
            code = complain(e)
    if as_json:
        print(json.dumps([r.as_json() for r in reports], indent=2))
    elif reports:
        print("\n\n".join(map(inspection.as_text, reports)))
    if code == EXIT_OK and any(r.side_files.problems for r in reports):
        return EXIT_BAD
    return code


@command(app, STATE, "verify /nvme/kv", "verify /nvme/kv --repair")
def verify(
    dir: _Stored,
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove bad artifacts; they become misses.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Read and check every stored artifact."""
    from hetero_connector.tools import inspection, verification

    tasks = [
        partial(verification.verify_model, path, repair, _progress)
        for path in inspection.find_models(dir)
    ]
    return _do_each(tasks, verification.as_text, lambda report: report.is_intact, as_json=as_json)


@command(app, STATE, "export /nvme/kv /backup/kv")
def export(
    dir: _Stored,
    target: Annotated[
        Path,
        typer.Argument(metavar="TARGET", help="A directory; a later export adds what is new."),
    ],
    as_json: Json = False,
) -> int:
    """Write what is stored to files that can be copied to another machine."""
    from hetero_connector.tools import exporting, inspection

    def target_of(path: Path) -> Path:
        part = path.parent.name if dir not in (path, path.parent) else ""
        return target / part / path.name

    tasks = [
        partial(exporting.export_model, path, target_of(path), _progress)
        for path in inspection.find_models(dir)
    ]
    return _do_each(tasks, exporting.as_text, lambda report: not report.bad, as_json=as_json)


@command(app, STATE, "import /backup/kv /nvme/kv --ssd-gib 200", name="import")
def import_(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="The TARGET of `heterocache export`.")
    ],
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="The ssd_dir of an engine.")],
    ssd_gib: Annotated[
        float | None,
        typer.Option(
            parser=number(0.001, 1e6),
            metavar="GIB",
            help="The engine's ssd_gib, if it has one: the size of a directory that is new.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Add what was exported to an SSD directory, so that its engine starts with it."""
    from hetero_connector.tools import importing

    tasks = [
        partial(importing.import_model, folder, dir / part, ssd_gib, _progress)
        for folder, part in importing.find_exports(source)
    ]
    return _do_each(tasks, importing.as_text, lambda report: report.is_complete, as_json=as_json)


def _do_each(
    tasks: Iterable[Callable[[], _Report]],
    as_text: Callable[[_Report], str],
    is_good: Callable[[_Report], bool],
    *,
    as_json: bool,
) -> int:
    """Print the report of each task; return the exit status. One that fails stops no other."""
    reports, code = list[Any](), EXIT_OK
    for task in tasks:
        try:
            report = task()
        except HeteroCacheError as e:
            code = complain(e)
            continue
        reports.append(report)
        if not as_json:
            print(as_text(report))
    if as_json:
        print(json.dumps([dataclasses.asdict(r) for r in reports], indent=2))
    if code == EXIT_OK and not all(map(is_good, reports)):
        return EXIT_BAD
    return code


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"not a JSON object: {text}")
    return value


@command(
    app,
    STATE,
    "calibrate Qwen/Qwen3-8B --out qwen.json",
    """calibrate MODEL --engine-args '{"max_model_len": 32768}'""",
)
def calibrate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A path or repository, as for vLLM.")
    ],
    out: Annotated[Path, typer.Option(help="Profile to write.")] = Path("heterocache-profile.json"),
    ssd_dir: Annotated[
        Path | None, typer.Option(help="Measure restores from SSD, too, in this directory.")
    ] = None,
    dram_gib: Annotated[
        float | None,
        typer.Option(help="Size of the DRAM tier; else that of --connector-args, or 1."),
    ] = None,
    engine_args: Annotated[
        Any,
        typer.Option(parser=_json_object, metavar="JSON", help="Arguments for vLLM, an object."),
    ] = "{}",
    connector_args: Annotated[
        Any,
        typer.Option(
            parser=_json_object, metavar="JSON", help="Keys of HeteroConnector, an object."
        ),
    ] = "{}",
    as_json: Json = False,
) -> int:
    """Measure a model's costs on this machine."""
    if out.is_dir() or not out.parent.is_dir():  # check before minutes of measuring
        return complain(f"--out {out} is not a file in a directory that exists")
    from hetero_connector.engine.calibration import calibrate as measure  # starts vLLM

    try:
        if ssd_dir is not None:
            ssd_dir.mkdir(parents=True, exist_ok=True)
        found = measure(model, engine_args, ssd_dir, dram_gib, connector_args)
        found.profile.write(out)
    except ModuleNotFoundError as e:
        return complain(f"{e.name} is missing: pip install 'heterocache[cpu]', or [gpu]")
    except (HeteroCacheError, OSError) as e:
        return complain(e)
    if as_json:
        print(json.dumps(found.profile.as_json()))
    else:
        print(f"written: {out}")
        for name, error in found.profile.fits():
            print(f"{name}: median error {error.median:.0%}, 95% within {error.p95:.0%}")
        if found.profile.copy_engines is not None:
            print(f"pages moved by copy engines: {found.profile.copy_engines}")
    return EXIT_OK


@command(app, STATE, "explain /nvme/kv/MODEL prompt.txt", "explain DIR ids.json --all --json")
def explain(
    dir: Annotated[
        Path, typer.Argument(metavar="DIR", help="One model's directory in an ssd_dir.")
    ],
    prompt: Annotated[
        Path,
        typer.Argument(
            metavar="PROMPT", help="A file with a JSON list of token ids, or with text."
        ),
    ],
    profile: Annotated[
        Path | None,
        typer.Option(help="Costs, from `heterocache calibrate`, not those that were learned."),
    ] = None,
    in_dram: Annotated[
        bool, typer.Option("--in-dram", help="Assume that all state is in DRAM, not on SSD.")
    ] = False,
    rows: Annotated[
        int | None, typer.Option(min=1, help=f"Ways to show; {_ROWS} if this is not set.")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show every way.")] = False,
    as_json: Json = False,
) -> int:
    """Show what would be restored of a prompt, and why."""
    if show_all and rows is not None:
        raise typer.BadParameter("--rows and --all exclude each other")
    from hetero_connector.planner.explain import explain as as_text
    from hetero_connector.tools import explanation

    try:
        directory = _one_model(dir)
        tokens = explanation.read_tokens(prompt, lambda: explanation.tokenizer(directory))
        found = explanation.decide(directory, tokens, profile, in_dram=in_dram)
    except ValueError as e:  # the prompt is neither text nor token ids
        return complain(e)
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print(as_text(found.decision, None if show_all else rows or _ROWS))
        print(f"\n{found.assumptions()}")
    return EXIT_OK


@command(
    app,
    FLEET,
    "reset --directory redis://host:6379 --wait 60",
    "reset --directory redis://host:6379 --yes",
)
def reset(
    directory: Annotated[str, typer.Option(metavar="URL", help="The fleet's directory, redis://…")],
    wait: Annotated[
        float | None,
        typer.Option(
            parser=number(0, MAX_SECONDS),
            metavar="SECONDS",
            help="Wait so long until every engine has done so; exit status 1 if one has not.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")] = False,
    as_json: Json = False,
) -> int:
    """Make all engines of a fleet drop what they stored. It asks first."""
    from hetero_connector.config_values import without_password
    from ownership.directory.fleet_reset import reset_fleet
    from ownership.directory.opening import MEMORY_URL, open_directory

    if directory == MEMORY_URL:
        return complain(f"{MEMORY_URL} is a directory within one process: no engine uses this one")
    try:
        opened = open_directory(directory)
    except ValueError as e:
        return complain(e)
    try:
        fleet = without_password(directory)
        if not (yes or confirm(f"Forget everything that is stored by the fleet at {fleet}?")):
            return complain("nothing was done")
        done = reset_fleet(opened, wait or 0.0)
    finally:
        opened.close()
    has_engines = bool(done.adopted or done.missing)
    if as_json:
        print(json.dumps(dataclasses.asdict(done)))
    elif has_engines:
        print(f"generation {done.number}")
        for name in done.adopted:
            print(f"{name}: adopted")
        for name in done.missing:
            print(f"{name}: not yet")
    if not has_engines:
        note(
            f"no engine is registered in this directory: do the engines use this URL? One that "
            f"registers later follows the reset (generation {done.number})"
        )
        return EXIT_BAD
    return EXIT_OK if done.is_complete or wait is None else EXIT_BAD


@command(
    app,
    FLEET,
    "router --config router.yaml",
    "router --config router.yaml --processes 4",
)
def router(
    config: Annotated[Path, typer.Option(help="YAML file, see docs/guides/router.md.")],
    processes: Annotated[
        int, typer.Option(min=1, max=256, help="Processes on the port; one for each core.")
    ] = 1,
) -> int:
    """Serve one address in front of many workers."""
    try:
        from ownership.router.serving import serve

        serve(config, processes)
    except ImportError as e:
        return complain(f"{e.name or e} is missing: pip install 'heterocache[router]'")
    return EXIT_OK


def _one_model(path: Path) -> Path:
    from hetero_connector.tools import inspection

    found = inspection.find_models(path)
    if len(found) > 1:
        names = ", ".join(str(model) for model in found)
        raise StoreError(f"{path} contains several models; name one of {names}")
    return found[0]


def _progress(rows: Sequence[_Row]) -> Iterable[_Row]:
    """Return the rows, with a bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        return rows
    from rich.console import Console
    from rich.progress import track

    return track(rows, "artifacts", console=Console(stderr=True), transient=True)


simulation_commands.register(app)

if __name__ == "__main__":
    sys.exit(main())
