"""PNG plots of the figures, a panel for each group, written to `results/<name>-<date>.png`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS


def bars(name: str, panels: Sequence[tuple[str, str, Mapping[str, float], float | None]]) -> Path:
    """Draw panels of (title, unit, value by label, goal); a goal is drawn as a line."""
    figure, axes = _figure(len(panels), 4.4, 2.6)
    for axis, (title, unit, values, goal) in zip(axes, panels, strict=True):
        drawn = axis.barh(list(values), list(values.values()), color="#4477aa", height=0.6)
        axis.bar_label(drawn, fmt=_short, padding=2, fontsize=7)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        if goal is not None:
            axis.axvline(goal, color="#cc3311", linestyle="--", linewidth=1, label=f"goal {goal:g}")
            axis.legend(fontsize=7)
        _label(axis, title, unit, "")
    return _save(figure, name)


def lines(name: str, panels: Sequence[tuple[str, str, str, Mapping[str, Any]]]) -> Path:
    """Draw panels of (title, x label, y label, [(x, y), ...] by curve); x is logarithmic."""
    figure, axes = _figure(len(panels), 4.2, 3.4)
    for axis, (title, x_label, y_label, curves) in zip(axes, panels, strict=True):
        for label, points in curves.items():
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=6)
        _label(axis, title, x_label, y_label)
    return _save(figure, name)


def scatter(
    name: str,
    panels: Sequence[tuple[str, str, str, Mapping[str, tuple[float, float]], Any]],
) -> Path:
    """Draw panels of (title, x label, y label, (x, y) by label, line); x is logarithmic.

    `line`: points [(x, y), ...] that a grey line connects.
    """
    figure, axes = _figure(len(panels), 4.6, 3.6)
    for axis, (title, x_label, y_label, points, line) in zip(axes, panels, strict=True):
        axis.plot(*zip(*line, strict=True), color="#bbbbbb", linewidth=1, zorder=0)
        for label, (x, y) in points.items():
            axis.scatter([x], [y], s=18, color="#cc3311" if label == "adaptive" else "#4477aa")
            axis.annotate(label, (x, y), xytext=(3, 3), textcoords="offset points", fontsize=7)
        axis.set_xscale("log")
        _label(axis, title, x_label, y_label)
    return _save(figure, name)


def heat_maps(
    name: str, title: str, panels: Sequence[tuple[str, Sequence[Any], Sequence[str], Any]]
) -> Path:
    """Draw panels of (title, column labels, row labels, rows of values around 1)."""
    figure, axes = _figure(len(panels), 5.5, 4)
    for axis, (panel, columns, rows, values) in zip(axes, panels, strict=True):
        axis.imshow(values, cmap="RdYlGn_r", vmin=0.5, vmax=1.5, aspect="auto")
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7)
        axis.set_xticks(range(len(columns)), labels=list(map(str, columns)), fontsize=7)
        axis.set_yticks(range(len(rows)), labels=list(rows), fontsize=7)
        axis.set_title(panel, fontsize=9)
    figure.suptitle(title, fontsize=9)
    return _save(figure, name)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _figure(panels: int, width: float, height: float) -> tuple[Any, Any]:
    """Return a figure and the axes of its panels in one row, each `width` inches wide."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, panels, figsize=(width * panels, height), squeeze=False)
    return figure, axes[0]


def _label(axis: Any, title: str, x_label: str, y_label: str) -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(x_label, fontsize=8)
    axis.set_ylabel(y_label, fontsize=8)
    axis.tick_params(labelsize=7)


def _save(figure: Any, name: str) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{time.strftime('%Y-%m-%d')}.png"
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    return path
