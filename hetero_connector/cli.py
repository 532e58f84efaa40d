"""The `heterocache` command. Each subcommand's work is done in a module of its own."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from hetero_connector import doctor, inspection, verification
from hetero_connector.errors import HeteroCacheError
from hetero_connector.store.journal_format import JournalRow

EXIT_OK, EXIT_BAD, EXIT_UNUSABLE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run `heterocache ARGV`. 0: all well; 1: something is wrong; 2: wrong or unusable input."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # `heterocache inspect DIR | head`
        sys.stdout = None
        return EXIT_OK
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="heterocache", description="Look after HeteroCache's state on this machine."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("doctor", help="what this machine can do, and what to change")
    command.add_argument(
        "--ssd-dir", type=Path, default=Path(), help="directory to examine (default: this one)"
    )
    command.set_defaults(run=_doctor)

    command = commands.add_parser("inspect", help="what is stored, by model, state type and tier")
    command.add_argument("dir", type=Path, help="an ssd_dir, or one model's directory in it")
    command.set_defaults(run=_inspect)

    command = commands.add_parser("verify", help="read and check every artifact")
    command.add_argument("dir", type=Path, help="an ssd_dir, or one model's directory in it")
    command.add_argument(
        "--repair", action="store_true", help="forget the bad artifacts (they become misses)"
    )
    command.set_defaults(run=_verify)

    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="one JSON value on stdout")
    return parser


def _doctor(args: argparse.Namespace) -> int:
    findings = []
    for finding in doctor.examine(args.ssd_dir):
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


def _progress(rows: list[JournalRow]) -> tqdm[JournalRow]:
    return tqdm(rows, unit=" artifacts", desc="verify", leave=False)


def _complain(error: HeteroCacheError) -> int:
    print(f"heterocache: {error}", file=sys.stderr)
    return EXIT_UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
