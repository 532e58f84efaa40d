"""Plots a calibration: observed against predicted times to first token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetero_connector.engine.calibration import Calibration


def plot(calibration: Calibration, path: Path) -> Path | None:
    """Write a PNG and return its path; None if matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 4))
    for context, label in ((False, "computed whole"), (True, "continued from a prefix")):
        chosen = [s for s in calibration.samples if bool(s.context_tokens) is context]
        observed = [1e3 * s.observed_s for s in chosen]
        axis.scatter(observed, [1e3 * s.predicted_s for s in chosen], s=12, label=label)
    limits = [1e3 * f(s.observed_s for s in calibration.samples) for f in (min, max)]
    axis.plot(limits, limits, color="grey", linewidth=1)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("observed time to first token, ms")
    axis.set_ylabel("predicted time to first token, ms")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path
