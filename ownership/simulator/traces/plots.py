"""Statistics of a trace as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ownership.simulator.traces.samples import Samples
from ownership.simulator.traces.statistics import TraceStatistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS = 2000


def plot(found: TraceStatistics, path: Path) -> None:
    """Write a PNG: distributions of lengths, growth, think times and reuse, as cumulative shares.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(12, 6.4), squeeze=False)
    panels = _panels(found)
    for axis, (title, unit, curves) in zip(axes.flat, panels, strict=True):
        for label, samples in curves.items():
            _cumulative(axis, samples, label)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(unit, fontsize=8)
        axis.set_ylim(0, 1.02)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=7)
    hits = f"{found.hit_rate:.1%} of the tokens of {found.num_requests:,} prompts"
    figure.suptitle(f"{Path(found.source).name}: an endless cache hits {hits}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=90, format="png")
    plt.close(figure)


def _panels(found: TraceStatistics) -> list[tuple[str, str, Mapping[str, Samples]]]:
    think = {trigger.value: samples for trigger, samples in found.think_s.items()}
    return [
        ("lengths", "tokens", {"prompt": found.input_tokens, "answer": found.output_tokens}),
        (
            "per turn",
            "tokens",
            {"growth of the prompt": found.growth_tokens, "new to the cache": found.new_tokens},
        ),
        ("think time, by what is waited for", "s", think),
        ("time since last use, of tokens that come back", "s", {"": found.reuse_s}),
        (
            "distinct tokens since last use, of tokens that come back",
            "tokens",
            {"": found.reuse_distance_tokens},
        ),
        (
            "repetition: tokens shared by at most so many prompts",
            "prompts",
            {"distinct tokens": found.prefixes.distinct, "prompt tokens": found.prefixes.prompt},
        ),
    ]


def _cumulative(axis: Axes, samples: Samples, label: str) -> None:
    """The share of the weight up to each value; logarithmic, but for what is near zero."""
    if not samples.total:
        return
    shares = np.cumsum(samples.weights) / samples.total
    points = np.unique(np.linspace(0, len(shares) - 1, _MOST_POINTS).astype(int))
    axis.step(samples.values[points], shares[points], where="post", linewidth=1, label=label)
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xlim(left=0)  # what shrinks is the height at which a curve begins
