"""A sweep as pictures: figures over what was swept, a line for each policy."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ownership.simulator.sweeps.summary import Row

_DRAWN = (
    ("ttft_p50_s", "TTFT, median, s"),
    ("ttft_p95_s", "TTFT, 95 %, s"),
    ("task_wait_mean_s", "task time that the fleet took, mean, s"),
    ("saved_tokens", "prompt tokens not computed"),
    ("duplicate_factor", "copies of what is held"),
    ("network_bytes", "bytes over the network"),
)


class Picture(NamedTuple):
    """A drawing to put into an HTML file."""

    title: str
    svg: str


def pictures(rows: Sequence[Row]) -> Iterator[Picture]:
    """One for each thing that has more than one value; bars where nothing was swept."""
    swept = {
        name: {v for row in rows for n, v in row.setting if n == name} for name in _names(rows)
    }
    drawn = [name for name, values in swept.items() if len(values) > 1]
    for name in drawn:
        yield Picture(f"Over {name}", _drawn(rows, name))
    if not drawn:
        yield Picture("Policies", _drawn(rows, None))


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name, _ in row.setting))


def _drawn(rows: Sequence[Row], name: str | None) -> str:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    # Text of a drawing carries dates and random names unless told not to.
    with mpl.rc_context({"svg.hashsalt": "simulation", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(2, 3, figsize=(13, 7), squeeze=False)
        for axis, (quantity, title) in zip(axes.flat, _DRAWN, strict=True):
            policies = list(dict.fromkeys(row.policy for row in rows))
            for at, policy in enumerate(policies):
                mine = [r for r in rows if r.policy == policy and quantity in r.figures]
                if not mine:
                    continue  # the oracle has no such bound
                found = [row.figures[quantity] for row in mine]
                if name is None:
                    axis.bar(at, found[0].mean, yerr=found[0].half, label=policy)
                    axis.set_xticks([])
                else:
                    for places, values, halves in _lines(mine, name, quantity):
                        axis.errorbar(
                            places, values, yerr=halves, marker="o", markersize=3, linewidth=1,
                            capsize=2, label=policy, color=f"C{at % 10}",
                        )  # fmt: skip
                    axis.set_xlabel(name, fontsize=8)
            axis.set_title(title, fontsize=9)
            axis.set_ylim(bottom=0)
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.3)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        once = dict(zip(labels, handles, strict=True))
        figure.legend(once.values(), once.keys(), loc="lower center", ncols=4, fontsize=8)
        figure.tight_layout(rect=(0, 0.08, 1, 1))
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        plt.close(figure)
    drawing = text.getvalue()
    return drawing[drawing.index("<svg") :]


def _lines(
    rows: Sequence[Row], name: str, quantity: str
) -> Iterator[tuple[list[float], list[float], list[float]]]:
    """Over `name`, a line for each combination of everything else."""
    others: dict[tuple[tuple[str, float], ...], list[tuple[float, float, float]]] = {}
    for row in rows:
        rest = tuple(x for x in row.setting if x[0] != name)
        found = row.figures[quantity]
        others.setdefault(rest, []).append((dict(row.setting)[name], *found))
    for line in others.values():
        places, values, halves = zip(*sorted(line), strict=True)
        yield list(places), list(values), list(halves)
