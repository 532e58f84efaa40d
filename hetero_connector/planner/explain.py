"""Prints a decision: what is done, in words, then a table of every way and why it is not taken."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.cost_model import CostTerms
from hetero_connector.planner.decision import RestoreCandidate, RestoreDecision
from hetero_connector.units import size_text

_TIER_NAMES = {Tier.DRAM: "DRAM", Tier.SSD: "SSD", Tier.PEER: "a peer"}
_REASONS = {
    "queue_s": "waits longer",
    "load_s": "loads longer",
    "stall_s": "delays decodes",
    "hbm_s": "holds more memory",
}
_WIDTH = 80
_NEGLIGIBLE = 0.01
"""Terms that are at most this share of each total have no column."""


def explain(decision: RestoreDecision, max_rows: int | None = None) -> str:
    """Return the decision in words and as a table, the cheapest way first, for a terminal.

    `max_rows`: about the most ways to show: the cheapest, the choice, and computing everything,
    with a line that counts the rest. None: show all.
    """
    # Among equals the choice comes first.
    ways = sorted(decision.candidates(), key=lambda x: (x.terms.total_s, not x.chosen))
    chosen = next(way for way in ways if way.chosen)
    shown = ways[:max_rows]
    shown += [w for w in ways[len(shown) :] if w.chosen or not w.load_bytes]
    lines = aligned(_table(decision, shown, chosen), left={"how", "lost because it"})
    if len(shown) < len(ways):
        lines.append(f"{len(ways) - len(shown)} more are not shown")
    caption = "Every way, the cheapest first, in milliseconds. `*` is taken."
    words = [textwrap.fill(x, _WIDTH, break_on_hyphens=False) for x in _in_words(decision, chosen)]
    return "\n".join([*words, "", caption, "", *lines])


def _in_words(decision: RestoreDecision, chosen: RestoreCandidate) -> list[str]:
    considered = decision.considered
    prompt, local = considered.pricing.prompt_tokens, considered.local_tokens
    lines = [f"The engine itself has {local:,} tokens."] if local else []
    seconds, without = _duration(chosen.terms.ttft_s), _duration(decision.nothing.ttft_s)
    if decision.plan is not None:
        words = f"Load {chosen.boundary - local:,} of {prompt:,} tokens"
        words += f" from {_sources(chosen.load_bytes)}"
        if replayed := chosen.boundary - chosen.resume_tokens:
            words += f", compute {replayed:,} of them again to rebuild windows"
        if rest := prompt - chosen.boundary:
            words += f", compute the last {rest:,}"
        return [
            *lines,
            f"{words}: {seconds} to the first token.",
            f"Computing all of them would take {without}.",
        ]
    others = [way for way in decision.candidates() if not way.chosen]
    lines.append(f"Compute all {prompt - local:,} tokens: {seconds} to the first token.")
    if not others:
        if considered.boundaries is None:
            return [*lines, "Nothing is stored that this prompt begins with."]
        stored = f"{considered.boundaries.ends[-1]:,.0f} tokens of it are stored"
        return [*lines, f"{stored}, but there is no boundary at which it can resume."]
    best = min(others, key=lambda way: way.terms.total_s)
    return [
        *lines,
        f"Loading {best.boundary - local:,} of them would take {_duration(best.terms.ttft_s)}.",
    ]


def _table(
    decision: RestoreDecision, ways: Sequence[RestoreCandidate], chosen: RestoreCandidate
) -> list[Sequence[str]]:
    terms = [
        name
        for name in CostTerms._fields
        if name in ("load_s", "compute_s")
        or any(getattr(w.terms, name) > _NEGLIGIBLE * w.terms.total_s for w in ways)
    ]
    header = ("tokens", "how", *(name.removesuffix("_s") for name in terms), "total")
    rows: list[Sequence[str]] = [(*header, "lost because it")]
    for way in ways:
        seconds = [getattr(way.terms, name) for name in terms]
        reason = "" if way.chosen else _why_lost(decision, way, chosen)
        cells = (*map(_ms, seconds), _ms(way.terms.total_s), reason)
        mark = "* " if way.chosen else ""
        rows.append((f"{mark}{way.boundary:,}", _how(way), *cells))
    return rows


def _how(way: RestoreCandidate) -> str:
    if not way.load_bytes:
        return "recompute"
    load = f"load {'+'.join(tier.value for tier in way.load_bytes)}"
    replayed = way.boundary - way.resume_tokens
    return f"{load}, replay {replayed:,}" if replayed else load


def _why_lost(decision: RestoreDecision, way: RestoreCandidate, chosen: RestoreCandidate) -> str:
    """Complete the sentence: it lost because it ..."""
    if not way.in_time:
        return "is staged too late"
    if not decision.by_cost:
        return "is not what `planner` asks for"
    more = {n: getattr(way.terms, n) - getattr(chosen.terms, n) for n in CostTerms._fields}
    largest = max(more, key=more.__getitem__)
    if more[largest] <= 0:
        return "restores less"
    if largest != "compute_s":
        return _REASONS[largest]
    tokens = chosen.resume_tokens - way.resume_tokens
    is_again = way.boundary >= chosen.boundary
    return f"computes {tokens:,} {'again' if is_again else 'more'}"


def _sources(load_bytes: Mapping[Tier, int]) -> str:
    return " and ".join(f"{_TIER_NAMES[tier]} ({size_text(n)})" for tier, n in load_bytes.items())


def _duration(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.{0 if seconds >= 1 else 1}f}"


def aligned(rows: Sequence[Sequence[str]], left: Collection[str] = ()) -> list[str]:
    """Return the lines of a table: a rule under the header, right-aligned columns.

    `left`: the headers of left-aligned columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_left = [name in left for name in rows[0]]
    lines = [
        "  ".join(
            cell.ljust(width) if at_left else cell.rjust(width)
            for cell, width, at_left in zip(row, widths, is_left, strict=True)
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
