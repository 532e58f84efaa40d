"""Prints a decision as a table: every candidate with its cost by term, the choice marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.decision import RestoreCandidate, RestoreDecision

_HEADER = (
    "", "boundary", "resume", "load MB", "queue ms", "load ms", "compute ms", "stall ms",
    "hbm ms", "total ms", "",
)  # fmt: skip
_NEAR = 3
"""Candidates shown on either side of the choice when the table is shortened."""


def explain(decision: RestoreDecision, max_rows: int | None = None) -> str:
    """Return the decision as a table, one candidate a line, and a summary, for a terminal.

    `max_rows`: show about so many candidates at most: those around the choice, and others spread
    evenly, with a line that counts the rest. None: show all.
    """
    candidates = decision.candidates()
    shown = _shown(candidates, max_rows)
    lines = aligned([_HEADER, *(_row(candidates[i]) for i in shown)])
    left_out = len(candidates) - len(shown)
    if left_out:
        lines.append(f"{left_out} more candidates are not shown")
    return "\n".join([*lines, "", *_summary(decision)])


def _summary(decision: RestoreDecision) -> list[str]:
    plan, predicted = decision.plan, decision.predicted
    if plan is None:
        choice = "restore nothing"
    else:
        replay = f", compute from {plan.resume_tokens} again" if plan.replay_tokens else ""
        choice = f"restore {len(plan.chunks)} chunks up to token {plan.boundary}{replay}"
    return [
        f"choice: {choice}",
        f"actions: {', '.join(decision.actions)}",
        f"predicted time to first token: {_ms(predicted.ttft_s)} ms, "
        f"{_ms(decision.nothing.ttft_s)} ms without restoring",
        f"reuse benefit: {_ms(decision.reuse_benefit_s)} ms",
    ]


def _row(candidate: RestoreCandidate) -> tuple[str, ...]:
    terms = candidate.terms
    return (
        "*" if candidate.chosen else "",
        str(candidate.boundary) if candidate.load_bytes else "nothing",
        str(candidate.resume_tokens),
        _megabytes(candidate.load_bytes),
        *(_ms(seconds) for seconds in terms),
        _ms(terms.total_s),
        "" if candidate.in_time else "too slow",
    )


def _megabytes(load_bytes: Mapping[Tier, int]) -> str:
    return " + ".join(f"{n / 1e6:.1f} {tier.value}" for tier, n in load_bytes.items()) or "-"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _shown(candidates: Sequence[RestoreCandidate], max_rows: int | None) -> list[int]:
    """The indices of the candidates to print, in order."""
    count = len(candidates)
    if max_rows is None or count <= max_rows:
        return list(range(count))
    chosen = next(i for i, candidate in enumerate(candidates) if candidate.chosen)
    near = {*range(chosen - _NEAR, chosen + _NEAR + 1), 0, count - 1}
    step = -(-count // max(1, max_rows - len(near)))
    return sorted({i for i in near if 0 <= i < count} | set(range(0, count, step)))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: right-aligned columns, a rule under the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
