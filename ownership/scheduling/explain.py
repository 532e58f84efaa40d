"""Prints a decision as a table: every candidate with its price by term, the choice marked."""

from __future__ import annotations

from hetero_connector.planner.explain import aligned
from ownership.scheduling.decision import PlacementCandidate, PlacementDecision

_HEADER = (
    "", "action", "decode at", "prefill at", "reads from", "resume", "queue ms", "compute ms",
    "network ms", "restore ms", "decode ms", "interference ms", "copies ms", "roles ms",
    "total ms",
)  # fmt: skip


def explain(decision: PlacementDecision, max_rows: int | None = None) -> str:
    """Return the decision as a table and a summary, the cheapest candidate first.

    `max_rows`: longest table; the choice is always in it. None: all candidates.
    """
    # Among equals the choice comes first.
    candidates = sorted(decision.candidates(), key=lambda x: (x.terms.total_s, not x.chosen))
    shown = candidates[:max_rows]
    shown += [x for x in candidates[len(shown) :] if x.chosen]
    lines = aligned([_HEADER, *map(_row, shown)])
    if len(shown) < len(candidates):
        lines.append(f"{len(candidates) - len(shown)} more candidates are not shown")
    return "\n".join([*lines, "", *_summary(decision)])


def _summary(decision: PlacementDecision) -> list[str]:
    placement, terms = decision.placement, decision.predicted
    workers = f"decode at {placement.decode_worker}"
    if placement.prefill_worker != placement.decode_worker:
        workers += f", prefill at {placement.prefill_worker}"
    if placement.source_worker is not None:
        workers += f", reading from {placement.source_worker}"
    lines = [
        f"step: {decision.step.prompt_tokens} tokens",
        f"choice: {placement.action}, {workers}",
        f"predicted time to first token: {_ms(terms.ttft_s)} ms",
    ]
    return lines + ([f"refused: {decision.refusal.reason}"] if decision.refusal else [])


def _row(candidate: PlacementCandidate) -> tuple[str, ...]:
    placement, terms = candidate.placement, candidate.terms
    return (
        "*" if candidate.chosen else "",
        placement.action,
        placement.decode_worker,
        placement.prefill_worker,
        placement.source_worker or "-",
        str(candidate.resume_tokens),
        *map(_ms, terms),
        _ms(terms.total_s),
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
