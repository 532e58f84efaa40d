"""Tables, figures and a picture of the rows. It measures nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.measure import RESULTS, rounded, table
from benchmarks.side_by_side.contestants import CONTESTANTS
from benchmarks.side_by_side.rows import Row

OURS = "heterocache"
_LARGE_BYTES = 50_000_000
"""A smaller restore takes mostly its fixed costs."""
_HOW = ("memory", "restart", "kill9", "reboot")


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the figures that the rows have.

    `added_over_best_rival`: what a restore from memory adds to the own prefix hit, over the best of
    the others that answered right; the worst model. There is none if one of them added nothing: the
    machine was too noisy. `dram_over_memcpy`: the same over a copy of the useful bytes; the worst
    model with large restores, none if a copy was disturbed. `restore_fixed_ms`: what it adds
    beyond the copy; the worst model with small restores. `restore_fixed_error_ms`: half of its 95 %
    confidence interval, which is the noise of the machine. `ssd_over_limit`: bandwidth after a
    restart over the device's limit; the worst model with large restores. `ssd_over_verified_limit`:
    over the limit into memory as idle as the engine's, with checksums. `rivals_run`: others that
    restored and answered right with at least one model. `wrong_answers_ours`: cases and faults.
    `unanswered_ours`: faults that ended in an error or a hang, and models that did not run to the
    end.
    """
    ours = {row.model: row for row in rows if row.contestant == OURS}
    rivals = [row for row in rows if _is_rival(row) and row.has_restored]
    found: dict[str, float] = {}
    pairs = []
    for model, row in ours.items():
        added = [r.added_s for r in rivals if r.model == model and r.added_s is not None]
        if row.added_s is not None and added:
            pairs.append((row.added_s, min(added)))
    if pairs and all(min(pair) > 0.0 for pair in pairs):
        found["added_over_best_rival"] = max(own / best for own, best in pairs)
    measured = [row for row in ours.values() if row.added_s is not None]
    large = [row for row in measured if row.useful_bytes >= _LARGE_BYTES]
    small = [row for row in measured if row.useful_bytes < _LARGE_BYTES]
    over_copies = [row.memcpy_ratio for row in large]
    known = [ratio for ratio in over_copies if ratio is not None]
    if known and len(known) == len(over_copies):
        found["dram_over_memcpy"] = max(known)
    if small:
        fixed = {(row.added_s or 0.0) - row.seconds["memcpy"]: row for row in small}
        found["restore_fixed_ms"] = 1e3 * max(fixed)
        error_s = fixed[max(fixed)].added_error_s
        if error_s is not None:
            found["restore_fixed_error_ms"] = 1e3 * error_s
    for limit in ("limit", "verified limit"):
        ratios = [x for x in (row.over_disk_limit(limit) for row in large) if x is not None]
        if ratios:
            found[f"ssd_over_{limit.replace(' ', '_')}"] = min(ratios)
    found["rivals_run"] = len({row.contestant for row in rivals})
    found["wrong_answers_ours"] = sum(len(row.wrong) for row in ours.values())
    found["unanswered_ours"] = sum(row.unanswered for row in ours.values())
    return rounded(found)


def tables(rows: Sequence[Row]) -> str:
    """Return a table of times for each model, and one of the rest."""
    models = list(dict.fromkeys(row.model for row in rows))
    parts = []
    for model in models:
        of_model = [row for row in rows if row.model == model]
        size = max(row.useful_bytes for row in of_model) / 1e6
        tokens = max(row.prompt_tokens for row in of_model)
        parts.append(f"{model}: prompts of {tokens:,} tokens, {size:.1f} MB useful\n")
        parts[-1] += _times(of_model) + "\n\n" + _costs(of_model)
    faults = [row for row in rows if row.faults]
    if faults:
        parts.append(_faults(faults))
    errors = [row for row in rows if row.error]
    if errors:
        shown = [[row.contestant, row.model, row.error] for row in errors]
        parts.append(table(["did not run", "model", "why"], shown))
    versions = dict.fromkeys((row.contestant, row.version) for row in rows)
    parts.append(table(["contestant", "version"], [list(pair) for pair in versions]))
    return "\n\n".join(parts)


def picture(rows: Sequence[Row]) -> Path:
    """Draw what a restore from memory and after a restart adds, a panel for each model.

    Return the path, `results/side_by_side-<date>.png`.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    models = list(dict.fromkeys(row.model for row in rows))
    figure, axes = plt.subplots(1, len(models), figsize=(4.4 * len(models), 2.6), squeeze=False)
    for model, axis in zip(models, axes[0], strict=True):
        values = {
            f"{row.contestant}, {how}": 1e3 * seconds
            for row in rows
            if row.model == model
            for how, seconds in (("memory", row.added_s), ("restart", row.after_s.get("restart")))
            if seconds is not None and row.restored_tokens.get(how, 0) > 0
        }
        drawn = axis.barh(list(values), list(values.values()), color="#4477aa", height=0.6)
        labels = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values.values()]
        axis.bar_label(drawn, labels, padding=2, fontsize=7)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.set_title(f"{model}: added to the own hit", fontsize=9)
        axis.set_xlabel("ms", fontsize=8)
        axis.tick_params(labelsize=7)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"side_by_side-{time.strftime('%Y-%m-%d')}.png"
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    return path


def _times(rows: Iterable[Row]) -> str:
    head = ["TTFT, ms", "cold", "own hit", "memory", "added", "over memcpy"]
    head += [f"added, {how}" for how in _HOW[1:]] + ["tokens restored", "answers"]
    shown = []
    for row in rows:
        seconds = row.seconds
        line = [row.contestant]
        line += [_ms(seconds.get(name)) for name in ("cold save", "local", "memory")]
        line += [_with_error(row), _over_memcpy(row)]
        line += [_ms(row.after_s.get(how)) for how in _HOW[1:]]
        line += [_tokens(row), _answers(row)]
        shown.append(line)
    return table(head, shown)


def _costs(rows: Iterable[Row]) -> str:
    head = [
        "costs",
        "prefill",
        "decode",
        "stream",
        "agents' TTFT",
        "B/token stored",
        "useful",
        "SSD/limit",
        "verified",
    ]
    head += ["start, s", "processes", "memory, MB"]
    shown = []
    for row in rows:
        tokens = max(1, row.prompt_tokens)
        stored = None if row.stored_bytes is None else row.stored_bytes / tokens
        memory = None if row.extra_memory_bytes is None else row.extra_memory_bytes / 1e6
        line = [row.contestant, _number(row.prefill_ratio), _number(row.decode_ratio)]
        line += [_number(row.stream_ratio), _number(row.agents_ratio)]
        line += ["-" if stored is None else f"{stored:,.0f}"]
        line += [f"{row.useful_bytes / tokens:,.0f}" if row.useful_bytes else "-"]
        line += [_number(_over_disk_limit(row, x)) for x in ("limit", "verified limit")]
        line += [_number(row.start_s.get("restart"), 1)]
        line += ["-" if row.extra_processes is None else f"{row.extra_processes:+d}"]
        line += ["-" if memory is None else f"{memory:+,.0f}"]
        shown.append(line)
    return table(head, shown)


def _over_disk_limit(row: Row, limit: str) -> float | None:
    """Return the bandwidth over a disk's limit; None if the contestant keeps no files."""
    contestant = CONTESTANTS.get(row.contestant)
    return None if contestant and not contestant.has_files else row.over_disk_limit(limit)


def _faults(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.faults))
    shown = [[r.contestant, r.model, *(r.faults.get(name, "-") for name in names)] for r in rows]
    return table(["after a fault", "model", *names], shown)


def _over_memcpy(row: Row) -> str:
    if row.has_disturbed_memcpy:
        return f"no: memcpy varied {row.spread['memcpy']:.0f}-fold"
    return _number(row.memcpy_ratio)


def _with_error(row: Row) -> str:
    error = "" if row.added_error_s is None else f" ± {_ms(row.added_error_s)}"
    return _ms(row.added_s) + error


def _tokens(row: Row) -> str:
    return " / ".join(str(row.restored_tokens.get(how, "-")) for how in _HOW)


def _answers(row: Row) -> str:
    if not row.distances:
        return "-"
    wrong = [name for name in row.distances if name in row.wrong]
    if wrong:
        return f"WRONG: {', '.join(wrong)}"
    return f"right, {max(row.distances.values()):.1e} of {row.power:.1e}"


def _is_rival(row: Row) -> bool:
    return row.contestant not in CONTESTANTS or CONTESTANTS[row.contestant].is_rival


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.1f}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
