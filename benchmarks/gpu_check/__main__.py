"""`python -m benchmarks.gpu_check [--only CHECK] [--json]`: check the device path on one GPU."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

PASSED, FAILED, NOTHING_TO_CHECK_ON = 0, 1, 3
NEEDED = ("torch", "triton", "numpy", "psutil")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; return 0 if none failed, 1 if one did, 3 if something is missing."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        print(f"gpu_check: not installed: {', '.join(absent)}", file=sys.stderr)
        return NOTHING_TO_CHECK_ON

    from benchmarks.gpu_check import running
    from benchmarks.gpu_check.setting import FULL, SMALL, Verdict

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=running.CHECKS, help="this check; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--small", action="store_true", help="tiny sizes: speed means nothing")
    parser.add_argument("--no-files", action="store_true", help="write nothing to results/")
    parser.add_argument(
        "--dry-run", action="store_true", help="without a GPU: stand-ins and Triton's interpreter"
    )
    arguments = parser.parse_args(argv)
    lacking = None if arguments.dry_run else running.missing()
    if lacking:
        print(f"gpu_check: {lacking}", file=sys.stderr)
        return NOTHING_TO_CHECK_ON
    small = arguments.small or arguments.dry_run
    results = running.run(
        arguments.only or list(running.CHECKS),
        SMALL if small else FULL,
        dry_run=arguments.dry_run,
        as_json=arguments.json,
        write=not (arguments.no_files or small),
    )
    failed = any(result.verdict is Verdict.FAIL for result in results.values())
    return FAILED if failed else PASSED


if __name__ == "__main__":
    sys.exit(main())
