"""The `heterocache` command: parses arguments, calls a module, prints text or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hetero_connector.errors import HeteroCacheError, StoreError
from hetero_connector.planner.explain import explain
from hetero_connector.store.ssd.journal_format import JournalRow
from hetero_connector.tools import doctor, explanation, inspection, verification

EXIT_OK, EXIT_BAD, EXIT_UNUSABLE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run `heterocache ARGV`. 0: all is well; 1: a problem was found; 2: the input is unusable."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # `heterocache inspect DIR | head`
        sys.stdout = None
        return EXIT_OK
    except KeyboardInterrupt:
        return 130
    return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line. Reference pages are made from it."""
    parser = argparse.ArgumentParser(
        prog="heterocache", description="Examine and manage HeteroCache's state on this machine."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("doctor", help="examine this machine and advise what to change")
    command.add_argument(
        "--ssd-dir", type=Path, default=Path(), help="directory to examine (default: current)"
    )
    command.add_argument(
        "--directory", default="", metavar="URL", help="also examine the fleet's directory"
    )
    command.set_defaults(run=_doctor)

    command = commands.add_parser("inspect", help="list what is stored, by model and state type")
    command.add_argument("dir", type=Path, help="an ssd_dir, or one model's directory in it")
    command.set_defaults(run=_inspect)

    command = commands.add_parser("verify", help="read and check every stored artifact")
    command.add_argument("dir", type=Path, help="an ssd_dir, or one model's directory in it")
    command.add_argument(
        "--repair", action="store_true", help="remove bad artifacts (they become misses)"
    )
    command.set_defaults(run=_verify)

    command = commands.add_parser("calibrate", help="measure a model's costs on this machine")
    command.add_argument("model", help="a path or repository, as for vLLM")
    command.add_argument(
        "--out",
        type=Path,
        default=Path("heterocache-profile.json"),
        help="profile to write (default heterocache-profile.json)",
    )
    command.add_argument("--ssd-dir", type=Path, help="also measure restores from SSD, here")
    command.add_argument(
        "--dram-gib", type=float, default=1.0, help="size of the DRAM tier (default 1)"
    )
    command.add_argument(
        "--engine-args", type=_json_object, default={}, help="arguments for vLLM, a JSON object"
    )
    command.add_argument(
        "--connector-args",
        type=_json_object,
        default={},
        help="configuration of HeteroConnector, a JSON object",
    )
    command.set_defaults(run=_calibrate)

    command = commands.add_parser(
        "explain", help="show what would be restored of a prompt, and why"
    )
    command.add_argument("dir", type=Path, help="one model's directory in an ssd_dir")
    command.add_argument("prompt", type=Path, help="a file: a JSON list of token ids, or text")
    command.add_argument("--profile", type=Path, help="costs from `heterocache calibrate`")
    command.add_argument(
        "--in-dram", action="store_true", help="assume that all state is in DRAM, not on SSD"
    )
    length = command.add_mutually_exclusive_group()
    length.add_argument("--rows", type=int, default=24, help="candidates to show (default 24)")
    length.add_argument("--all", action="store_true", help="show every candidate")
    command.set_defaults(run=_explain)

    command = commands.add_parser("reset", help="make all engines of a fleet drop what they stored")
    command.add_argument(
        "--directory", required=True, metavar="URL", help="the fleet's directory, redis://…"
    )
    command.add_argument(
        "--wait", type=float, nargs="?", const=60.0, default=0.0, metavar="SECONDS",
        help="wait until every engine has done so (default 60); exit code 1 if one has not",
    )  # fmt: skip
    command.set_defaults(run=_reset)

    trace = commands.add_parser("trace", help="analyse recorded requests")
    actions = trace.add_subparsers(required=True, metavar="ACTION")
    command = actions.add_parser("stats", help="print prefix reuse statistics")
    command.add_argument(
        "file", type=Path, help="a trace, plain or gzip, or a directory of its files"
    )
    command.add_argument("--format", help="format of the trace (default: by its first line)")
    command.set_defaults(run=_trace_stats)

    command = commands.add_parser("simulate", help="simulate a fleet on a recorded trace")
    command.add_argument(
        "--trace", type=Path, required=True, help="a trace file, or a directory of them"
    )
    command.add_argument("--format", help="format of the trace (default: by its first line)")
    command.add_argument(
        "--fleet", type=Path, required=True, help="YAML file, see docs/internals/simulator.md"
    )
    command.add_argument(
        "--policies",
        default="ownerserve",
        metavar="A,B,...",
        help="scheduling policies to compare, e.g. ownerserve,dynamo_kv",
    )
    command.add_argument(
        "--sweep", action="append", default=[], metavar="NAME=A,B,...",
        help="values of rate, sharing, sessions, seed or workers; may be repeated",
    )  # fmt: skip
    command.add_argument(
        "--out",
        type=Path,
        required=True,
        help="output directory (an interrupted sweep in it is resumed)",
    )
    command.add_argument(
        "--processes", type=int, default=1, help="simulations to run in parallel (default 1)"
    )
    command.set_defaults(run=_simulate)

    for command in (*commands.choices.values(), *actions.choices.values()):
        if command is not trace:
            command.add_argument(
                "--json", action="store_true", help="print one JSON value to stdout"
            )
    return parser


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text}")
    return value


def _doctor(args: argparse.Namespace) -> int:
    findings = []
    for finding in doctor.examine(args.ssd_dir, args.directory):
        findings.append(finding)
        if not args.json:
            print(finding.as_text(), flush=True)
    if args.json:
        print(json.dumps([f.as_json() for f in findings], indent=2))
    failed = any(f.status is doctor.Status.FAIL for f in findings)
    return EXIT_BAD if failed else EXIT_OK


def _inspect(args: argparse.Namespace) -> int:
    reports, code = [], EXIT_OK
    try:
        for path in inspection.find_models(args.dir):
            try:
                reports.append(inspection.inspect_model(path))
            except HeteroCacheError as e:
                code = _complain(e)
    except HeteroCacheError as e:
        return _complain(e)
    if args.json:
        print(json.dumps([r.as_json() for r in reports], indent=2))
    elif reports:
        print("\n\n".join(map(inspection.as_text, reports)))
    return code


def _verify(args: argparse.Namespace) -> int:
    reports, code = [], EXIT_OK
    try:
        for path in inspection.find_models(args.dir):
            try:
                report = verification.verify_model(path, args.repair, _progress)
            except HeteroCacheError as e:
                code = _complain(e)
                continue
            reports.append(report)
            if not args.json:
                print(verification.as_text(report))
    except HeteroCacheError as e:
        return _complain(e)
    if args.json:
        print(json.dumps([dataclasses.asdict(r) for r in reports], indent=2))
    if code == EXIT_OK and any(r.bad for r in reports):
        return EXIT_BAD
    return code


def _calibrate(args: argparse.Namespace) -> int:
    if args.out.is_dir() or not args.out.parent.is_dir():  # check before minutes of measuring
        return _complain(f"--out {args.out} is not a file in a directory that exists")
    from hetero_connector.engine.calibration import calibrate  # starts vLLM
    from hetero_connector.tools.profile_plot import plot

    try:
        if args.ssd_dir is not None:
            args.ssd_dir.mkdir(parents=True, exist_ok=True)
        found = calibrate(
            args.model, args.engine_args, args.ssd_dir, args.dram_gib, args.connector_args
        )
        found.profile.write(args.out)
        picture = plot(found, args.out.with_name(f"{args.out.name}.png"))
    except ModuleNotFoundError as e:
        return _complain(f"{e.name} is missing: pip install 'heterocache[cpu]', or [gpu]")
    except (HeteroCacheError, OSError) as e:
        return _complain(e)
    if picture is None:
        _note("no plot, because matplotlib is missing: pip install 'heterocache[sim]'")
    if args.json:
        print(json.dumps(found.profile.as_json()))
    else:
        print(f"written: {args.out}" + (f", {picture}" if picture else ""))
        for name, error in found.profile.fits():
            print(f"{name}: median error {error.median:.0%}, 95% within {error.p95:.0%}")
        if found.profile.copy_engines is not None:
            print(f"pages moved by copy engines: {found.profile.copy_engines}")
    return EXIT_OK


def _explain(args: argparse.Namespace) -> int:
    try:
        directory = _one_model(args.dir)
        tokens = explanation.read_tokens(args.prompt, lambda: explanation.tokenizer(directory))
        found = explanation.decide(directory, tokens, args.profile, in_dram=args.in_dram)
    except (HeteroCacheError, ValueError) as e:
        return _complain(e)
    if args.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print(explain(found.decision, None if args.all else args.rows))
        print(found.assumptions())
    return EXIT_OK


def _reset(args: argparse.Namespace) -> int:
    from ownership.directory.fleet_reset import reset_fleet
    from ownership.directory.opening import open_directory

    try:
        directory = open_directory(args.directory)
    except ValueError as e:
        return _complain(e)
    try:
        reset = reset_fleet(directory, args.wait)
    except HeteroCacheError as e:
        return _complain(e)
    finally:
        directory.close()
    if args.json:
        print(json.dumps(dataclasses.asdict(reset)))
    else:
        print(f"generation {reset.number}")
        for name in reset.adopted:
            print(f"{name}: adopted")
        for name in reset.missing:
            print(f"{name}: not yet")
    if not (reset.adopted or reset.missing):
        _note("no engine is registered in this directory: do the engines use this URL?")
        return EXIT_BAD
    return EXIT_OK if reset.is_complete or not args.wait else EXIT_BAD


def _trace_stats(args: argparse.Namespace) -> int:
    from ownership.simulator.traces.tables import print_stats

    try:
        print_stats(args.file, args.format, as_json=args.json)
    except (HeteroCacheError, OSError) as e:
        return _complain(e)
    return EXIT_OK


def _simulate(args: argparse.Namespace) -> int:
    try:
        from ownership.simulator.sweeps.command import sweep
        from ownership.simulator.sweeps.running import Inputs

        inputs = Inputs(args.trace, args.format, args.fleet)
        policies = [name for name in args.policies.split(",") if name]
        sweep(inputs, policies, args.sweep, args.out, max(1, args.processes), as_json=args.json)
    except ImportError as e:  # msgspec raises its own where PyYAML is missing
        return _complain(f"{e.name or e} is missing: pip install 'heterocache[sim]'")
    except (HeteroCacheError, OSError) as e:
        return _complain(e)
    return EXIT_OK


def _one_model(path: Path) -> Path:
    found = inspection.find_models(path)
    if len(found) > 1:
        names = ", ".join(str(model) for model in found)
        raise StoreError(f"{path} contains several models; name one of {names}")
    return found[0]


def _progress(rows: list[JournalRow]) -> tqdm[JournalRow]:
    return tqdm(rows, unit=" artifacts", desc="verify", leave=False)


def _complain(error: Exception | str) -> int:
    _note(error)
    return EXIT_UNUSABLE


def _note(message: Exception | str) -> None:
    print(f"heterocache: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
