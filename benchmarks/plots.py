"""PNG plots of the figures against their goals."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS


def bars(name: str, panels: Sequence[tuple[str, str, Mapping[str, float], float | None]]) -> Path:
    """One panel each: (title, unit, label -> value, goal drawn as a line or None)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.4), squeeze=False)
    for axis, (title, unit, values, goal) in zip(axes[0], panels, strict=True):
        axis.bar(list(values), list(values.values()), color="#4477aa", width=0.6)
        if goal is not None:
            axis.axhline(goal, color="#cc3311", linestyle="--", linewidth=1, label=f"goal {goal:g}")
            axis.legend(fontsize=7)
        axis.set_title(title, fontsize=9)
        axis.set_ylabel(unit, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.tick_params(axis="x", rotation=30)
    return _save(figure, name)


def lines(name: str, panels: Sequence[tuple[str, str, str, Mapping[str, Any]]]) -> Path:
    """One panel each: (title, x label, y label, curve -> [(x, y), ...]); x is logarithmic."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.4), squeeze=False)
    for axis, (title, x_label, y_label, curves) in zip(axes[0], panels, strict=True):
        for label, points in curves.items():
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(x_label, fontsize=8)
        axis.set_ylabel(y_label, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=6)
    return _save(figure, name)


def errorbars(
    name: str,
    panels: Sequence[tuple[str, str, str, Mapping[str, Sequence[tuple[float, float, float]]]]],
) -> Path:
    """One panel each: (title, x label, y label, curve -> [(x, y, +-), ...]); both logarithmic."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), squeeze=False)
    for axis, (title, x_label, y_label, curves) in zip(axes[0], panels, strict=True):
        for label, points in curves.items():
            x, y, half = zip(*sorted(points), strict=True)
            axis.errorbar(x, y, yerr=half, marker="o", markersize=3, capsize=2, label=label)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(x_label, fontsize=8)
        axis.set_ylabel(y_label, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=6)
    return _save(figure, name)


def scatter(
    name: str,
    panels: Sequence[tuple[str, str, str, Mapping[str, tuple[float, float]], Any]],
) -> Path:
    """One panel each: (title, x label, y label, label -> (x, y), [(x, y), ...] joined by a line).

    x is logarithmic.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6), squeeze=False)
    for axis, (title, x_label, y_label, points, line) in zip(axes[0], panels, strict=True):
        axis.plot(*zip(*line, strict=True), color="#bbbbbb", linewidth=1, zorder=0)
        for label, (x, y) in points.items():
            axis.scatter([x], [y], s=18, color="#cc3311" if label == "adaptive" else "#4477aa")
            axis.annotate(label, (x, y), xytext=(3, 3), textcoords="offset points", fontsize=7)
        axis.set_xscale("log")
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(x_label, fontsize=8)
        axis.set_ylabel(y_label, fontsize=8)
        axis.tick_params(labelsize=7)
    return _save(figure, name)


def heat_maps(
    name: str, title: str, panels: Sequence[tuple[str, Sequence[Any], Sequence[str], Any]]
) -> Path:
    """One panel each: (title, column labels, row labels, rows of values around 1)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False)
    for axis, (panel, columns, rows, values) in zip(axes[0], panels, strict=True):
        axis.imshow(values, cmap="RdYlGn_r", vmin=0.5, vmax=1.5, aspect="auto")
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7)
        axis.set_xticks(range(len(columns)), labels=list(map(str, columns)), fontsize=7)
        axis.set_yticks(range(len(rows)), labels=list(rows), fontsize=7)
        axis.set_title(panel, fontsize=9)
    figure.suptitle(title, fontsize=9)
    return _save(figure, name)


def _save(figure: Any, name: str) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{time.strftime('%Y-%m-%d')}.png"
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    return path
