"""`python -m benchmarks.side_by_side [NAME ...] [--json] [--quick]`: every KV connector in one run.

Each contestant runs next to an engine without a connector; both get the same requests by
turns: a prompt that is computed, hit in the engine's own cache, restored from memory; then the same
prompts after the engine was stopped. With the first model also after it was killed with kill -9,
after all processes ended, and after faults. A contestant that cannot run is a row with its error.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.goals import goal_table
from benchmarks.measure import WRITES_NOTHING, machine_line, publish, table
from benchmarks.side_by_side import report
from benchmarks.side_by_side.contestants import CONTESTANTS
from benchmarks.side_by_side.environments import ROOT
from benchmarks.side_by_side.faults import FAULTS, run_fault
from benchmarks.side_by_side.rows import Row
from benchmarks.side_by_side.work import STAGES, Case, References, measure
from examples.serving import stop_servers_on_sigterm

CASES = {
    case.model: case
    for case in (
        Case("dense-bench", 8100, 8448, blocks=853, rounds=5, streams=3),
        Case("gemma3", 8196, 8448, blocks=1365, rounds=5, restores=20, streams=3),
        Case("gptoss", 8196, 8448, blocks=1088, rounds=5, restores=20, streams=3),
        Case("deepseek_v4", 3844, 4096, blocks=2895, rounds=5, restores=20, streams=3),
        Case(
            "qwen3_next", 3844, 4096, blocks=44, rounds=5, restores=20, streams=3, chunk_tokens=640
        ),
    )
}
"""The dense prompts end inside a chunk of 256 tokens, the others just after one: with windows or
recurrent state it depends on a contestant's chunks how much of the rest is computed. Small restores
are repeated: what they add is less than the noise of one."""
_STAGES = (*STAGES, *FAULTS)
_OF_EVERY_MODEL = ("streams", "restart")
"""The other stages are run with the first model alone."""


def _stages(case: Case, asked: Iterable[str], *, is_first: bool) -> list[str]:
    """Return the stages that are run with a case, in their order."""
    of_case = _STAGES if is_first else _OF_EVERY_MODEL
    return [x for x in of_case if x in asked and (x != "streams" or case.streams)]


def _lacks(row: Row | None, case: Case, stages: Iterable[str]) -> list[str]:
    """Return what a kept row lacks of a run of the case with these stages."""
    if row is None:
        return ["all"]
    found = [stage for stage in stages if stage not in row.stages]
    pairs = {"tokens": (case.tokens, row.prompt_tokens), "rounds": (case.rounds, row.rounds)}
    return [f"{a} {what}, not {b}" for what, (a, b) in pairs.items() if a != b] + found


def _quick(case: Case) -> Case:
    """Return the case with prompts and memory of half the size, and fewer rounds."""
    return replace(
        case,
        tokens=case.tokens // 2,
        max_model_len=case.max_model_len // 2,
        blocks=case.blocks // 2,
        rounds=3,
        streams=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.side_by_side",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help=f"contestants: {', '.join(CONTESTANTS)}")
    parser.add_argument(
        "--models", nargs="+", choices=CASES, help="default: all; with --quick: dense-bench"
    )
    parser.add_argument("--tokens", type=int, help="of each prompt (default: by model)")
    parser.add_argument("--rounds", type=int, help="prompts of each model (default 5)")
    parser.add_argument("--quick", action="store_true", help="short prompts, few rounds, no files")
    parser.add_argument(
        "--stages",
        nargs="*",
        choices=_STAGES,
        default=_STAGES,
        help="after the rounds (default: all)",
    )
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="keep rows here, and run what it lacks"
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="publish the rows that are kept here, and end"
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--remove", action="store_true", help="remove the environments, and end")
    given = parser.parse_args()
    if given.remove:
        shutil.rmtree(ROOT, ignore_errors=True)
        return
    unknown = sorted(set(given.names) - CONTESTANTS.keys())
    if unknown:
        parser.error(f"no contestant {unknown[0]!r}; there are {', '.join(CONTESTANTS)}")
    if given.report:
        known = _read(given.report)
        pairs = [(name, model) for model in CASES for name in CONTESTANTS]
        kept = [known[pair] for pair in pairs if pair in known]
        if not kept:
            parser.error(f"{given.report} has no rows: --resume keeps them there")
        missing = []
        for name, model in pairs:
            stages = _stages(CASES[model], _STAGES, is_first=model == next(iter(CASES)))
            lacks = _lacks(known.get((name, model)), CASES[model], stages)
            missing += [[name, model, "; ".join(lacks)]] if lacks else []
        _publish(kept, missing, as_json=given.json, write=True)
        return
    stop_servers_on_sigterm()
    if given.quick:
        cases = [_quick(CASES[name]) for name in given.models or ["dense-bench"]]
    else:
        cases = [CASES[name] for name in given.models or CASES]
    if given.tokens:
        most = min(case.max_tokens for case in cases)
        if not 1024 <= given.tokens <= most:
            parser.error(f"--tokens is from 1024 to {most} with these models")
        cases = [replace(case, tokens=given.tokens) for case in cases]
    if given.rounds:
        cases = [replace(case, rounds=given.rounds) for case in cases]
    ROOT.mkdir(parents=True, exist_ok=True)
    done = {key: row for key, row in _read(given.resume).items() if row.error is None}

    def keep(row: Row) -> None:
        if given.resume:
            with given.resume.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    rows = []
    for case in cases:
        stages = _stages(case, given.stages, is_first=case is cases[0])
        with _folder() as shared, References(case, shared) as references:
            for name in given.names or CONTESTANTS:
                kept_row = done.get((name, case.model))
                if kept_row is not None and not _lacks(kept_row, case, stages):
                    rows.append(kept_row)
                    continue
                contestant = CONTESTANTS[name]
                with _folder() as folder:
                    row = measure(contestant, case, folder, stages, references, run_fault, keep)
                keep(row)
                rows.append(row)
                print(report.tables(rows[-1:]), "\n", file=sys.stderr, flush=True)
    partly = any((given.quick, given.names, given.models, given.tokens, given.rounds))
    partly |= set(given.stages) != set(_STAGES)
    _publish(rows, as_json=given.json, write=not partly)


def _publish(
    rows: Sequence[Row], missing: Sequence[list[str]] = (), *, as_json: bool, write: bool
) -> None:
    """Print and write the rows. `missing`: contestant, model and what a whole run has besides."""
    figures = report.figures(rows)
    goals = goal_table("side_by_side", figures)
    text = f"{machine_line()}; medians\n\n{report.tables(rows)}\n\n{goals}"
    if missing:
        text += "\n\n" + table(["missing", "model", "what"], missing)
    if write and WRITES_NOTHING not in os.environ:
        print(f"written: {report.picture(rows)}\n")
    publish(
        "side_by_side",
        text,
        figures,
        {"rows": [asdict(row) for row in rows]},
        as_json=as_json,
        write=write,
    )


@contextmanager
def _folder() -> Iterator[Path]:
    """Yield a folder that is removed afterwards, on the disk that contestants use."""
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=ROOT))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read(path: Path | None) -> dict[tuple[str, str], Row]:
    """Return the newest rows of a file by contestant and model."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    rows = [Row.from_plain(json.loads(line)) for line in lines]
    return {(row.contestant, row.model): row for row in rows}


if __name__ == "__main__":
    main()
