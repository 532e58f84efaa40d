"""`python -m benchmarks.by_turns BEFORE restore --quick`: compare a benchmark before and after.

It runs one benchmark of this package in the checkout `BEFORE` and in this one by turns, so that a
change of the machine's speed affects both, and prints the medians of every figure in its `--json`
line with their ratio. Make the other checkout with `git worktree add BEFORE COMMIT`. Both run with
this Python. A turn is no result of the day: this checkout writes none.

`spread` is the largest ratio of two runs of the same checkout. A smaller ratio means nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from benchmarks.measure import WRITES_NOTHING, machine_line, table

HERE = Path(__file__).parents[1]


def figures_of(checkout: Path, benchmark: list[str]) -> dict[str, float]:
    """Run the benchmark in a checkout; return its figures. Raises CalledProcessError."""
    name, *arguments = benchmark
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--json"],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout), WRITES_NOTHING: "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    values = json.loads(done.stdout.splitlines()[-1])
    return {name: float(x) for name, x in values.items() if isinstance(x, int | float)}


def compare(before: Path, benchmark: list[str], turns: int) -> tuple[str, dict[str, float]]:
    """Return a table of the figures, and their ratios after/before.

    Raises SystemExit if the checkouts have no figure in common.
    """
    runs: dict[Path, dict[str, list[float]]] = {
        checkout: defaultdict(list) for checkout in (before, HERE)
    }
    for turn in range(turns):
        for checkout in (before, HERE) if turn % 2 == 0 else (HERE, before):
            for name, value in figures_of(checkout, benchmark).items():
                runs[checkout][name].append(value)
        if not runs[before].keys() & runs[HERE].keys():
            raise SystemExit(f"{' '.join(benchmark)}: the checkouts have no figure in common")
    rows, ratios = [], {}
    for name in sorted(runs[before].keys() & runs[HERE].keys()):
        old, new = runs[before][name], runs[HERE][name]
        ratio = _ratio(statistics.median(new), statistics.median(old))
        spread = max(_ratio(max(x), min(x)) for x in (old, new))
        ratios[name] = float(f"{ratio:.4g}")
        medians = (f"{statistics.median(x):.4g}" for x in (old, new))
        rows.append([name, *medians, f"{ratio:.3f}", f"{spread:.3f}"])
    return table(["figure", "before", "after", "after/before", "spread"], rows), ratios


def _ratio(one: float, other: float) -> float:
    if one == other:
        return 1.0
    return one / other if other else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3, help="runs of each checkout (default 3)")
    parser.add_argument("before", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("benchmark", nargs=argparse.REMAINDER, help="its name and arguments")
    arguments = parser.parse_args()
    if not arguments.benchmark:
        parser.error("name a benchmark, as in: by_turns ../before restore --quick")
    if not (arguments.before / "benchmarks").is_dir():
        parser.error(f"{arguments.before} is not a checkout: it has no folder benchmarks")
    text, ratios = compare(arguments.before.resolve(), arguments.benchmark, arguments.turns)
    print(f"{' '.join(arguments.benchmark)}: {arguments.turns} turns, {machine_line()}\n\n{text}")
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
