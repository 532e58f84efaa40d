"""`heterocache trace stats`: the statistics of a trace as Markdown and as JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ownership.simulator.traces.readers import open_trace
from ownership.simulator.traces.session import Trace, Trigger
from ownership.simulator.traces.statistics import Samples, TraceStatistics, measure

REUSE_WITHIN_S = (10, 60, 300, 3600)
SHARED_BY = (1, 2, 10, 100, 1000)
_ANSWERED = {Trigger.USER: "a person", Trigger.TOOL_RESULT: "a tool", Trigger.UNKNOWN: "unknown"}


def print_stats(path: Path, format: str | None, *, as_json: bool) -> None:
    """Print the statistics of a trace file.

    Raises:
        TraceError: the file is not a trace of the format; names file, line and field.
    """
    found = measure(_with_progress(open_trace(path, format)))
    print(json.dumps(to_json(found), indent=2) if as_json else to_markdown(found))


def _with_progress(trace: Trace) -> Trace:
    """Add a progress bar, if stderr is a terminal."""
    if not sys.stderr.isatty():
        return trace
    from rich.console import Console
    from rich.progress import track

    bar = partial(track, trace, "read", console=Console(stderr=True), transient=True)
    return replace(trace, sessions=lambda: iter(bar()))


def to_markdown(found: TraceStatistics) -> str:
    """Return a heading, the caveats and three tables."""
    lines = [f"# {found.source} ({found.format}, {found.block_tokens}-token blocks)", ""]
    lines += [f"- {caveat}" for caveat in found.caveats]
    lines += [""] if found.caveats else []
    lines += _table(("figure", "value"), _totals(found))
    lines += _table(
        ("distribution", "samples", "mean", "p10", "p50", "p90", "p99", "max"),
        ((name, *_spread(samples)) for name, samples in _distributions(found) if samples.total),
    )
    lines += _table(
        ("tokens shared by", "of the distinct tokens", "of all prompt tokens"),
        _repetition(found),
    )
    return "\n".join(lines).rstrip()


def to_json(found: TraceStatistics) -> dict[str, Any]:
    """Return the figures by name, in tokens and seconds."""
    return {
        "source": found.source,
        "format": found.format,
        "block_tokens": found.block_tokens,
        "caveats": list(found.caveats),
        "sessions": found.num_sessions,
        "requests": found.num_requests,
        "span_s": found.span_s,
        "hit_tokens": found.hit_tokens,
        "hit_rate": found.hit_rate,
        "input_tokens": found.input_tokens.as_json(),
        "output_tokens": found.output_tokens.as_json(),
        "first_input_tokens": found.first_input_tokens.as_json(),
        "turns": found.turns.as_json(),
        "growth_tokens": found.growth_tokens.as_json(),
        "new_tokens": found.new_tokens.as_json(),
        "think_s": {trigger.value: s.as_json() for trigger, s in found.think_s.items()},
        "reuse_s": found.reuse_s.as_json(),
        "reuse_within": {str(s): _share(found.reuse_s, s) for s in REUSE_WITHIN_S},
        "reuse_distance_tokens": found.reuse_distance_tokens.as_json(),
        "distinct_tokens_shared_by": found.prefixes.distinct.as_json(),
        "prompt_tokens_shared_by": found.prefixes.prompt.as_json(),
        "longest_prefix_tokens": {str(k): v for k, v in found.prefixes.longest.items()},
    }


def _totals(found: TraceStatistics) -> Iterator[tuple[str, str]]:
    yield "sessions", f"{found.num_sessions:,}"
    yield "requests", f"{found.num_requests:,}"
    if found.span_s:
        yield "from first to last arrival", f"{found.span_s:,.0f} s"
        yield "arrivals per second", f"{found.num_requests / found.span_s:.3g}"
    yield "prompt tokens", f"{found.num_prompt_tokens:,}"
    yield "hit rate of an endless cache, by tokens", f"{found.hit_rate:.2%}"
    for limit_s in REUSE_WITHIN_S:
        if found.reuse_s.total:
            share = found.reuse_s.share_up_to(limit_s)
            yield f"of reused tokens, within {limit_s:,} s", f"{share:.1%}"
    for share, tokens in found.prefixes.longest.items():
        yield f"longest prefix of at least {share:.0%} of the prompts", f"{tokens:,} tokens"


def _distributions(found: TraceStatistics) -> Iterator[tuple[str, Samples]]:
    yield "prompt, tokens", found.input_tokens
    yield "answer, tokens", found.output_tokens
    yield "a session's first prompt, tokens", found.first_input_tokens
    yield "requests per session", found.turns
    yield "growth per turn, tokens", found.growth_tokens
    yield "new to the cache per turn, tokens", found.new_tokens
    for trigger, samples in found.think_s.items():
        yield f"think time before {_ANSWERED[trigger]} answers, s", samples
    yield "time since last use, s (by tokens)", found.reuse_s
    yield "distinct tokens since last use (by tokens)", found.reuse_distance_tokens


def _repetition(found: TraceStatistics) -> Iterator[tuple[str, str, str]]:
    distinct, prompt = found.prefixes.distinct, found.prefixes.prompt
    below = 0
    for limit in (*SHARED_BY, math.inf):
        shares = [s.share_up_to(limit) - s.share_up_to(below) for s in (distinct, prompt)]
        if shares[0] > 0:
            yield _prompts(below + 1, limit), f"{shares[0]:.1%}", f"{shares[1]:.1%}"
        below = int(limit) if limit < math.inf else below


def _prompts(fewest: int, most: float) -> str:
    if most == 1:
        return "1 prompt"
    if fewest == most:
        return f"{fewest:,} prompts"
    upper = f"to {most:,.0f}" if most < math.inf else "or more"
    return f"{fewest:,} {upper} prompts"


def _spread(samples: Samples) -> Iterator[str]:
    yield f"{samples.total:,.0f}"
    yield _number(samples.mean)
    for q in (10, 50, 90, 99, 100):
        yield _number(samples.percentile(q))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _share(samples: Samples, limit: float) -> float | None:
    share = samples.share_up_to(limit)
    return None if math.isnan(share) else share


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [heads, ("---", *["---:"] * (len(heads) - 1)), *rows]
    return [*(f"| {' | '.join(row)} |" for row in cells), ""]
